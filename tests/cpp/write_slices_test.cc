// Layer::write_slices gives back the bytes of a checkpoint, whatever the shards and the ranks, and nothing beside them.
#include "moe/write_slices.h"

#include <memory>
#include <string>
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

using Bytes = std::vector<uint8_t>;

struct Shape {
  Format format;
  int H, I, group, block_rows;
};

// A matrix [n, k] of a file, without NaN.
struct Matrix {
  Matrix(const Shape& shape, int rows, int depth, Random& random)
      : n(rows), k(depth), bits(kt::row_bits(shape.format)), group(shape.group), block_rows(shape.block_rows) {
    const kt::GroupedKind* kind = kt::grouped_kind(shape.format);
    codes.resize(static_cast<size_t>(n) * k * bits / 8);
    for (uint8_t& c : codes) c = static_cast<uint8_t>(random.below(256));
    if (!kind) return;
    for (uint8_t& c : codes) {
      if (bits == 8 && (c & 0x7f) == 0x7f) c = 0;
    }
    per_row = kind->scales == kt::Scales::none;
    width = per_row ? 4 : kt::scale_bytes(kind->scales);
    scales.resize(static_cast<size_t>(per_row ? n : kt::div_up(n, block_rows) * kt::div_up(k, group)) * width);
    for (uint8_t& s : scales) s = static_cast<uint8_t>(random.below(96));  // also as a byte of a float: not large
  }

  kt::GroupedMatrix view() const {
    kt::GroupedMatrix m;
    m.codes = codes.data();
    m.code_pitch = static_cast<size_t>(k) * bits / 8;
    m.rows = reinterpret_cast<const float*>(scales.data());
    m.row_step = 1;
    if (per_row) return m;
    m.scales = scales.data();
    m.scale_row = static_cast<size_t>(kt::div_up(k, group)) * width;
    m.scale_group = width;
    m.block_rows = block_rows;
    return m;
  }

  // Rows n0..n1 and columns k0..k1.
  void append_codes(int n0, int n1, int k0, int k1, Bytes* out) const {
    for (int i = n0; i < n1; ++i) {
      const auto row = codes.begin() + static_cast<size_t>(i) * k * bits / 8;
      out->insert(out->end(), row + static_cast<ptrdiff_t>(k0) * bits / 8, row + static_cast<ptrdiff_t>(k1) * bits / 8);
    }
  }
  void append_scales(bool as_bf16, int n0, int n1, int k0, int k1, Bytes* out) const {
    if (!width) return;
    const int per_line = per_row ? 1 : kt::div_up(k, group);
    const int first = per_row ? 0 : k0 / group, last = per_row ? 1 : kt::div_up(k1, group);
    for (int s = per_row ? n0 : n0 / block_rows; s < (per_row ? n1 : kt::div_up(n1, block_rows)); ++s) {
      for (int g = first; g < last; ++g) {
        const uint8_t* at = scales.data() + (static_cast<size_t>(s) * per_line + g) * width;
        const uint16_t half = kt::f32_to_bf16(std::ldexp(1.0f, *at - 127));
        const auto* from = as_bf16 ? reinterpret_cast<const uint8_t*>(&half) : at;
        out->insert(out->end(), from, from + (as_bf16 ? 2 : width));
      }
    }
  }

  int n, k, bits, group, block_rows, width = 0;
  bool per_row = false;
  Bytes codes, scales;
};

struct Case {
  Case(const Shape& of, int nodes) : shape(of), random(nodes) {
    kt::PoolConfig pool_config;
    pool_config.nodes.resize(nodes);
    KT_CHECK(kt::Pool::create(pool_config, &pool).is_ok());
    kt::LayerConfig config;
    config.set_format(shape.format);
    config.num_experts = 2;
    config.top_k = config.max_tokens = 1;
    config.hidden = shape.H;
    config.intermediate = shape.I;
    config.group = shape.group;
    const kt::IsaTable* isa = kt_test::variants().run.front().table;
    KT_CHECK(kt::Layer::create(std::make_shared<kt::Workspace>(pool.get()), isa, config, &layer).is_ok());
    for (int e = 0; e < 2; ++e) {
      matrices.emplace_back(shape, shape.I, shape.H, random);
      matrices.emplace_back(shape, shape.I, shape.H, random);
      matrices.emplace_back(shape, shape.H, shape.I, random);
      const Matrix* m = &matrices[3 * e];
      const auto bf16 = [](const Matrix& x) { return reinterpret_cast<const uint16_t*>(x.codes.data()); };
      KT_CHECK((shape.format == Format::bf16 ? layer->load_expert(e, {bf16(m[0]), bf16(m[1]), bf16(m[2])})
                                             : layer->load_grouped(e, {m[0].view(), m[1].view(), m[2].view()}))
                   .is_ok());
    }
    layer->mask()[1] = 1;
  }

  // w13_weight, w13_scale, w2_weight, w2_scale of a rank.
  std::vector<Bytes> expected(int expert, int ranks, int rank) const {
    const Matrix *gate = &matrices[3 * expert], *up = gate + 1, *down = gate + 2;
    const int begin = rank * (shape.I / ranks), end = begin + shape.I / ranks;
    const bool as_bf16 = shape.format == Format::mxfp4;
    std::vector<Bytes> all(4);
    for (const Matrix* m : {gate, up}) {
      m->append_codes(begin, end, 0, shape.H, &all[0]);
      m->append_scales(as_bf16, begin, end, 0, shape.H, &all[1]);
    }
    down->append_codes(0, shape.H, begin, end, &all[2]);
    down->append_scales(as_bf16, 0, shape.H, begin, end, &all[3]);
    return all;
  }

