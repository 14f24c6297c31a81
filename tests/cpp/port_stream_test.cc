// Ports in CUDA streams, on the fake driver.
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "stream_case.h"

namespace {

using namespace kt_test;
using kt::Status;

KT_TEST(stream_call_computes_what_the_layer_does) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(2);
    Ports ports(model);
    const FakeStream stream(cuda);
    for (int tokens : {1, 3, 17, kMaxTokens}) {
      for (int id_bytes : {4, 8}) {
        for (int layer : {0, 1}) {
          Batch batch(tokens, tokens + layer);
          const Rows expected = model.forward(layer, batch);
          const DeviceRows out(tokens);
          KT_CHECK(submit_on(cuda, stream, ports[layer], batch, id_bytes).is_ok());
          scribble_on(cuda, stream, batch);
          KT_CHECK(sync_on(cuda, stream, ports[layer], out).is_ok());
          KT_CHECK(!ports[layer].in_flight());
          stream.sync();
          KT_CHECK(out.rows() == expected);
        }
      }
    }
    KT_CHECK_EQ(ports.session.stage_count(), 3u);  // of 16, 32 and 64 tokens
  });
}

KT_TEST(stream_zero_is_a_stream) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(1);
    Ports ports(model);
    const Batch batch(4, 1);
    const DeviceRows out(4);
    call_on(cuda, nullptr, ports[0], batch, out);
    cuda.fake_sync_stream(nullptr);
    KT_CHECK(out.rows() == model.forward(0, batch));
  });
}

KT_TEST(stream_copies_take_the_way_they_should) {
  const FakeCuda& cuda = new_cuda();
  const NoViolations none(cuda);
  Model model(1);
  Ports ports(model);
  const FakeStream stream(cuda);
  const Batch batch(4, 1);
  const DeviceRows out(4);
  for (const Way& way : ways()) {
    if (&way.cuda != &cuda) continue;
    use(way);
    const auto counted = [&](const char* name) { return way.cuda.fake_calls(name); };
    const int kernels = counted("cuLaunchKernel"), in = counted("cuMemcpyDtoHAsync_v2"),
              out_copies = counted("cuMemcpyHtoDAsync_v2"), callbacks = counted("cuLaunchHostFunc"),
              writes = counted("cuStreamWriteValue32_v2"), waits = counted("cuStreamWaitValue32_v2");
    call_on(cuda, stream, ports[0], batch, out);
    stream.sync();
    KT_CHECK_EQ(counted("cuLaunchKernel") - kernels, way.kernel ? 2 : 0);
    KT_CHECK_EQ(counted("cuMemcpyDtoHAsync_v2") - in, way.kernel ? 0 : 3);
    KT_CHECK_EQ(counted("cuMemcpyHtoDAsync_v2") - out_copies, way.kernel ? 0 : 1);
    // The kernel rings by itself.
    KT_CHECK_EQ(counted("cuStreamWriteValue32_v2") - writes, way.kernel || !way.memory_operations ? 0 : 2);
    KT_CHECK_EQ(counted("cuStreamWaitValue32_v2") - waits, way.memory_operations ? 1 : 0);
    KT_CHECK_EQ(counted("cuLaunchHostFunc") - callbacks, way.memory_operations ? 0 : way.kernel ? 1 : 2);
  }
  // An input that lies at an odd address is no work for the kernel.
  use(ways()[0]);
  std::vector<uint16_t> odd(batch.input.size() + 1);
  std::copy(batch.input.begin(), batch.input.end(), odd.begin() + 1);
  kt::Tokens tokens = batch.address();
  tokens.input = reinterpret_cast<uint64_t>(odd.data() + 1);
  const int kernels = cuda.fake_calls("cuLaunchKernel");
  kt::cuda::LeaseId lease = 1;
  KT_CHECK(ports[0].submit_on(*cuda.driver, stream, tokens, &lease).is_ok());
  KT_CHECK(lease == 0);
  KT_CHECK(sync_on(cuda, stream, ports[0], out).is_ok());
  stream.sync();
  KT_CHECK_EQ(cuda.fake_calls("cuLaunchKernel") - kernels, 1);
  KT_CHECK(out.rows() == model.forward(0, batch));
}

