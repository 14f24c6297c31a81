// Calls of the driver that fail: what was asked for is as if it had not been, and asking again works.
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "stream_case.h"

namespace {

using namespace kt_test;
using kt::Status;

const std::vector<std::string> kFunctions = {
    "cuLaunchKernel",         "cuMemcpyDtoHAsync_v2",    "cuMemcpyHtoDAsync_v2",     "cuStreamWriteValue32_v2",
    "cuStreamWaitValue32_v2", "cuLaunchHostFunc",        "cuMemHostAlloc",           "cuStreamIsCapturing",
    "cuUserObjectCreate",     "cuGraphRetainUserObject", "cuStreamGetCaptureInfo_v2"};

// Asks until it is granted; the failure must name its function.
template <class Ask>
void insist(const std::string& function, int* failed, const Ask& ask) {
  for (int i = 0; i < 3; ++i) {
    const Status status = ask();
    if (status.is_ok()) return;
    ++*failed;
    KT_CHECK(fails(status, function));
  }
  KT_CHECK(!"it goes on failing");
}

// With what is put off in the pass: the layer after a failure still gets the rows of the layer before it.
KT_TEST(failure_leaves_a_pass_as_it_was) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(3);
    const Batch batch(4, 1);
    int all_failed = 0;
    for (const std::string& function : kFunctions) {
      for (int after = 0; after < 7; ++after) {
        const FakeStream stream(cuda);
        Ports ports(model, 2);
        Reference reference{model, 2, {}};
        std::vector<DeviceRows> outs;
        Door door;
        if (after % 2) cuda.fake_run(stream, Door::kernel, &door);
        cuda.fake_fail(function.c_str(), after, kLaunchFailed);
        int failed = 0;
        for (int layer = 0; layer < 3; ++layer) {
          outs.emplace_back(4);
          insist(function, &failed, [&] { return submit_on(cuda, stream, ports[layer], batch); });
          insist(function, &failed, [&] { return sync_on(cuda, stream, ports[layer], outs.back()); });
        }
        cuda.fake_fail(function.c_str(), 0, 0);
        door.open.store(true);
        KT_CHECK(failed <= 1);
        all_failed += failed;
        for (auto& port : ports.ports) port.reset();
        stream.sync();
        for (int layer = 0; layer < 3; ++layer)
          KT_CHECK(outs[layer].rows() == reference.step(layer, batch, layer == 2));
      }
    }
    KT_CHECK(all_failed >= 15);
  });
}

// Between the bell and the wait the call runs, the sync fails half way, and the port is used for something else.
KT_TEST(failure_of_a_sync_leaves_no_wait_that_nobody_answers) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(1);
    const Batch first(4, 1), second(4, 2);
    for (const std::string function : {"cuLaunchKernel", "cuMemcpyHtoDAsync_v2", "cuStreamWriteValue32_v2"}) {
      const FakeStream stream(cuda);
      Ports ports(model);
      const DeviceRows none(4), out(4);
      Door door;
      KT_CHECK(submit_on(cuda, stream, ports[0], first).is_ok());
      cuda.fake_run(stream, Door::kernel, &door);
      ports.session.finish_calls_of(model.layers[0].get());
      cuda.fake_fail(function.c_str(), 0, kLaunchFailed);
      (void)sync_on(cuda, stream, ports[0], none).is_ok();
      cuda.fake_fail(function.c_str(), 0, 0);
      call_on(cuda, stream, ports[0], second, out);
      door.open.store(true);
      stream.sync();
      KT_CHECK(out.rows() == model.forward(0, second));
    }
  });
}

// A caller who does not try again but goes on with the next layer gets no rows that were never computed.
KT_TEST(failure_of_a_layer_leaves_nothing_to_the_next) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(3);
    const FakeStream stream(cuda);
    Ports ports(model, kTopK);
    const Batch batch(4, 1);
    const DeviceRows out(4);
    for (int round = 0; round < 2; ++round) {  // the second time the memory is full of old rows
      for (int layer = 0; layer < 3; ++layer) call_on(cuda, stream, ports[layer], batch, out);
    }
    const char* function = cuda.driver->cuStreamWriteValue32_v2 ? "cuStreamIsCapturing" : "cuMemcpyDtoHAsync_v2";
    for (const char* name : {"cuLaunchKernel", "cuMemcpyDtoHAsync_v2", function}) {
      cuda.fake_fail(name, 0, kLaunchFailed);
      const bool submitted = submit_on(cuda, stream, ports[0], batch).is_ok();
      cuda.fake_fail(name, 0, 0);
      Reference reference{model, kTopK, {}};
      if (submitted) {  // this way does not use the function
        KT_CHECK(sync_on(cuda, stream, ports[0], out).is_ok());
        (void)reference.step(0, batch, false);
      }
      for (int layer : {1, 2}) {
        call_on(cuda, stream, ports[layer], batch, out);
        stream.sync();
        KT_CHECK(out.rows() == reference.step(layer, batch, layer == 2));
      }
    }
  });
}

KT_TEST(failure_of_memory_for_the_host_side) {
  const FakeCuda& cuda = new_cuda();
  const NoViolations none(cuda);
  Model model(1);
  Ports ports(model);
  const FakeStream stream(cuda);
  const Batch batch(4, 1);
  cuda.fake_fail("cuMemHostAlloc", 0, 2);
  KT_CHECK(fails(submit_on(cuda, stream, ports[0], batch), "cuMemHostAlloc"));
  KT_CHECK(!ports[0].in_flight() && ports.session.stage_count() == 0 && cuda.fake_pinned() == 0);
}

}  // namespace
