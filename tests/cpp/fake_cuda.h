// The fake CUDA driver (tests/cpp/fake_cuda/) as tests see it: the table of the real one, and the controls.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "check.h"
#include "cuda/driver.h"

namespace kt_test {

struct FakeCuda {
  const kt::cuda::Driver* driver = nullptr;

  void* (*fake_create_stream)();
  void (*fake_destroy_stream)(void* stream);  // after what is in it
  void (*fake_sync_stream)(void* stream);
  // A kernel: any code, in the order of the stream.
  void (*fake_run)(void* stream, void (*kernel)(void*), void* context);

  void (*fake_begin_capture)(void* stream, int mode);
  void (*fake_fork_capture)(void* from, void* to);  // both are captured into one graph, as branches side by side
  void* (*fake_end_capture)(void* stream);          // null: something forbidden was called meanwhile
  void (*fake_launch)(void* graph, void* stream);
  void (*fake_destroy_graph)(void* graph);

  // The call after `after` more calls of this function fails, once.
  void (*fake_fail)(const char* function, int after, int code);
  int (*fake_calls)(const char* function);
  void (*fake_last_launch)(unsigned* blocks, unsigned* threads);
  void (*fake_set_memory_operations)(bool);  // what the device's attribute says
  // Allocating and freeing pinned memory waits for all streams, as the driver may do.
  void (*fake_set_waiting_allocation)(bool);
  void (*fake_set_context)(uint64_t);  // of all threads
  size_t (*fake_pinned)();             // allocations
  int (*fake_take_violations)(const char** first);
};

inline constexpr int kCaptureGlobal = 0, kCaptureThreadLocal = 1;
inline constexpr int kLaunchFailed = 719;

inline FakeCuda open_fake(const char* library) {
  FakeCuda fake{};
  const kt::Status status = kt::cuda::open_driver(&fake.driver, library);
  if (!status.is_ok()) {
    std::printf("%s\n", status.message().c_str());
    std::abort();
  }
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  const auto load = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (!function) std::abort();
  };
#define KT_LOAD_FAKE(name) load(fake.name, #name)
  KT_LOAD_FAKE(fake_create_stream);
  KT_LOAD_FAKE(fake_destroy_stream);
  KT_LOAD_FAKE(fake_sync_stream);
  KT_LOAD_FAKE(fake_run);
  KT_LOAD_FAKE(fake_begin_capture);
  KT_LOAD_FAKE(fake_fork_capture);
  KT_LOAD_FAKE(fake_end_capture);
  KT_LOAD_FAKE(fake_launch);
  KT_LOAD_FAKE(fake_destroy_graph);
  KT_LOAD_FAKE(fake_fail);
  KT_LOAD_FAKE(fake_calls);
  KT_LOAD_FAKE(fake_last_launch);
  KT_LOAD_FAKE(fake_set_memory_operations);
  KT_LOAD_FAKE(fake_set_waiting_allocation);
  KT_LOAD_FAKE(fake_set_context);
  KT_LOAD_FAKE(fake_pinned);
  KT_LOAD_FAKE(fake_take_violations);
#undef KT_LOAD_FAKE
  return fake;
}

// KT_FAKE_CUDA and KT_FAKE_CUDA_OLD are paths, from the build.
inline const FakeCuda& new_cuda() {
  static const FakeCuda fake = open_fake(KT_FAKE_CUDA);
  return fake;
}
inline const FakeCuda& old_cuda() {
  static const FakeCuda fake = open_fake(KT_FAKE_CUDA_OLD);
  return fake;
}

class FakeStream {
 public:
  explicit FakeStream(const FakeCuda& cuda) : cuda_(cuda), handle_(cuda.fake_create_stream()) {}
  ~FakeStream() { cuda_.fake_destroy_stream(handle_); }
  FakeStream(const FakeStream&) = delete;
  FakeStream& operator=(const FakeStream&) = delete;

  operator void*() const { return handle_; }
  void sync() const { cuda_.fake_sync_stream(handle_); }

 private:
  const FakeCuda& cuda_;
  void* handle_;
};

// Misuse of the driver fails the test that this stands in, at its end.
class NoViolations {
 public:
  explicit NoViolations(const FakeCuda& cuda) : cuda_(cuda) {}
  ~NoViolations() {
    const char* first = "";
    if (cuda_.fake_take_violations(&first) != 0)
      fail(__FILE__, __LINE__, std::string("misuse of the driver: ") + first);
  }

 private:
  const FakeCuda& cuda_;
};

}  // namespace kt_test