KT_TEST(stream_result_comes_in_the_order_of_the_stream) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(1);
    Ports ports(model);
    const FakeStream stream(cuda);
    const Batch batch(4, 1);
    const DeviceRows out(4);
    Door before, behind;
    cuda.fake_run(stream, Door::kernel, &before);
    KT_CHECK(submit_on(cuda, stream, ports[0], batch).is_ok());
    cuda.fake_run(stream, Door::kernel, &behind);
    KT_CHECK(sync_on(cuda, stream, ports[0], out).is_ok());
    before.open.store(true);
    usleep(5'000);
    KT_CHECK(out.untouched());
    behind.open.store(true);
    stream.sync();
    KT_CHECK(out.rows() == model.forward(0, batch));
  });
}

KT_TEST(stream_calls_wait_for_nobody_and_reuse_memory) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(3);
    Ports ports(model);
    const FakeStream stream(cuda);
    Door door;
    cuda.fake_run(stream, Door::kernel, &door);
    std::vector<Batch> batches;
    std::vector<DeviceRows> outs;
    for (int i = 0; i < 30; ++i) {
      batches.emplace_back(1 + i % 16, i);
      outs.emplace_back(batches[i].tokens);
    }
    for (int i = 0; i < 30; ++i) call_on(cuda, stream, ports[i % 3], batches[i], outs[i]);
    KT_CHECK_EQ(ports.session.stage_count(), 1u);
    door.open.store(true);
    stream.sync();
    for (int i = 0; i < 30; ++i) KT_CHECK(outs[i].rows() == model.forward(i % 3, batches[i]));
  });
}

KT_TEST(stream_does_not_share_memory_with_another) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(2);
    Ports ports(model);
    const FakeStream a(cuda), b(cuda);
    std::vector<Batch> batches;
    std::vector<DeviceRows> outs;
    for (int i = 0; i < 60; ++i) {
      batches.emplace_back(1 + i % 5, i);
      outs.emplace_back(batches[i].tokens);
    }
    Door door;
    // One after the other on the host, while the first stream has yet to copy its result.
    KT_CHECK(submit_on(cuda, a, ports[0], batches[0]).is_ok());
    cuda.fake_run(a, Door::kernel, &door);
    KT_CHECK(sync_on(cuda, a, ports[0], outs[0]).is_ok());
    call_on(cuda, b, ports[1], batches[1], outs[1]);
    b.sync();
    for (int i = 2; i < 60; i += 2) {
      // Both are in flight at once, and given back in either order.
      KT_CHECK(submit_on(cuda, a, ports[0], batches[i]).is_ok());
      KT_CHECK(submit_on(cuda, b, ports[1], batches[i + 1]).is_ok());
      const bool a_first = i % 4 == 0;
      if (a_first) KT_CHECK(sync_on(cuda, a, ports[0], outs[i]).is_ok());
      KT_CHECK(sync_on(cuda, b, ports[1], outs[i + 1]).is_ok());
      if (!a_first) KT_CHECK(sync_on(cuda, a, ports[0], outs[i]).is_ok());
      if (i == 20) door.open.store(true);
    }
    KT_CHECK_EQ(ports.session.stage_count(), 2u);
    a.sync();
    b.sync();
    for (int i = 0; i < 60; ++i) KT_CHECK(outs[i].rows() == model.forward(i % 2, batches[i]));
  });
}

