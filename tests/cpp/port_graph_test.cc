// Ports captured into CUDA graphs, on the fake driver, and how long what they use lives.
#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/lease.h"
#include "stream_case.h"

namespace {

using namespace kt_test;
using kt::Status;
using kt::cuda::LeaseId;
using kt::cuda::take_ended_leases;

// A pass over the layers of a model as a graph, with the buffers it reads and writes.
class Captured {
 public:
  Captured(const FakeCuda& cuda, void* stream, Ports& ports, const Batch& batch, int mode = kCaptureGlobal)
      : cuda_(cuda), batch_(std::make_unique<Batch>(batch)) {
    cuda.fake_begin_capture(stream, mode);
    for (auto& port : ports.ports) {
      outs_.emplace_back(batch.tokens);
      LeaseId of_layer = 0;
      KT_CHECK(port->submit_on(*cuda.driver, stream, batch_->address(), &of_layer).is_ok());
      KT_CHECK(of_layer != 0 && (lease_ == 0 || of_layer == lease_));
      lease_ = of_layer;
      KT_CHECK(sync_on(cuda, stream, *port, outs_.back()).is_ok());
    }
    graph_ = cuda.fake_end_capture(stream);
    KT_CHECK(graph_ != nullptr);
  }
  ~Captured() { destroy(); }
  Captured(Captured&& other)
      : cuda_(other.cuda_),
        batch_(std::move(other.batch_)),
        outs_(std::move(other.outs_)),
        lease_(other.lease_),
        graph_(std::exchange(other.graph_, nullptr)) {}

  void launch(void* stream) { cuda_.fake_launch(graph_, stream); }
  void destroy() {
    if (graph_) cuda_.fake_destroy_graph(std::exchange(graph_, nullptr));
  }
  LeaseId lease() const { return lease_; }
  Batch& batch() { return *batch_; }
  bool is_right(Model& model, int deferred) {
    Reference reference{model, deferred, {}};
    bool right = true;
    for (size_t i = 0; i < outs_.size(); ++i) {
      right &= outs_[i].rows() == reference.step(static_cast<int>(i), *batch_, i + 1 == outs_.size());
      outs_[i].clear();
    }
    return right;
  }

 private:
  const FakeCuda& cuda_;
  std::unique_ptr<Batch> batch_;
  std::vector<DeviceRows> outs_;
  LeaseId lease_ = 0;
  void* graph_ = nullptr;
};

KT_TEST(graph_replays_of_several_sizes_with_calls_between) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(3);
    for (int deferred : {0, 1, kTopK}) {
      Ports ports(model, deferred);
      const FakeStream stream(cuda), other(cuda);
      std::vector<Captured> graphs;
      for (int tokens : {16, 7, 3, 1}) graphs.emplace_back(cuda, stream, ports, Batch(tokens, tokens));
      const Batch eager(5, 99);
      const DeviceRows out(5);
      Random random(deferred);
      for (int i = 0; i < 18; ++i) {
        Captured& graph = graphs[random.below(4)];
        graph.batch().refill(1000 + i);
        void* on = i % 5 == 4 ? other : stream;  // a graph may run on another stream than it was captured from
        graph.launch(on);
        graph.launch(on);  // the second time it starts where the first one ended
        if (i % 3 == 0) {
          Reference reference{model, deferred, {}};
          for (int layer = 0; layer < 3; ++layer) {
            call_on(cuda, stream, ports[layer], eager, out);
            stream.sync();
            KT_CHECK(out.rows() == reference.step(layer, eager, layer == 2));
          }
        }
        stream.sync();
        other.sync();
        KT_CHECK(graph.is_right(model, deferred));
        if (i == 9) ports.session.clear_stages(false);
      }
      graphs.clear();
      for (LeaseId lease : take_ended_leases()) ports.session.end_lease(lease);
    }
    KT_CHECK_EQ(cuda.fake_pinned(), 0u);
  });
}

