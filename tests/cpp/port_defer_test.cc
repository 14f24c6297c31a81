// Experts put off to the next layer, on host memory. Streams and graphs repeat the pass in their own tests.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "check.h"
#include "runtime/call.h"
#include "runtime_case.h"

namespace {

using namespace kt_test;
using kt::Status;

Rows step(kt::Port& port, const Batch& batch) {
  Rows out(batch.input.size());
  KT_CHECK(port.submit(batch.address()).is_ok());
  KT_CHECK(sync(port, out).is_ok());
  return out;
}

Batch odd_batch(int tokens, uint64_t seed) {
  Batch batch(tokens, seed);
  Random random(seed);
  for (size_t i = 0; i < batch.ids.size(); ++i) {
    if (random.below(6) == 0) batch.ids[i] = random.below(2) ? -1 : kExperts + random.below(3);
    if (random.below(4) == 0) batch.weights[i] = 0.5f;  // ties
  }
  return batch;
}

KT_TEST(deferral_splits_as_defined) {
  Model model(1);
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  for (int seed = 0; seed < 200; ++seed) {
    Random random(seed);
    Batch batch = odd_batch(1 + random.below(6), seed);
    if (seed % 3 == 0) {
      for (float& weight : batch.weights) {
        const int kind = random.below(8);
        if (kind < 3) weight = kind == 0 ? nan : kind == 1 ? inf : -inf;
      }
    }
    batch.copy_ids();
    std::unique_ptr<kt::Stage> stage;
    KT_CHECK(kt::Stage::create({batch.tokens, kTopK, kHidden, true}, nullptr, &stage).is_ok());
    std::copy(batch.weights.begin(), batch.weights.end(), stage->weights());
    for (int id_bytes : {4, 8}) {
      if (id_bytes == 4) {
        std::copy(batch.ids32.begin(), batch.ids32.end(), reinterpret_cast<int32_t*>(stage->ids()));
      } else {
        std::copy(batch.ids.begin(), batch.ids.end(), reinterpret_cast<int64_t*>(stage->ids()));
      }
      for (int deferred = 1; deferred <= kTopK; ++deferred) {
        kt::CallScratch scratch(kExperts, kTopK);
        kt::Call call{model.layers[0].get(), stage.get(), batch.tokens, id_bytes, deferred, &scratch};
        kt::split_experts(call);
        const std::vector<uint8_t> expected = deferred_of(batch, deferred);
        for (int e = 0; e < kExperts; ++e) KT_CHECK(scratch.now[e] == expected[e] && scratch.later[e] == !expected[e]);
      }
    }
  }
}

KT_TEST(deferral_pass_by_pass) {
  constexpr int kLayers = 4;
  Model model(kLayers);
  for (int deferred : {0, 1, 2, kTopK}) {
    Ports ports(model, deferred);
    for (int tokens : {1, 6, 17}) {
      Reference reference{model, deferred, {}};
      const Batch batch = odd_batch(tokens, tokens);
      std::vector<double> sum(batch.input.size()), plain(batch.input.size());
      for (int layer = 0; layer < kLayers; ++layer) {
        const Rows out = step(ports[layer], batch);
        KT_CHECK(out == reference.step(layer, batch, layer == kLayers - 1));
        const Rows whole = model.forward(layer, batch);
        for (size_t i = 0; i < out.size(); ++i) {
          sum[i] += kt::bf16_to_f32(out[i]);
          plain[i] += kt::bf16_to_f32(whole[i]);
        }
      }
      // Nothing is lost or done twice: only two more roundings per layer, of rows of about this size.
      double worst = 0, size = 0;
      for (size_t i = 0; i < sum.size(); ++i) {
        worst = std::max(worst, std::fabs(sum[i] - plain[i]));
        size = std::max(size, std::fabs(plain[i]));
      }
      KT_CHECK(size > 0.01 && worst <= size * 3 * kLayers / 256);
      if (deferred == 0) KT_CHECK(worst == 0);
    }
  }
}

KT_TEST(deferral_stops_at_the_last_layer_in_whatever_order_they_came) {
  Model model(3);
  for (const std::vector<int>& indices : {std::vector{10, 2, 5}, std::vector{2, 5, 10}, std::vector{-3, 100, 7}}) {
    kt::Session session(model.queue.get(), kHidden, kTopK);
    std::vector<std::unique_ptr<kt::Port>> ports;
    for (int i = 0; i < 3; ++i) ports.push_back(make_port(session, *model.layers[i], indices[i], 2));
    std::vector<int> order = {0, 1, 2};
    std::sort(order.begin(), order.end(), [&](int a, int b) { return indices[a] < indices[b]; });
    const Batch batch(5, 3);
    for (int pass = 0; pass < 2; ++pass) {
      Reference reference{model, 2, {}};
      for (int i : order) KT_CHECK(step(*ports[i], batch) == reference.step(i, batch, i == order.back()));
    }
    ports[order[2]].reset();  // now another one is the last
    Reference reference{model, 2, {}};
    for (int i : {order[0], order[1]}) KT_CHECK(step(*ports[i], batch) == reference.step(i, batch, i == order[1]));
  }
}

KT_TEST(deferral_nan_weights_stay_in_their_token) {
  Model model(2);
  Ports ports(model, 1);
  Batch batch(3, 5);
  std::fill(batch.weights.begin(), batch.weights.end(), 0.25f);
  batch.weights[kTopK + 2] = std::numeric_limits<float>::quiet_NaN();
  for (int i = 0; i < 3 * kTopK; ++i) batch.ids[i] = i % kExperts;
  const Rows out = step(ports[0], batch);
  for (int t = 0; t < 3; ++t) {
    const Rows row(out.begin() + t * kHidden, out.begin() + (t + 1) * kHidden);
    KT_CHECK(all_nan(row) == (t == 1));  // at once, not put off
  }
}

KT_TEST(deferral_of_a_pass_given_up_does_not_leak) {
  Model model(3);
  Ports ports(model, kTopK);
  const Batch first(4, 1), second(4, 2);
  const auto pass = [&](const Batch& batch) {
    Reference reference{model, kTopK, {}};
    for (int layer = 0; layer < 3; ++layer)
      KT_CHECK(step(ports[layer], batch) == reference.step(layer, batch, layer == 2));
  };
  (void)step(ports[0], first);  // then nothing
  pass(second);
  (void)step(ports[0], first);
  KT_CHECK(ports[1].submit(first.address()).is_ok());  // and no sync
  pass(second);
  KT_CHECK(ports[0].submit(first.address()).is_ok());
  pass(second);
  (void)step(ports[0], first);
  (void)step(ports[1], first);
  pass(Batch(7, 3));  // another number of tokens, from the first layer on: no error
  KT_CHECK(ports.session.stage_count() <= 8);
}

KT_TEST(deferral_given_up_keeps_what_its_calls_still_read) {
  Model model(3);
  Ports ports(model, kTopK);
  const Batch batch(4, 1), larger(20, 2);  // which the stage of layer 0 has no room for
  Door door;
  (void)step(ports[0], batch);
  KT_CHECK(model.queue->sync().is_ok());
  model.queue->submit(Door::task, &door);
  KT_CHECK(ports[1].submit(batch.address()).is_ok());  // will read what layer 0 left
  KT_CHECK(ports[1].submit(larger.address()).is_ok());
  ports.session.clear_stages(false);
  door.open.store(true);
  Rows out(larger.input.size());
  KT_CHECK(sync(ports[1], out).is_ok());
}

KT_TEST(deferral_refuses_another_number_of_tokens) {
  Model model(3);
  Ports ports(model, 1);
  const Batch four(4, 1), five(5, 2);
  (void)step(ports[0], four);
  const Status status = ports[1].submit(five.address());
  KT_CHECK(fails(status, "layer 0 ") && fails(status, "layer 1 ") && fails(status, "4 tokens") && fails(status, "5"));
  KT_CHECK(!ports[1].in_flight());
  Reference reference{model, 1, {}};
  for (int layer = 0; layer < 3; ++layer) KT_CHECK(step(ports[layer], five) == reference.step(layer, five, layer == 2));
}

KT_TEST(deferral_error_of_the_later_part_comes_out_of_the_sync_that_takes_it) {
  Model model(0);
  kt::Layer& first = model.add_layer();
  kt::Layer& second = model.add_layer();
  KT_CHECK(second.fill_random(2).is_ok());
  std::vector<uint16_t> weights(64 * kHidden, 0x3c00);
  for (int e = 0; e < kExperts; ++e) {
    if (e != 5) KT_CHECK(first.load_expert(e, {weights.data(), weights.data(), weights.data()}).is_ok());
  }
  Ports ports(model, 1);
  Batch batch(1, 1);
  batch.ids = {1, 2, 3, 5};
  batch.weights = {0.4f, 0.3f, 0.2f, 0.1f};  // 5 is put off
  Rows out(batch.input.size());
  KT_CHECK(ports[0].submit(batch.address()).is_ok());
  KT_CHECK(sync(ports[0], out).is_ok());
  KT_CHECK(ports[1].submit(batch.address()).is_ok());
  KT_CHECK(fails(sync(ports[1], out), "expert 5"));
  KT_CHECK(!ports[1].in_flight());
  KT_CHECK(first.fill_random(1).is_ok());
  Reference reference{model, 1, {}};
  for (int layer : {0, 1}) KT_CHECK(step(ports[layer], batch) == reference.step(layer, batch, layer == 1));
}

}  // namespace
