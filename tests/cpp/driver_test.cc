// Opening a CUDA driver that is there, is missing, is something else, or is old.
#include "cuda/driver.h"

#include <atomic>
#include <string>
#include <thread>

#include "check.h"
#include "fake_cuda.h"

namespace {

using namespace kt_test;
using kt::Status;
using kt::cuda::Driver;

KT_TEST(driver_opens_once) {
  const Driver *first = nullptr, *second = nullptr;
  KT_CHECK(kt::cuda::open_driver(&first, KT_FAKE_CUDA).is_ok());
  KT_CHECK(kt::cuda::open_driver(&second, KT_FAKE_CUDA).is_ok());
  KT_CHECK(first && first == second && first->cuStreamWriteValue32_v2 && first->cuUserObjectCreate);
}

KT_TEST(driver_may_be_old) {
  const Driver* driver = nullptr;
  KT_CHECK(kt::cuda::open_driver(&driver, KT_FAKE_CUDA_OLD).is_ok());
  KT_CHECK(driver && !driver->cuStreamWriteValue32_v2 && !driver->cuStreamWaitValue32_v2);
}

KT_TEST(driver_that_is_missing_says_so) {
  const Driver* driver = nullptr;
  for (int i = 0; i < 2; ++i) {
    const Status none = kt::cuda::open_driver(&driver, "libno_such_driver.so");
    KT_CHECK(none.code() == Status::Code::unsupported);
    KT_CHECK(none.message().find("no CUDA driver") != std::string::npos);
    const Status other = kt::cuda::open_driver(&driver, "libm.so.6");
    KT_CHECK(other.code() == Status::Code::unsupported);
    KT_CHECK(other.message().find("cuGetErrorName") != std::string::npos);
  }
  KT_CHECK(driver == nullptr);
}

KT_TEST(driver_errors_name_the_call) {
  const Driver& driver = *new_cuda().driver;
  KT_CHECK(kt::cuda::check(driver, 0, "cuX").is_ok());
  const Status status = kt::cuda::check(driver, kLaunchFailed, "cuX");
  KT_CHECK(status.message().find("cuX failed: CUDA_ERROR_LAUNCH_FAILED") != std::string::npos);
}

// The fake tells misuse from use: the other tests rely on it.
KT_TEST(fake_driver_sees_misuse) {
  const FakeCuda& cuda = new_cuda();
  const Driver& driver = *cuda.driver;
  const FakeStream stream(cuda);
  const auto violations = [&] {
    const char* first;
    return cuda.fake_take_violations(&first);
  };
  KT_CHECK(violations() == 0);

  KT_CHECK(driver.cuLaunchHostFunc(
               stream,
               [](void* context) {
                 int device;
                 static_cast<const Driver*>(context)->cuCtxGetDevice(&device);
               },
               const_cast<Driver*>(&driver)) == 0);
  stream.sync();
  KT_CHECK(violations() == 1);

  void* pinned = nullptr;
  uint64_t device = 0;
  KT_CHECK(driver.cuMemHostAlloc(&pinned, 64, 0) == 0);
  std::atomic<bool> open{false};
  cuda.fake_run(
      stream,
      [](void* context) {
        while (!static_cast<std::atomic<bool>*>(context)->load()) std::this_thread::yield();
      },
      &open);
  KT_CHECK(driver.cuMemcpyDtoHAsync_v2(static_cast<char*>(pinned) + 60, reinterpret_cast<uint64_t>(&device), 4,
                                       stream) == 0);
  KT_CHECK(violations() == 0);
  KT_CHECK(driver.cuMemcpyHtoDAsync_v2(reinterpret_cast<uint64_t>(&device), &device, 0, stream) == 0);
  KT_CHECK(violations() == 1);  // not pinned
  open.store(true);
  stream.sync();
  cuda.fake_begin_capture(stream, kCaptureGlobal);
  KT_CHECK(driver.cuMemcpyDtoHAsync_v2(pinned, reinterpret_cast<uint64_t>(&device), 8, stream) == 0);
  void* graph = cuda.fake_end_capture(stream);
  KT_CHECK(driver.cuMemFreeHost(pinned) == 0);
  KT_CHECK(violations() == 1);  // the graph may run
  cuda.fake_destroy_graph(graph);

  for (int mode : {kCaptureGlobal, kCaptureThreadLocal, kt::cuda::kCaptureRelaxed}) {
    cuda.fake_begin_capture(stream, mode);
    const bool refused = driver.cuMemHostAlloc(&pinned, 64, 0) != 0;
    KT_CHECK(refused == (mode != kt::cuda::kCaptureRelaxed));
    if (!refused) driver.cuMemFreeHost(pinned);
    graph = cuda.fake_end_capture(stream);
    KT_CHECK((graph == nullptr) == refused);
    if (graph) cuda.fake_destroy_graph(graph);
  }
  KT_CHECK(violations() == 0);
}

}  // namespace
