// Long prompts through whole layers: workers that wait for each other's rows, products and sums. Values are checked
// from Python; here it is the bits of every run, and, with a sanitizer, who writes what when.
#include "moe/forward.h"

#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "guarded.h"
#include "variants.h"

using kt::Format;
using kt_test::Random;

namespace {

constexpr int kExperts = 12, kTopK = 3, kHidden = 176, kIntermediate = 96, kTokens = 160;  // 40 rows an expert

struct Batch {
  std::vector<uint16_t> input;
  std::vector<int64_t> ids;
  std::vector<float> weights;

  explicit Batch(Random& random) : input(static_cast<size_t>(kTokens) * kHidden) {
    kt_test::fill_gaussian_bf16(input, random);
    for (int i = 0; i < kTokens * kTopK; ++i) {
      ids.push_back(random.below(kExperts));
      weights.push_back(random.gaussian());
    }
  }
};

struct Case {
  std::unique_ptr<kt::Pool> pool;
  std::unique_ptr<kt::Layer> layer;

  Case(const kt::IsaTable* isa, Format format, const std::vector<int>& threads) {
    kt::PoolConfig config;
    for (const int n : threads) config.nodes.emplace_back().threads = n;
    KT_CHECK(kt::Pool::create(config, &pool).is_ok());
    kt::LayerConfig of;
    of.set_format(format);
    of.num_experts = kExperts;
    of.top_k = kTopK;
    of.hidden = kHidden;
    of.intermediate = kIntermediate;
    of.max_tokens = kTokens;
    KT_CHECK(kt::Layer::create(std::make_shared<kt::Workspace>(pool.get()), isa, of, &layer).is_ok());
    Random random(5);
    std::vector<uint16_t> gate(static_cast<size_t>(kHidden) * kIntermediate), up(gate.size()), down(gate.size());
    for (int e = 0; e < kExperts; ++e) {
      for (auto* matrix : {&gate, &up, &down}) kt_test::fill_gaussian_bf16(*matrix, random);
      KT_CHECK(layer->load_expert(e, {gate.data(), up.data(), down.data()}).is_ok());
    }
  }

  std::vector<uint16_t> run(const Batch& batch) {
    std::vector<uint16_t> out(batch.input.size(), 0x7fc0);
    kt::ForwardArgs args{};
    args.routing = {batch.ids.data(), batch.weights.data(), kTokens, kTopK};
    args.input = batch.input.data();
    args.output = out.data();
    KT_CHECK(layer->forward(args).is_ok());
    return out;
  }
};

}  // namespace

// With one thread there are enough experts for it to quantise the rows of each as soon as they are complete, with eight
// there are not.
KT_TEST(a_long_prompt_has_the_same_bits_in_every_run) {
  Random random(1);
  const Batch batch(random);
  const std::vector<std::vector<int>> pools[] = {{{1}, {3}, {8}}, {{1, 1}, {2, 3}}};
  for (const kt_test::Variant& v : kt_test::variants().run) {
    // One with tiles, which read whole units of rows, and one without.
    if (&v != &kt_test::variants().run.front() && std::string(v.name) != "emu_amx") continue;
    for (const Format format : {Format::bf16, Format::int8, Format::int4}) {
      for (const auto& of_nodes : pools) {
        std::vector<uint16_t> first;
        for (const std::vector<int>& threads : of_nodes) {
          kt_test::now_running("%s %s nodes=%d threads=%d", v.name, kt::format_name(format),
                               static_cast<int>(threads.size()), threads.back());
          Case c(v.table, format, threads);
          for (int run = 0; run < 5; ++run) {
            const std::vector<uint16_t> out = c.run(batch);
            if (first.empty()) first = out;
            KT_CHECK(out == first);
          }
        }
        bool finite = true, zero = true;
        for (const uint16_t x : first) {
          finite &= (x & 0x7f80) != 0x7f80;
          zero &= (x & 0x7fff) == 0;
        }
        KT_CHECK(finite && !zero);
      }
    }
  }
}
