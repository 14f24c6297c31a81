// The functions of the CUDA driver that cpp/cuda/driver.h lists, on threads and plain memory. With FAKE_OLD_DRIVER the
// stream memory operations are not there, as before CUDA 11.7.
#include "cuda/driver.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "fake_cuda/state.h"

namespace {

using fake::Range;
using fake::state;
using kt::cuda::DevicePtr;
using kt::cuda::HostFn;
using kt::cuda::Result;

// Longer than any test needs, also with a sanitizer on a busy machine.
constexpr auto kLongestWait = std::chrono::seconds(20);

int copy_kernel_tag;

// Every call: counts it, refuses it in a callback, and fails if a test wants it to.
Result enter(const char* function) {
  const std::lock_guard lock(state().mutex);
  if (fake::in_callback) state().violations.push_back(std::string(function) + " inside a callback");
  ++state().calls[function];
  const auto failure = state().failures.find(function);
  if (failure == state().failures.end() || failure->second.after-- > 0) return 0;
  const Result code = failure->second.code;
  state().failures.erase(failure);
  return code;
}

#define FAKE_ENTER()                                        \
  if (const Result result = enter(__func__); result != 0) { \
    return result;                                          \
  }

// True for the side of a copy that is pinned memory.
bool is_pinned(uint64_t address) {
  const std::lock_guard lock(state().mutex);
  const auto after = state().pinned.upper_bound(address);
  if (after == state().pinned.begin()) return false;
  const auto& [begin, bytes] = *std::prev(after);
  return address < begin + bytes;
}

void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }
uint64_t address(const void* p) { return reinterpret_cast<uint64_t>(p); }

struct Piece {
  uint64_t to, from;
  uint32_t words;
};

}  // namespace

FAKE_EXPORT Result cuGetErrorName(Result code, const char** name) {
  *name = code == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR_FAKE";
  return 0;
}

FAKE_EXPORT Result cuCtxGetCurrent(void** context) {
  FAKE_ENTER();
  const std::lock_guard lock(state().mutex);
  *context = pointer(state().context);
  return 0;
}

FAKE_EXPORT Result cuCtxGetDevice(int* device) {
  FAKE_ENTER();
  *device = 0;
  return 0;
}

FAKE_EXPORT Result cuDeviceGetAttribute(int* value, int attribute, int) {
  FAKE_ENTER();
  const std::lock_guard lock(state().mutex);
  *value = attribute == kt::cuda::kAttributeStreamMemoryOperations && state().memory_operations;
  return 0;
}

FAKE_EXPORT Result cuMemHostAlloc(void** out, size_t bytes, unsigned) {
  FAKE_ENTER();
  std::unique_lock lock(state().mutex);
  if (const Result refused = fake::refuse_while_capturing()) return refused;
  if (state().waiting_allocation) fake::wait_idle(lock);
  *out = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  std::memset(*out, 0xa5, bytes);  // nobody may rely on zeros
  state().pinned[address(*out)] = bytes;
  return 0;
}

FAKE_EXPORT Result cuMemFreeHost(void* memory) {
  FAKE_ENTER();
  std::unique_lock lock(state().mutex);
  if (const Result refused = fake::refuse_while_capturing()) return refused;
  const auto found = state().pinned.find(address(memory));
  if (found == state().pinned.end()) {
    state().violations.push_back("cuMemFreeHost of something else");
    return fake::kInvalidValue;
  }
  if (fake::in_use({found->first, found->second})) {
    state().violations.push_back("cuMemFreeHost of memory that is still used");
  }
  if (state().waiting_allocation) fake::wait_idle(lock);
  state().pinned.erase(found);
  std::free(memory);
  return 0;
}

FAKE_EXPORT Result cuMemcpyDtoHAsync_v2(void* to, DevicePtr from, size_t bytes, void* stream) {
  FAKE_ENTER();
  return fake::enqueue(stream, {[=] { std::memcpy(to, pointer(from), bytes); }, {{address(to), bytes}}});
}

FAKE_EXPORT Result cuMemcpyHtoDAsync_v2(DevicePtr to, const void* from, size_t bytes, void* stream) {
  FAKE_ENTER();
  return fake::enqueue(stream, {[=] { std::memcpy(pointer(to), from, bytes); }, {{address(from), bytes}}});
}

FAKE_EXPORT Result cuLaunchHostFunc(void* stream, HostFn callback, void* context) {
  FAKE_ENTER();
  const auto run = [=] {
    fake::in_callback = true;
    callback(context);
    fake::in_callback = false;
  };
  return fake::enqueue(stream, {run, {}});
}

FAKE_EXPORT Result cuModuleLoadData(void** module, const void* image) {
  FAKE_ENTER();
  const std::lock_guard lock(state().mutex);
  if (const Result refused = fake::refuse_while_capturing()) return refused;
  if (!std::strstr(static_cast<const char*>(image), ".entry kt_copy(")) return fake::kInvalidValue;
  *module = &copy_kernel_tag;
  return 0;
}

FAKE_EXPORT Result cuModuleGetFunction(void** function, void* module, const char* name) {
  FAKE_ENTER();
  if (module != &copy_kernel_tag || std::strcmp(name, "kt_copy") != 0) return fake::kInvalidValue;
  *function = &copy_kernel_tag;
  return 0;
}