KT_TEST(graphs_that_run_at_once_share_nothing) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(3);
    Ports ports(model, 1);
    const FakeStream a(cuda), b(cuda);
    Captured one(cuda, a, ports, Batch(4, 1)), two(cuda, a, ports, Batch(4, 2));
    for (int i = 0; i < 30; ++i) {
      one.launch(a);
      two.launch(b);
      a.sync();
      b.sync();
      KT_CHECK(one.is_right(model, 1) && two.is_right(model, 1));
    }
  });
}

KT_TEST(graph_memory_is_made_in_every_mode_of_capture) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(2);
    Ports ports(model);
    const FakeStream stream(cuda);
    const int modules = cuda.fake_calls("cuModuleLoadData");
    for (int mode : {kCaptureGlobal, kCaptureThreadLocal, kt::cuda::kCaptureRelaxed}) {
      Captured graph(cuda, stream, ports, Batch(4, 1), mode);
      graph.launch(stream);
      stream.sync();
      KT_CHECK(graph.is_right(model, 0));
    }
    // Another thread captures while this one makes memory for its own calls.
    const FakeStream other(cuda);
    cuda.fake_begin_capture(other, kCaptureGlobal);
    const Batch batch(17, 1);
    const DeviceRows out(17);
    std::thread([&] { call_on(cuda, stream, ports[0], batch, out); }).join();
    void* graph = cuda.fake_end_capture(other);
    KT_CHECK(graph != nullptr);
    cuda.fake_destroy_graph(graph);
    stream.sync();
    KT_CHECK(out.rows() == model.forward(0, batch));
    KT_CHECK_EQ(cuda.fake_calls("cuModuleLoadData"), modules);
  });
}

KT_TEST(graph_captured_before_any_call_uses_the_copy_engine) {
  const FakeCuda& cuda = new_cuda();
  const NoViolations none(cuda);
  use(ways()[0]);
  cuda.fake_set_context(77);  // where nothing was loaded
  Model model(1);
  Ports ports(model);
  const FakeStream stream(cuda);
  const int modules = cuda.fake_calls("cuModuleLoadData");
  Captured graph(cuda, stream, ports, Batch(4, 1));
  KT_CHECK_EQ(cuda.fake_calls("cuModuleLoadData"), modules);
  graph.launch(stream);
  stream.sync();
  KT_CHECK(graph.is_right(model, 0));
}

KT_TEST(lease_ends_once_when_the_graph_is_gone) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(2);
    Ports ports(model, 1);
    const FakeStream stream(cuda);
    (void)take_ended_leases();
    Captured kept(cuda, stream, ports, Batch(4, 1));
    const size_t before = ports.session.stage_count(), pinned = cuda.fake_pinned();
    Captured graph(cuda, stream, ports, Batch(4, 2));
    KT_CHECK(graph.lease() != kept.lease());
    KT_CHECK(ports.session.stage_count() == 2 * before);
    Door door;
    cuda.fake_run(stream, Door::kernel, &door);
    graph.launch(stream);
    graph.destroy();
    KT_CHECK(take_ended_leases().empty());  // it is still to run
    door.open.store(true);
    stream.sync();
    KT_CHECK(graph.is_right(model, 1));
    KT_CHECK(take_ended_leases() == std::vector<LeaseId>{graph.lease()});
    KT_CHECK(take_ended_leases().empty());
    ports.session.end_lease(graph.lease());
    KT_CHECK_EQ(ports.session.stage_count(), before);
    KT_CHECK_EQ(cuda.fake_pinned(), pinned);
    ports.session.end_lease(graph.lease());
    KT_CHECK_EQ(ports.session.stage_count(), before);
    kept.launch(stream);
    stream.sync();
    KT_CHECK(kept.is_right(model, 1));
  });
}