KT_TEST(stream_deferral_pass_by_pass) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(3);
    for (int deferred : {1, kTopK}) {
      Ports ports(model, deferred);
      const FakeStream streams[] = {FakeStream(cuda), FakeStream(cuda)};
      // Passes of two streams, layer by layer in turn: what one leaves is not the other's.
      const Batch batches[] = {Batch(5, 1), Batch(3, 2)};
      for (int round = 0; round < 5; ++round) {
        Reference references[] = {{model, deferred, {}}, {model, deferred, {}}};
        std::vector<DeviceRows> outs;
        for (int layer = 0; layer < 3; ++layer) {
          for (int s : {0, 1}) {
            outs.emplace_back(batches[s].tokens);
            call_on(cuda, streams[s], ports[layer], batches[s], outs.back());
          }
        }
        for (const FakeStream& stream : streams) stream.sync();
        for (int i = 0; i < 6; ++i)
          KT_CHECK(outs[i].rows() == references[i % 2].step(i / 2, batches[i % 2], i / 2 == 2));
      }
      for (const FakeStream& stream : streams) stream.sync();
    }
  });
}

KT_TEST(stream_and_host_calls_of_one_session) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(2);
    Ports ports(model, kTopK);
    const FakeStream stream(cuda);
    const Batch batch(5, 1);
    Rows host(batch.input.size());
    const DeviceRows out(5), last(5);
    for (int round = 0; round < 10; ++round) {
      Reference reference{model, kTopK, {}};
      call_on(cuda, stream, ports[0], batch, out);
      KT_CHECK(ports[0].submit(batch.address()).is_ok());
      KT_CHECK(sync(ports[0], host).is_ok());
      KT_CHECK(host == reference.step(0, batch, false));
      KT_CHECK(ports[1].submit(batch.address()).is_ok());
      KT_CHECK(sync(ports[1], host).is_ok());
      const Rows expected = reference.step(1, batch, true);
      KT_CHECK(host == expected);
      call_on(cuda, stream, ports[1], batch, last);
      stream.sync();
      KT_CHECK(last.rows() == expected);
    }
  });
}

KT_TEST(stream_sync_belongs_to_its_submit) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(1);
    Ports ports(model);
    const FakeStream a(cuda), b(cuda);
    const Batch batch(4, 1);
    const DeviceRows out(4), few(3);
    Rows host(batch.input.size());
    KT_CHECK(fails(sync_on(cuda, a, ports[0], out), "nothing was submitted"));
    KT_CHECK(submit_on(cuda, a, ports[0], batch).is_ok());
    KT_CHECK(fails(sync_on(cuda, b, ports[0], out), "same cuda_stream"));
    KT_CHECK(fails(sync_on(cuda, a, ports[0], few), "4 tokens"));
    KT_CHECK(fails(sync(ports[0], host), "CUDA"));
    KT_CHECK(sync_on(cuda, a, ports[0], out).is_ok());
    a.sync();
    KT_CHECK(out.rows() == model.forward(0, batch));
    KT_CHECK(ports[0].submit(batch.address()).is_ok());
    KT_CHECK(fails(sync_on(cuda, a, ports[0], out), "CPU"));
    KT_CHECK(sync(ports[0], host).is_ok());
    KT_CHECK(host == out.rows());
  });
}

KT_TEST(stream_call_that_was_given_up_disturbs_nobody) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(1);
    Ports ports(model);
    const FakeStream stream(cuda);
    const Batch first(4, 1), second(4, 2);
    for (bool blocked : {false, true, false}) {
      const DeviceRows out(4);
      Door door;
      if (blocked) cuda.fake_run(stream, Door::kernel, &door);
      for (int i = 0; i < 3; ++i) KT_CHECK(submit_on(cuda, stream, ports[0], first).is_ok());
      if (!blocked) ports.session.finish_calls_of(model.layers[0].get());  // so that its memory serves again
      KT_CHECK(submit_on(cuda, stream, ports[0], second).is_ok());
      KT_CHECK(sync_on(cuda, stream, ports[0], out).is_ok());
      door.open.store(true);
      stream.sync();
      KT_CHECK(out.rows() == model.forward(0, second));
    }
  });
}