FAKE_EXPORT Result cuLaunchKernel(void* function, unsigned grid, unsigned, unsigned, unsigned block, unsigned, unsigned,
                                  unsigned, void* stream, void** arguments, void**) {
  FAKE_ENTER();
  if (function != &copy_kernel_tag || grid == 0 || block == 0 || block > 1024) return fake::kInvalidValue;
  std::vector<Piece> pieces;
  std::vector<Range> pinned;
  for (int i = 0; i < 3; ++i) {
    Piece piece;
    std::memcpy(&piece.to, arguments[3 * i], 8);
    std::memcpy(&piece.from, arguments[3 * i + 1], 8);
    std::memcpy(&piece.words, arguments[3 * i + 2], 4);
    const size_t word_bytes = i == 0 ? 16 : 4;
    if (piece.words == 0) continue;
    if (piece.to % word_bytes || piece.from % word_bytes) return fake::kInvalidValue;
    piece.words *= static_cast<uint32_t>(word_bytes);
    pinned.push_back({is_pinned(piece.to) ? piece.to : piece.from, piece.words});
    pieces.push_back(piece);
  }
  uint64_t clear, ring;
  uint32_t value;
  std::memcpy(&clear, arguments[9], 8);
  std::memcpy(&ring, arguments[10], 8);
  std::memcpy(&value, arguments[11], 4);
  if (ring) {
    if (grid != 1) return fake::kInvalidValue;  // a block does not wait for the others
    pinned.push_back({clear, 4});
    pinned.push_back({ring, 4});
  }
  {
    const std::lock_guard lock(state().mutex);
    state().last_launch = {grid, block};
  }
  const auto run = [pieces, clear, ring, value] {
    for (const Piece& piece : pieces) std::memcpy(pointer(piece.to), pointer(piece.from), piece.words);
    if (!ring) return;
    static_cast<std::atomic<uint32_t>*>(pointer(clear))->store(0, std::memory_order_relaxed);
    static_cast<std::atomic<uint32_t>*>(pointer(ring))->store(value, std::memory_order_release);
  };
  return fake::enqueue(stream, {run, pinned});
}

FAKE_EXPORT Result cuStreamIsCapturing(void* handle, int* status) {
  FAKE_ENTER();
  const fake::Stream* stream = fake::find_stream(handle);
  const std::lock_guard lock(state().mutex);
  *status = !stream->capture ? 0 : stream->capture->invalid ? 2 : kt::cuda::kCaptureActive;
  return 0;
}

FAKE_EXPORT Result cuThreadExchangeStreamCaptureMode(int* mode) {
  FAKE_ENTER();
  std::swap(*mode, fake::capture_mode);
  return 0;
}

FAKE_EXPORT Result cuStreamGetCaptureInfo_v2(void* handle, int* status, uint64_t* id, void** graph, const void**,
                                             size_t*) {
  FAKE_ENTER();
  const fake::Stream* stream = fake::find_stream(handle);
  const std::lock_guard lock(state().mutex);
  *status = stream->capture ? kt::cuda::kCaptureActive : 0;
  if (!stream->capture) return 0;
  *id = stream->capture->id;
  *graph = stream->capture.get();
  return 0;
}

FAKE_EXPORT Result cuUserObjectCreate(void** out, void* object, HostFn destroy, unsigned references, unsigned flags) {
  FAKE_ENTER();
  if (flags != kt::cuda::kUserObjectNoDestructorSync) return fake::kInvalidValue;
  const std::lock_guard lock(state().mutex);
  *out = &state().objects.emplace_back(object, destroy, references);
  return 0;
}

FAKE_EXPORT Result cuGraphRetainUserObject(void* graph, void* object, unsigned count, unsigned flags) {
  FAKE_ENTER();
  if (count != 1 || flags != kt::cuda::kGraphUserObjectMove) return fake::kInvalidValue;
  const std::lock_guard lock(state().mutex);
  static_cast<fake::Graph*>(graph)->objects.push_back(static_cast<fake::UserObject*>(object));
  return 0;
}

#ifndef FAKE_OLD_DRIVER
FAKE_EXPORT Result cuStreamWriteValue32_v2(void* stream, DevicePtr to, uint32_t value, unsigned) {
  FAKE_ENTER();
  auto* word = static_cast<std::atomic<uint32_t>*>(pointer(to));
  return fake::enqueue(stream, {[=] { word->store(value, std::memory_order_release); }, {{to, 4}}});
}

FAKE_EXPORT Result cuStreamWaitValue32_v2(void* stream, DevicePtr at, uint32_t value, unsigned flags) {
  FAKE_ENTER();
  if (flags != kt::cuda::kWaitGreaterOrEqual) return fake::kInvalidValue;
  auto* word = static_cast<std::atomic<uint32_t>*>(pointer(at));
  const auto run = [=] {
    const auto end = std::chrono::steady_clock::now() + kLongestWait;
    while (word->load(std::memory_order_acquire) < value) {
      if (std::chrono::steady_clock::now() > end) return fake::violation("a stream waits for ever");
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  };
  return fake::enqueue(stream, {run, {{at, 4}}});
}
#endif