// What was put off by the last call of a graph is computed when the graph has ended.
KT_TEST(lease_that_ended_waits_for_the_queue) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(2);
    Ports ports(model, kTopK);
    const FakeStream stream(cuda);
    for (int i = 0; i < 20; ++i) {
      const Batch batch(kMaxTokens, i);
      const DeviceRows out(kMaxTokens);
      LeaseId lease = 0;
      cuda.fake_begin_capture(stream, kCaptureGlobal);
      KT_CHECK(ports[0].submit_on(*cuda.driver, stream, batch.address(), &lease).is_ok());
      if (i % 2) KT_CHECK(sync_on(cuda, stream, ports[0], out).is_ok());
      void* graph = cuda.fake_end_capture(stream);
      cuda.fake_launch(graph, stream);
      stream.sync();
      cuda.fake_destroy_graph(graph);
      ports.session.end_lease(lease);
      KT_CHECK_EQ(ports.session.stage_count(), 0u);
    }
  });
}

KT_TEST(lease_ends_while_a_stream_waits_for_the_queue) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(2);
    Ports ports(model);
    const FakeStream stream(cuda), other(cuda);
    const Batch batch(3, 1);
    const DeviceRows out(3);
    Captured graph(cuda, stream, ports, batch);
    Door door;
    model.queue->submit(Door::task, &door);
    call_on(cuda, other, ports[0], batch, out);
    std::thread opener([&] {
      usleep(10'000);
      door.open.store(true);
    });
    graph.destroy();
    cuda.fake_set_waiting_allocation(true);
    ports.session.end_lease(graph.lease());
    cuda.fake_set_waiting_allocation(false);
    opener.join();
    other.sync();
    KT_CHECK(out.rows() == model.forward(0, batch));
  });
}

KT_TEST(graph_branches_share_nothing) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(2);
    Ports ports(model);
    const FakeStream a(cuda), b(cuda);
    const Batch of_a(4, 1), of_b(4, 2);
    const DeviceRows out_a(4), out_b(4);
    Door door;
    cuda.fake_begin_capture(a, kCaptureGlobal);
    cuda.fake_fork_capture(a, b);
    KT_CHECK(submit_on(cuda, a, ports[0], of_a).is_ok());
    KT_CHECK(fails(sync_on(cuda, b, ports[0], out_a), "same cuda_stream"));
    cuda.fake_run(a, Door::kernel, &door);  // until the other branch has been through
    KT_CHECK(sync_on(cuda, a, ports[0], out_a).is_ok());
    KT_CHECK(submit_on(cuda, b, ports[1], of_b).is_ok());
    KT_CHECK(sync_on(cuda, b, ports[1], out_b).is_ok());
    cuda.fake_run(b, [](void* context) { static_cast<Door*>(context)->open.store(true); }, &door);
    void* graph = cuda.fake_end_capture(a);
    for (int i = 0; i < 3; ++i) {
      door.open.store(false);
      cuda.fake_launch(graph, a);
      a.sync();
      KT_CHECK(out_a.rows() == model.forward(0, of_a) && out_b.rows() == model.forward(1, of_b));
    }
    cuda.fake_destroy_graph(graph);
    for (LeaseId lease : take_ended_leases()) ports.session.end_lease(lease);
    KT_CHECK_EQ(ports.session.stage_count(), 0u);
  });
}

KT_TEST(graph_call_belongs_to_its_capture) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(1);
    Ports ports(model);
    const FakeStream stream(cuda);
    const Batch batch(4, 1);
    const DeviceRows out(4);
    KT_CHECK(submit_on(cuda, stream, ports[0], batch).is_ok());
    cuda.fake_begin_capture(stream, kCaptureGlobal);
    KT_CHECK(fails(sync_on(cuda, stream, ports[0], out), "same cuda_stream"));
    KT_CHECK(submit_on(cuda, stream, ports[0], batch).is_ok());
    cuda.fake_destroy_graph(cuda.fake_end_capture(stream));
    KT_CHECK(fails(sync_on(cuda, stream, ports[0], out), "same cuda_stream"));
    cuda.fake_begin_capture(stream, kCaptureGlobal);
    KT_CHECK(fails(sync_on(cuda, stream, ports[0], out), "same cuda_stream"));
    cuda.fake_destroy_graph(cuda.fake_end_capture(stream));
    call_on(cuda, stream, ports[0], batch, out);
    stream.sync();
    KT_CHECK(out.rows() == model.forward(0, batch));
    for (LeaseId lease : take_ended_leases()) ports.session.end_lease(lease);
  });
}

