#include "cuda/driver.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

namespace kt::cuda {
namespace {

struct Opened {
  Driver driver{};
  std::string error;  // empty = usable
};

// Never closed: graphs call into it until the process ends.
Opened open(const char* library) {
  Opened opened;
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    opened.error = std::string("there is no CUDA driver here (") + dlerror() + "); pass CPU tensors and no stream";
    return opened;
  }
  const auto load = [&](auto& function, const char* name, bool needed) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (!function && needed && opened.error.empty())
      opened.error = std::string(library) + " has no " + name + "; a driver for CUDA 11.3 or newer is needed";
  };
#define KT_LOAD(name)          load(opened.driver.name, #name, true)
#define KT_LOAD_OPTIONAL(name) load(opened.driver.name, #name, false)
  KT_LOAD(cuGetErrorName);
  KT_LOAD(cuCtxGetCurrent);
  KT_LOAD(cuCtxGetDevice);
  KT_LOAD(cuDeviceGetAttribute);
  KT_LOAD(cuMemHostAlloc);
  KT_LOAD(cuMemFreeHost);
  KT_LOAD(cuMemcpyDtoHAsync_v2);
  KT_LOAD(cuMemcpyHtoDAsync_v2);
  KT_LOAD(cuLaunchHostFunc);
  KT_LOAD(cuModuleLoadData);
  KT_LOAD(cuModuleGetFunction);
  KT_LOAD(cuLaunchKernel);
  KT_LOAD(cuStreamIsCapturing);
  KT_LOAD(cuThreadExchangeStreamCaptureMode);
  KT_LOAD_OPTIONAL(cuStreamWriteValue32_v2);
  KT_LOAD_OPTIONAL(cuStreamWaitValue32_v2);
  KT_LOAD_OPTIONAL(cuStreamGetCaptureInfo_v2);
  KT_LOAD_OPTIONAL(cuUserObjectCreate);
  KT_LOAD_OPTIONAL(cuGraphRetainUserObject);
#undef KT_LOAD
#undef KT_LOAD_OPTIONAL
  return opened;
}

}  // namespace

Status open_driver(const Driver** out, const char* library) {
  static std::mutex mutex;
  static auto* opened = new std::map<std::string, Opened>();
  const std::lock_guard lock(mutex);
  auto found = opened->find(library);
  if (found == opened->end()) found = opened->emplace(library, open(library)).first;
  if (!found->second.error.empty()) return Status::unsupported(found->second.error);
  *out = &found->second.driver;
  return Status::ok();
}

Status check(const Driver& driver, Result result, const char* call) {
  if (result == 0) return Status::ok();
  const char* name = nullptr;
  driver.cuGetErrorName(result, &name);
  return Status::unsupported(std::string(call) + " failed: " + (name ? name : std::to_string(result).c_str()));
}

AllowAllocation::AllowAllocation(const Driver& driver) : driver_(driver) {
  driver_.cuThreadExchangeStreamCaptureMode(&mode_);
}

AllowAllocation::~AllowAllocation() { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }

}  // namespace kt::cuda
