// The CUDA driver, opened at run time: nothing of CUDA is needed to build, and one binary serves machines with and
// without a GPU. Only what stream-ordered calls need is declared here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace kt::cuda {

using Result = int;  // 0 = success
using Context = void*;
using Stream = void*;
using Graph = void*;
using Module = void*;
using Function = void*;
using UserObject = void*;
using DevicePtr = unsigned long long;
using HostFn = void (*)(void* context);

// Values of the driver's enums that are used.
inline constexpr unsigned kHostAllocPortable = 1, kHostAllocMapped = 2;
inline constexpr int kCaptureRelaxed = 2;
inline constexpr int kCaptureActive = 1;
inline constexpr unsigned kWaitGreaterOrEqual = 0;
inline constexpr unsigned kUserObjectNoDestructorSync = 1;
inline constexpr unsigned kGraphUserObjectMove = 1;
// CAN_USE_64_BIT_STREAM_MEM_OPS: devices that have it also have the 32-bit operations used here.
inline constexpr int kAttributeStreamMemoryOperations = 122;

struct Driver {
  Result (*cuGetErrorName)(Result, const char**);
  Result (*cuCtxGetCurrent)(Context*);
  Result (*cuCtxGetDevice)(int*);
  Result (*cuDeviceGetAttribute)(int*, int attribute, int device);
  Result (*cuMemHostAlloc)(void**, size_t, unsigned flags);
  Result (*cuMemFreeHost)(void*);
  Result (*cuMemcpyDtoHAsync_v2)(void*, DevicePtr, size_t, Stream);
  Result (*cuMemcpyHtoDAsync_v2)(DevicePtr, const void*, size_t, Stream);
  Result (*cuLaunchHostFunc)(Stream, HostFn, void*);
  Result (*cuModuleLoadData)(Module*, const void* image);
  Result (*cuModuleGetFunction)(Function*, Module, const char* name);
  Result (*cuLaunchKernel)(Function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                           unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream, void** arguments,
                           void** extra);
  Result (*cuStreamIsCapturing)(Stream, int* status);
  Result (*cuThreadExchangeStreamCaptureMode)(int* mode);
  // These may be missing in old drivers (null): stream memory operations, and lifetimes tied to graphs.
  Result (*cuStreamWriteValue32_v2)(Stream, DevicePtr, uint32_t, unsigned flags);
  Result (*cuStreamWaitValue32_v2)(Stream, DevicePtr, uint32_t, unsigned flags);
  Result (*cuStreamGetCaptureInfo_v2)(Stream, int* status, uint64_t* id, Graph*, const void** dependencies,
                                      size_t* count);
  Result (*cuUserObjectCreate)(UserObject*, void* object, HostFn destroy, unsigned references, unsigned flags);
  Result (*cuGraphRetainUserObject)(Graph, UserObject, unsigned count, unsigned flags);
};

// The driver of this process, opened on first use; `library` is for tests. Fails where there is none, with the reason.
Status open_driver(const Driver** out, const char* library = "libcuda.so.1");

// Ok, or an error that names the call.
Status check(const Driver& driver, Result result, const char* call);

// Lets this thread allocate while another one, or itself, captures a graph: what is made inside is no part of it.
class AllowAllocation {
 public:
  explicit AllowAllocation(const Driver& driver);
  ~AllowAllocation();
  AllowAllocation(const AllowAllocation&) = delete;
  AllowAllocation& operator=(const AllowAllocation&) = delete;

 private:
  const Driver& driver_;
  int mode_ = kCaptureRelaxed;
};

}  // namespace kt::cuda

#define KT_CUDA(driver, call, ...) KT_RETURN_IF_ERROR(::kt::cuda::check(driver, (driver).call(__VA_ARGS__), #call))