  void check(int expert, int ranks) {
    std::vector<std::unique_ptr<Guarded<uint8_t>>> memory;
    std::vector<kt::SliceBuffers> buffers(ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      kt::SliceBytes bytes;
      KT_CHECK(layer->slice_bytes(expert, ranks, rank, &bytes).is_ok());
      const auto make = [&](size_t size) {
        memory.push_back(std::make_unique<Guarded<uint8_t>>(size));
        return size ? memory.back()->data() : nullptr;
      };
      buffers[rank] = {make(bytes.w13_weight), make(bytes.w13_scale), make(bytes.w2_weight), make(bytes.w2_scale)};
    }
    KT_CHECK(layer->write_slices(expert, buffers.data(), ranks).is_ok());
    for (int rank = 0; rank < ranks; ++rank) {
      const std::vector<Bytes> wanted = expected(expert, ranks, rank);
      for (int i = 0; i < 4; ++i) {
        const Guarded<uint8_t>& got = *memory[4 * rank + i];
        KT_CHECK_EQ(got.size(), wanted[i].size());
        KT_CHECK(Bytes(got.begin(), got.end()) == wanted[i]);
        KT_CHECK(got.front_intact());
      }
    }
  }

  Shape shape;
  Random random;
  std::unique_ptr<kt::Pool> pool;
  std::unique_ptr<kt::Layer> layer;
  std::vector<Matrix> matrices;
};

void run(const Shape& shape, const std::vector<int>& nodes, const std::vector<int>& all_ranks) {
  for (int count : nodes) {
    Case c(shape, count);
    for (int ranks : all_ranks) {
      kt_test::now_running("write_slices %s %dx%d group=%d rows=%d nodes=%d ranks=%d", kt::format_name(shape.format),
                           shape.H, shape.I, shape.group, shape.block_rows, count, ranks);
      const int before = kt_test::failures_of_current_test;
      for (int expert : {0, 1}) c.check(expert, ranks);
      if (kt_test::failures_of_current_test > before) kt_test::fail(__FILE__, __LINE__, kt_test::running);
    }
  }
}

bool says(const kt::Status& status, kt::Status::Code code, const char* words) {
  return status.code() == code && status.message().find(words) != std::string::npos;
}

}  // namespace

KT_TEST(every_format_gives_its_bytes_back) {
  for (int f = 0; f < kt::kFormatCount; ++f) {
    const auto format = static_cast<Format>(f);
    if (!kt::has_slices(format)) continue;
    const bool grouped = kt::grouped_kind(format) && kt::grouped_kind(format)->scales != kt::Scales::none;
    for (int group : grouped ? std::vector<int>{32, 128} : std::vector<int>{0})
      run({format, 328, 576, group, 1}, {1, 2, 3, 5}, {1, 2, 3, 4, 8});
  }
}

KT_TEST(slices_smaller_than_a_unit_of_depth) {
  for (Format format : {Format::bf16, Format::fp8, Format::rawint4})
    run({format, 34, 72, 32, 1}, {1, 2}, {1, 3, 9, 36});
}

// Parts of 24, 60 and more rows: a block may have rows of one, two or all ranks, and a rank ends within a block.
KT_TEST(blocks_that_ranks_share) {
  for (int block_rows : {128, 64, 24}) {
    for (int group : {32, 64, 128, 256, 512})
      run({Format::fp8, 200, 480, group, block_rows}, {1, 3, 8}, {1, 2, 3, 4, 8, 20, 480});
  }
}

KT_TEST(what_cannot_be_written) {
  using Code = kt::Status::Code;
  Case c({Format::mxfp4, 64, 192, 32, 1}, 1);
  const auto& layer = *c.layer;
  KT_CHECK(says(layer.check_slices(2, 1), Code::invalid, "expert 2 is not in 0..1"));
  KT_CHECK(says(layer.check_slices(-1, 1), Code::invalid, "expert -1"));
  KT_CHECK(says(layer.check_slices(0, 0), Code::invalid, "cannot be cut into 0"));
  KT_CHECK(says(layer.check_slices(0, -2), Code::invalid, "cannot be cut into -2"));
  KT_CHECK(
      says(layer.check_slices(0, 5), Code::invalid, "into 5 equal parts of whole bytes; it can into 1, 2, 3, 4, 6"));
  KT_CHECK(says(layer.check_slices(0, 64), Code::invalid, "of whole bytes"));
  kt::LayerConfig config = layer.config();
  for (Format format : {Format::int8, Format::int4, Format::int4g, Format::nvfp4, Format::int4z}) {
    config.set_format(format);
    std::unique_ptr<kt::Layer> other;
    KT_CHECK(kt::Layer::create(std::make_shared<kt::Workspace>(c.pool.get()), kt_test::variants().run.front().table,
                               config, &other)
                 .is_ok());
    KT_CHECK(says(other->check_slices(0, 1), Code::unsupported, "are bf16, fp8, fp8c, mxfp8, mxfp4, rawint4"));
  }
  config.set_format(Format::bf16);
  std::unique_ptr<kt::Layer> empty;
  KT_CHECK(kt::Layer::create(std::make_shared<kt::Workspace>(c.pool.get()), kt_test::variants().run.front().table,
                             config, &empty)
               .is_ok());
  const kt::SliceBuffers none;
  KT_CHECK(says(empty->write_slices(1, &none, 1), Code::invalid, "expert 1 of this layer has no weights"));
}
