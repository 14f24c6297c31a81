// Ports on host memory.
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "runtime_case.h"

namespace {

using namespace kt_test;
using kt::Status;

KT_TEST(port_computes_what_the_layer_does) {
  Model model(2);
  Ports ports(model);
  for (int tokens : {1, 3, 16, 17, kMaxTokens}) {
    for (int id_bytes : {4, 8}) {
      for (int layer : {0, 1}) {
        const Batch batch(tokens, tokens + layer);
        Rows out(batch.input.size());
        KT_CHECK(ports[layer].submit(batch.address(id_bytes)).is_ok());
        KT_CHECK(ports[layer].in_flight());
        KT_CHECK(sync(ports[layer], out).is_ok());
        KT_CHECK(!ports[layer].in_flight());
        KT_CHECK(out == model.forward(layer, batch));
      }
    }
  }
}

KT_TEST(port_submit_returns_before_the_work_and_keeps_the_tokens) {
  Model model(1);
  Ports ports(model);
  Batch batch(5, 1);
  const Rows expected = model.forward(0, batch);
  for (int id_bytes : {4, 8}) {
    Batch mine = batch;
    Door door;
    KT_CHECK(model.queue->sync().is_ok());
    model.queue->submit(Door::task, &door);
    KT_CHECK(ports[0].submit(mine.address(id_bytes)).is_ok());
    KT_CHECK(model.queue->pending() == 2);
    mine.scribble();
    door.open.store(true);
    Rows out(mine.input.size());
    KT_CHECK(sync(ports[0], out).is_ok());
    KT_CHECK(out == expected);
  }
}

KT_TEST(port_refuses_nonsense) {
  Model model(1);
  Ports ports(model);
  const Batch batch(3, 1);
  Rows out(batch.input.size());
  KT_CHECK(fails(sync(ports[0], out), "nothing was submitted"));
  for (int count : {0, -1, kMaxTokens + 1}) {
    kt::Tokens tokens = batch.address();
    tokens.count = count;
    KT_CHECK(fails(ports[0].submit(tokens), std::to_string(count)));
  }
  for (uint64_t kt::Tokens::* address : {&kt::Tokens::input, &kt::Tokens::ids, &kt::Tokens::weights}) {
    kt::Tokens tokens = batch.address();
    tokens.*address = 0;
    KT_CHECK(fails(ports[0].submit(tokens), "0"));
  }
  kt::Tokens tokens = batch.address();
  tokens.id_bytes = 2;
  KT_CHECK(fails(ports[0].submit(tokens), "2 bytes"));
  KT_CHECK(!ports[0].in_flight() && ports.session.stage_count() == 0);

  KT_CHECK(ports[0].submit(batch.address()).is_ok());
  Rows short_out(2 * kHidden);
  KT_CHECK(fails(sync(ports[0], short_out), "3 tokens"));
  KT_CHECK(sync(ports[0], out).is_ok());  // still there
  KT_CHECK(out == model.forward(0, batch));
  KT_CHECK(fails(sync(ports[0], out), "nothing was submitted"));
}

KT_TEST(port_create_refuses_what_does_not_fit) {
  Model model(1);
  std::unique_ptr<kt::Port> port;
  kt::Session wide(model.queue.get(), 2 * kHidden, kTopK), many(model.queue.get(), kHidden, kTopK + 1),
      right(model.queue.get(), kHidden, kTopK);
  KT_CHECK(fails(kt::Port::create(&wide, model.layers[0].get(), 0, 0, &port), std::to_string(2 * kHidden)));
  KT_CHECK(fails(kt::Port::create(&many, model.layers[0].get(), 0, 0, &port), "top_k"));
  KT_CHECK(fails(kt::Port::create(&right, model.layers[0].get(), 0, -1, &port), "-1"));
  KT_CHECK(fails(kt::Port::create(&right, model.layers[0].get(), 0, kTopK + 1, &port), "0 to 4"));
  KT_CHECK(port == nullptr);
}

KT_TEST(port_submit_again_gives_the_first_call_up) {
  Model model(1);
  Ports ports(model);
  const Batch first(7, 1), second(5, 2);
  Rows out(second.input.size());
  for (bool blocked : {false, true}) {
    Door door;
    if (blocked) model.queue->submit(Door::task, &door);
    for (int i = 0; i < 3; ++i) KT_CHECK(ports[0].submit(first.address()).is_ok());
    KT_CHECK(ports[0].submit(second.address()).is_ok());
    door.open.store(true);
    KT_CHECK(sync(ports[0], out).is_ok());
    KT_CHECK(out == model.forward(0, second));
  }
  // What was given up serves again when its calls have run: three of 16 tokens and one more, not seven.
  KT_CHECK(ports.session.stage_count() <= 4);
}

KT_TEST(port_sync_can_be_interrupted_and_called_again) {
  Model model(1);
  Ports ports(model);
  const Batch batch(4, 1);
  Rows out = batch.input;
  Door door;
  model.queue->submit(Door::task, &door);
  KT_CHECK(ports[0].submit(batch.address()).is_ok());
  int asked = 0;
  const uint64_t address = reinterpret_cast<uint64_t>(out.data());
  KT_CHECK(fails(ports[0].sync(4, address, [&] { return ++asked < 2; }), "interrupted"));
  KT_CHECK(asked == 2 && ports[0].in_flight());
  KT_CHECK(out == batch.input);
  door.open.store(true);
  KT_CHECK(sync(ports[0], out).is_ok());
  KT_CHECK(out == model.forward(0, batch));
}

KT_TEST(port_many_layers_before_any_sync) {
  Model model(6);
  Ports ports(model);
  std::vector<Batch> batches;
  for (int i = 0; i < 6; ++i) batches.emplace_back(3 + i, 10 + i);
  for (int round = 0; round < 20; ++round) {
    for (int i = 0; i < 6; ++i) KT_CHECK(ports[i].submit(batches[i].address()).is_ok());
    for (int i : {3, 0, 5, 1, 2, 4}) {
      Rows out(batches[i].input.size());
      KT_CHECK(sync(ports[i], out).is_ok());
      KT_CHECK(out == model.forward(i, batches[i]));
    }
  }
  KT_CHECK_EQ(ports.session.stage_count(), 6u);
}

KT_TEST(port_two_sessions_on_one_queue) {
  Model model(2);
  Ports a(model), b(model);
  const Batch of_a(9, 1), of_b(9, 2);
  const Rows expected_a = model.forward(0, of_a), expected_b = model.forward(1, of_b);
  const auto use = [&](kt::Port& port, const Batch& batch, const Rows& expected, int* wrong) {
    Rows out(batch.input.size());
    for (int i = 0; i < 100; ++i) {
      if (!port.submit(batch.address()).is_ok() || !sync(port, out).is_ok() || out != expected) ++*wrong;
    }
  };
  int wrong_a = 0, wrong_b = 0;
  std::thread other([&] { use(b[1], of_b, expected_b, &wrong_b); });
  use(a[0], of_a, expected_a, &wrong_a);
  other.join();
  KT_CHECK(wrong_a == 0 && wrong_b == 0);
}

KT_TEST(port_error_of_a_forward_comes_out_of_its_sync) {
  Model model(1);
  kt::Layer& empty = model.add_layer();
  Ports ports(model);
  const Batch batch(2, 1);
  Rows out(batch.input.size()), other(batch.input.size());
  KT_CHECK(ports[1].submit(batch.address()).is_ok());
  KT_CHECK(ports[0].submit(batch.address()).is_ok());
  KT_CHECK(sync(ports[0], other).is_ok());  // the other layer's error is not this one's
  KT_CHECK(other == model.forward(0, batch));
  KT_CHECK(fails(sync(ports[1], out), "has no weights"));
  KT_CHECK(!ports[1].in_flight());
  KT_CHECK(model.queue->sync().is_ok());
  KT_CHECK(empty.fill_random(9).is_ok());
  KT_CHECK(ports[1].submit(batch.address()).is_ok());
  KT_CHECK(sync(ports[1], out).is_ok());
  KT_CHECK(out == model.forward(1, batch));
}

KT_TEST(port_can_be_destroyed_with_a_call_in_flight) {
  Model model(2);
  Ports ports(model);
  const Batch batch(8, 1);
  Door door;
  model.queue->submit(Door::task, &door);
  KT_CHECK(ports[0].submit(batch.address()).is_ok());
  KT_CHECK(ports[1].submit(batch.address()).is_ok());
  std::thread opener([&] {
    usleep(10'000);
    door.open.store(true);
  });
  ports.ports[0].reset();
  KT_CHECK(door.open.load());
  model.layers[0].reset();  // nothing needs it any more
  Rows out(batch.input.size());
  KT_CHECK(sync(ports[1], out).is_ok());
  KT_CHECK(out == model.forward(1, batch));
  opener.join();
}

KT_TEST(session_clear_frees_what_nobody_uses) {
  Model model(2);
  Ports ports(model);
  const Batch batch(4, 1);
  Rows out(batch.input.size());
  for (int layer : {0, 1}) KT_CHECK(ports[layer].submit(batch.address()).is_ok());
  KT_CHECK(sync(ports[0], out).is_ok());
  KT_CHECK(model.queue->sync().is_ok());
  KT_CHECK_EQ(ports.session.stage_count(), 2u);
  ports.session.clear_stages(false);
  KT_CHECK_EQ(ports.session.stage_count(), 1u);
  KT_CHECK(sync(ports[1], out).is_ok());
  KT_CHECK(out == model.forward(1, batch));
  ports.session.clear_stages(false);
  KT_CHECK_EQ(ports.session.stage_count(), 0u);
}

}  // namespace