KT_TEST(graph_error_comes_out_of_the_next_call) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(0);
    kt::Layer& layer = model.add_layer();
    Ports ports(model);
    const FakeStream stream(cuda);
    Captured graph(cuda, stream, ports, Batch(4, 1));
    const Batch batch(2, 1);
    const DeviceRows out(2);
    graph.launch(stream);
    graph.launch(stream);
    stream.sync();
    KT_CHECK(fails(submit_on(cuda, stream, ports[0], batch), "has no weights"));
    KT_CHECK(layer.fill_random(1).is_ok());
    call_on(cuda, stream, ports[0], batch, out);
    graph.launch(stream);
    stream.sync();
    KT_CHECK(out.rows() == model.forward(0, batch));
    KT_CHECK(graph.is_right(model, 0));
  });
}

KT_TEST(graph_capture_that_fails_leaves_nothing) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(2);
    Ports ports(model, 2);
    const FakeStream stream(cuda);
    const Batch batch(4, 1);
    int failed = 0;
    for (const char* function : {"cuLaunchKernel", "cuMemcpyDtoHAsync_v2", "cuMemHostAlloc", "cuLaunchHostFunc",
                                 "cuStreamWriteValue32_v2", "cuUserObjectCreate", "cuGraphRetainUserObject"}) {
      (void)take_ended_leases();
      cuda.fake_begin_capture(stream, kCaptureGlobal);
      cuda.fake_fail(function, 0, kLaunchFailed);
      LeaseId lease = 0;
      const Status status = ports[0].submit_on(*cuda.driver, stream, batch.address(), &lease);
      cuda.fake_fail(function, 0, 0);
      failed += !status.is_ok();
      cuda.fake_destroy_graph(cuda.fake_end_capture(stream));
      for (LeaseId ended : take_ended_leases()) ports.session.end_lease(ended);
      KT_CHECK(status.is_ok() || !ports[0].in_flight());
      KT_CHECK_EQ(ports.session.stage_count(), 0u);
      Captured graph(cuda, stream, ports, batch);
      graph.launch(stream);
      stream.sync();
      KT_CHECK(graph.is_right(model, 2));
      graph.destroy();
      ports.session.end_lease(graph.lease());
    }
    KT_CHECK(failed >= 4);
  });
}

KT_TEST(graph_needs_a_driver_that_tells_when_it_is_gone) {
  const FakeCuda& cuda = new_cuda();
  const NoViolations none(cuda);
  kt::cuda::Driver older = *cuda.driver;
  older.cuStreamGetCaptureInfo_v2 = nullptr;
  Model model(1);
  Ports ports(model);
  const FakeStream stream(cuda);
  const Batch batch(4, 1);
  const DeviceRows out(4);
  LeaseId lease = 0;
  KT_CHECK(ports[0].submit_on(older, stream, batch.address(), &lease).is_ok());
  KT_CHECK(ports[0].sync_on(older, stream, 4, out.address()).is_ok());
  stream.sync();
  KT_CHECK(out.rows() == model.forward(0, batch));
  cuda.fake_begin_capture(stream, kCaptureGlobal);
  KT_CHECK(fails(ports[0].submit_on(older, stream, batch.address(), &lease), "11.3"));
  cuda.fake_destroy_graph(cuda.fake_end_capture(stream));
}

}  // namespace