KT_TEST(stream_error_of_a_call_comes_out_once) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(1);
    model.add_layer();
    Ports ports(model);
    const FakeStream stream(cuda);
    const Batch batch(3, 1);
    const DeviceRows out(3), right(3);
    for (int round = 0; round < 20; ++round) {
      const bool at_sync = round % 2;
      Door door;
      cuda.fake_run(stream, Door::kernel, &door);
      call_on(cuda, stream, ports[1], batch, out);
      if (at_sync) KT_CHECK(submit_on(cuda, stream, ports[0], batch).is_ok());
      door.open.store(true);
      stream.sync();
      KT_CHECK(all_nan(out.rows()));
      if (at_sync) {
        KT_CHECK(fails(sync_on(cuda, stream, ports[0], right), "has no weights"));
        KT_CHECK(ports[0].in_flight());
      } else {
        KT_CHECK(fails(submit_on(cuda, stream, ports[0], batch), "has no weights"));
        KT_CHECK(!ports[0].in_flight());
        KT_CHECK(submit_on(cuda, stream, ports[0], batch).is_ok());
      }
      KT_CHECK(sync_on(cuda, stream, ports[0], right).is_ok());
      stream.sync();
      KT_CHECK(right.rows() == model.forward(0, batch));
    }
    KT_CHECK(ports.session.take_error().is_ok() && model.queue->sync().is_ok());
  });
}

KT_TEST(stream_port_waits_for_its_calls_when_destroyed) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(1);
    const Batch batch(3, 1);
    const DeviceRows out(3);
    const FakeStream stream(cuda);
    Ports ports(model);
    Door door;
    cuda.fake_run(stream, Door::kernel, &door);
    KT_CHECK(submit_on(cuda, stream, ports[0], batch).is_ok());
    KT_CHECK(sync_on(cuda, stream, ports[0], out).is_ok());
    KT_CHECK(submit_on(cuda, stream, ports[0], batch).is_ok());
    std::thread opener([&] {
      usleep(10'000);
      door.open.store(true);
    });
    ports.ports[0].reset();
    KT_CHECK(door.open.load());
    opener.join();
    stream.sync();
    KT_CHECK(out.rows() == model.forward(0, batch));
  });
}

KT_TEST(stream_memory_is_cleared_when_streams_are_idle) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(2);
    Ports ports(model);
    const FakeStream stream(cuda), other(cuda);
    const Batch batch(3, 1);
    const DeviceRows out(3), in_flight(3);
    for (int round = 0; round < 20; ++round) {
      call_on(cuda, stream, ports[0], batch, out);
      ports.session.clear_stages(false);
      KT_CHECK(submit_on(cuda, other, ports[1], batch).is_ok());
      stream.sync();
      ports.session.finish_calls_of(model.layers[0].get());
      ports.session.clear_stages(true);
      KT_CHECK_EQ(ports.session.stage_count(), 1u);  // of the call that has no sync yet
      KT_CHECK(sync_on(cuda, other, ports[1], in_flight).is_ok());
      other.sync();
      ports.session.finish_calls_of(model.layers[1].get());
      ports.session.clear_stages(true);
      KT_CHECK_EQ(ports.session.stage_count(), 0u);
      KT_CHECK_EQ(cuda.fake_pinned(), 0u);
      KT_CHECK(out.rows() == model.forward(0, batch) && in_flight.rows() == model.forward(1, batch));
    }
  });
}

// The driver may wait for the GPU when it pins or unpins memory, and the GPU for the queue: whoever calls it must not
// hold what the queue needs.
KT_TEST(stream_memory_is_made_while_another_stream_waits_for_the_queue) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(2);
    Ports ports(model);
    const FakeStream a(cuda), b(cuda);
    const Batch batch(3, 1);
    const DeviceRows out_a(3), out_b(3);
    Door door;
    model.queue->submit(Door::task, &door);
    call_on(cuda, a, ports[0], batch, out_a);
    std::thread opener([&] {
      usleep(10'000);
      door.open.store(true);
    });
    cuda.fake_set_waiting_allocation(true);
    call_on(cuda, b, ports[1], batch, out_b);
    cuda.fake_set_waiting_allocation(false);
    opener.join();
    a.sync();
    b.sync();
    KT_CHECK(out_a.rows() == model.forward(0, batch) && out_b.rows() == model.forward(1, batch));
  });
}

}  // namespace
