// Layer::load_codes reads exactly the bytes of its parts, and every node gets its share of them.
#include <memory>
#include <vector>

#include "check.h"
#include "formats/codes.h"
#include "guarded.h"
#include "moe/layer.h"
#include "variants.h"

using kt::Format;
using kt_test::Guarded;
using kt_test::Random;

namespace {

struct Matrix {
  Matrix(Format format, const kt::CodeLayout& layout, int rows, int k, Random& random)
      : codes(layout.bytes(rows, k)), scales(4u * rows), steps(static_cast<size_t>(rows) * kt::div_up(k, 32)) {
    for (uint8_t& c : codes) c = static_cast<uint8_t>(random.below(256));
    for (int r = 0; r < rows; ++r) {
      const float d = 1.0f + static_cast<float>(r);
      std::memcpy(scales.data() + 4 * r, &d, 4);
    }
    for (uint8_t& s : steps) s = static_cast<uint8_t>(1 + random.below(16));
    part = {codes.data(), scales.data(), kt::has_steps(format) ? steps.data() : nullptr};
  }

  Guarded<uint8_t> codes, scales, steps;
  kt::CodedPart part;
};

struct Loaded {
  std::vector<float> gate, up, down;
};

// The decoded expert on `nodes` nodes; the same codes for the same seed and parts.
Loaded load(Format format, const char* layout_name, int H, int I, int parts, int nodes) {
  kt_test::now_running("load_codes %s %s %dx%d parts=%d nodes=%d", kt::format_name(format), layout_name, H, I, parts,
                       nodes);
  kt::PoolConfig pool_config;
  pool_config.nodes.resize(nodes);
  std::unique_ptr<kt::Pool> pool;
  KT_CHECK(kt::Pool::create(pool_config, &pool).is_ok());
  kt::LayerConfig config;
  config.set_format(format);
  config.num_experts = config.top_k = config.max_tokens = 1;
  config.hidden = H;
  config.intermediate = I;
  std::unique_ptr<kt::Layer> layer;
  const kt::IsaTable* isa = kt_test::variants().run.front().table;
  KT_CHECK(kt::Layer::create(std::make_shared<kt::Workspace>(pool.get()), isa, config, &layer).is_ok());

  const kt::CodeLayout& layout = *kt::code_layout(layout_name, kt::code_bits(format));
  Random random(parts);
  std::vector<std::unique_ptr<Matrix>> memory;
  kt::CodedExpert coded{&layout, {}, {}, {}};
  const auto add = [&](std::vector<kt::CodedPart>& to, int rows, int k) {
    memory.push_back(std::make_unique<Matrix>(format, layout, rows, k, random));
    to.push_back(memory.back()->part);
  };
  for (int p = 0; p < parts; ++p) {
    add(coded.gate, I / parts, H);
    add(coded.up, I / parts, H);
    add(coded.down, H, I / parts);
  }
  const kt::Status status = layer->load_codes(0, coded);
  if (!status.is_ok()) kt_test::fail(__FILE__, __LINE__, status.message());
  KT_CHECK_EQ(layer->loaded_experts(), 1);
  const size_t size = static_cast<size_t>(H) * I;
  Loaded loaded{std::vector<float>(size), std::vector<float>(size), std::vector<float>(size)};
  KT_CHECK(layer->decode_expert(0, loaded.gate.data(), loaded.up.data(), loaded.down.data()).is_ok());
  return loaded;
}

}  // namespace

KT_TEST(rows_give_every_node_the_same_weights) {
  for (Format format : {Format::int8, Format::int4, Format::int4g}) {
    for (int H : {1, 50, 65}) {
      const Loaded one = load(format, "rows", H, 261, 1, 1);
      for (int nodes : {2, 3, 5}) {
        const Loaded other = load(format, "rows", H, 261, 1, nodes);
        KT_CHECK(one.gate == other.gate && one.up == other.up && one.down == other.down);
      }
    }
  }
}

KT_TEST(blocks_in_parts_give_every_node_the_same_weights) {
  for (Format format : {Format::int8, Format::int4}) {
    for (int parts : {1, 2, 3}) {
      const Loaded one = load(format, "blocks", 128, 128 * parts, parts, parts);
      const Loaded other = load(format, "blocks", 128, 128 * parts, parts, 2 * parts);
      KT_CHECK(one.gate == other.gate && one.up == other.up && one.down == other.down);
    }
  }
}

// All scales of a row agree here, so that uniting them changes nothing.
KT_TEST(int8_parts_may_meet_on_a_node) {
  const Loaded apart = load(Format::int8, "blocks", 64, 192, 3, 3);
  for (int nodes : {1, 2}) {
    const Loaded together = load(Format::int8, "blocks", 64, 192, 3, nodes);
    KT_CHECK(apart.gate == together.gate && apart.up == together.up && apart.down == together.down);
  }
}
