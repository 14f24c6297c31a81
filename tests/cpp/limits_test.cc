// That the loops behind `kt bench limits` run and read what they claim; how fast is nobody's business here.
#include "moe/limits.h"

#include <cstdint>
#include <cstdio>
#include <memory>
#include <vector>

#include "check.h"
#include "kernels/dispatch.h"
#include "kernels/kernel.h"

namespace {

template <typename Body>
void for_every_variant(const Body& body) {
  for (const kt::VariantInfo& variant : kt::variants()) {
    const kt::IsaTable* table = nullptr;
    if (!variant.runnable || !kt::select(variant.name, &table).is_ok()) {
      std::printf("  %s does not run here\n", variant.name);
      continue;
    }
    body(variant, table->limits);
  }
}

std::unique_ptr<kt::Pool> make_pool(std::vector<int> node_threads) {
  kt::PoolConfig config;
  for (int threads : node_threads) {
    kt::PoolNode node;
    node.threads = threads;
    config.nodes.push_back(node);
  }
  std::unique_ptr<kt::Pool> pool;
  KT_CHECK(kt::Pool::create(config, &pool).is_ok());
  return pool;
}

KT_TEST(read_stream_reads_every_byte_and_no_other) {
  for_every_variant([](const kt::VariantInfo&, const kt::LimitLoops& loops) {
    for (size_t bytes : {0, 1, 7, 63, 64, 255, 256, 257, 777}) {
      std::vector<uint8_t> data(bytes + 2, 0);
      data.front() = data.back() = 1;  // outside
      KT_CHECK_EQ(loops.read_stream(data.data() + 1, bytes), uint64_t{0});
      for (size_t i = 1; i <= bytes; ++i) {
        data[i] = 1;
        KT_CHECK(loops.read_stream(data.data() + 1, bytes) != 0);
        data[i] = 0;
      }
    }
  });
}

KT_TEST(peak_loops_count_what_they_do) {
  for_every_variant([](const kt::VariantInfo& variant, const kt::LimitLoops& loops) {
    KT_CHECK_EQ(loops.fma_f32 == nullptr, variant.emulated);
    for (kt::PeakLoop loop : {loops.fma_f32, loops.dot_bf16, loops.dot_u8s8, loops.tile_bf16, loops.tile_u8s8,
                              loops.tile_bf16_l1, loops.tile_u8s8_l1, loops.tile_bf16_2x2, loops.tile_u8s8_2x2}) {
      if (!loop) continue;
      KT_CHECK(loop(1) > 0);
      KT_CHECK_EQ(loop(7), 7 * loop(1));
      KT_CHECK_EQ(loop(0), uint64_t{0});
    }
  });
}

KT_TEST(measuring_works_with_uneven_nodes) {
  for (const auto& shape : {std::vector<int>{1}, {2}, {1, 2}}) {
    auto pool = make_pool(shape);
    for_every_variant([&](const kt::VariantInfo&, const kt::LimitLoops& loops) {
      kt::ReadProbe probe;
      KT_CHECK(kt::ReadProbe::create(*pool, 100'000, &probe).is_ok());
      double speed = 0, peak = 0;
      KT_CHECK(probe.measure(loops, 0.001, &speed).is_ok() && speed > 0);
      if (loops.fma_f32) KT_CHECK(kt::measure_peak(*pool, loops.fma_f32, 0.001, &peak).is_ok() && peak > 0);
    });
  }
}

}  // namespace
