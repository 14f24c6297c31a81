// Calls in streams of the fake driver, on each of the ways in which the runtime talks to a GPU.
#pragma once

#include <algorithm>
#include <vector>

#include "cuda/copy.h"
#include "fake_cuda.h"
#include "runtime_case.h"

namespace kt_test {

// Copies by a kernel or by the copy engine; bells written by the stream or by callbacks.
struct Way {
  const char* name;
  const FakeCuda& cuda;
  bool kernel;
  bool memory_operations;
};

// One context with the copy kernel, one in which it could not be made: what is loaded stays.
inline void use(const Way& way) {
  way.cuda.fake_set_context(way.kernel ? 1 : 2);
  way.cuda.fake_set_memory_operations(way.memory_operations);
  if (!way.kernel) way.cuda.fake_fail("cuModuleLoadData", 0, kLaunchFailed);
  kt::cuda::prepare(*way.cuda.driver);
  way.cuda.fake_fail("cuModuleLoadData", 0, 0);
}

inline std::vector<Way> ways() {
  return {{"kernel, memory operations", new_cuda(), true, true},
          {"copy engine, memory operations", new_cuda(), false, true},
          {"kernel, callbacks", new_cuda(), true, false},
          {"copy engine, callbacks of an old driver", old_cuda(), false, true}};
}

// Runs a test on each way, and says which one failed.
template <class Test>
void on_every_way(const Test& test) {
  for (const Way& way : ways()) {
    const int before = failures_of_current_test;
    {
      const NoViolations none(way.cuda);
      use(way);
      test(way.cuda);
    }
    if (failures_of_current_test != before) std::printf("  with %s\n", way.name);
  }
}

// bf16 rows of a GPU, with rows before and behind that nobody may touch.
class DeviceRows {
 public:
  explicit DeviceRows(int tokens) : memory_((tokens + 2) * kHidden, kCanary), tokens_(tokens) {}

  uint64_t address() const { return reinterpret_cast<uint64_t>(memory_.data() + kHidden); }
  int tokens() const { return tokens_; }
  Rows rows() const { return Rows(memory_.begin() + kHidden, memory_.end() - kHidden); }
  bool untouched() const { return rows() == Rows(memory_.size() - 2 * kHidden, kCanary); }
  void clear() { std::fill(memory_.begin() + kHidden, memory_.end() - kHidden, kCanary); }
  ~DeviceRows() {
    if (memory_.empty()) return;  // moved
    const auto canary = [](uint16_t x) { return x == kCanary; };
    KT_CHECK(std::all_of(memory_.begin(), memory_.begin() + kHidden, canary));
    KT_CHECK(std::all_of(memory_.end() - kHidden, memory_.end(), canary));
  }
  DeviceRows(DeviceRows&&) = default;

 private:
  static constexpr uint16_t kCanary = 0xc0de;
  Rows memory_;
  int tokens_;
};

inline kt::Status submit_on(const FakeCuda& cuda, void* stream, kt::Port& port, const Batch& batch, int id_bytes = 8) {
  kt::cuda::LeaseId lease = 0;
  return port.submit_on(*cuda.driver, stream, batch.address(id_bytes), &lease);
}

inline kt::Status sync_on(const FakeCuda& cuda, void* stream, kt::Port& port, const DeviceRows& out) {
  return port.sync_on(*cuda.driver, stream, out.tokens(), out.address());
}

inline void call_on(const FakeCuda& cuda, void* stream, kt::Port& port, const Batch& batch, const DeviceRows& out) {
  KT_CHECK(submit_on(cuda, stream, port, batch).is_ok());
  KT_CHECK(sync_on(cuda, stream, port, out).is_ok());
}

// The caller reuses his buffers, in the order of the stream.
inline void scribble_on(const FakeCuda& cuda, void* stream, Batch& batch) {
  cuda.fake_run(stream, [](void* context) { static_cast<Batch*>(context)->scribble(); }, &batch);
}

}  // namespace kt_test
