#include "cuda/lease.h"

#include <atomic>
#include <deque>
#include <mutex>

namespace kt::cuda {
namespace {

struct Lease {
  const Driver* driver;
  uint64_t capture;
  LeaseId id;
  std::atomic<bool> ended{false};
  bool reported = false;
};

struct Leases {
  std::mutex mutex;
  std::deque<Lease> all;  // 40 bytes each, never removed: the driver holds their addresses
};

Leases& leases() {
  static auto* list = new Leases();
  return *list;
}

// Runs on a thread of the driver, which forbids CUDA calls there: it only leaves a mark.
void end_lease(void* lease) { static_cast<Lease*>(lease)->ended.store(true, std::memory_order_release); }

struct Capture {
  uint64_t id = 0;        // of all captures of the process
  Graph graph = nullptr;  // null: the stream is not being captured
};

Status capture_of(const Driver& driver, Stream stream, Capture* out) {
  int status = 0;
  KT_CUDA(driver, cuStreamIsCapturing, stream, &status);
  if (status != kCaptureActive) return Status::ok();
  if (!driver.cuStreamGetCaptureInfo_v2 || !driver.cuUserObjectCreate || !driver.cuGraphRetainUserObject) {
    return Status::unsupported(
        "this CUDA driver cannot tell when a graph is gone; capturing needs one for CUDA 11.3 or newer");
  }
  KT_CUDA(driver, cuStreamGetCaptureInfo_v2, stream, &status, &out->id, &out->graph, nullptr, nullptr);
  return Status::ok();
}

// After an error destroy() is never called.
Status keep(const Driver& driver, Graph graph, void* object, HostFn destroy) {
  UserObject kept = nullptr;
  KT_CUDA(driver, cuUserObjectCreate, &kept, object, destroy, 1, kUserObjectNoDestructorSync);
  KT_CUDA(driver, cuGraphRetainUserObject, graph, kept, 1, kGraphUserObjectMove);
  return Status::ok();
}

}  // namespace

Status keep_with_graph(const Driver& driver, Stream stream, void* object, HostFn destroy, bool* kept) {
  *kept = false;
  Capture capture;
  KT_RETURN_IF_ERROR(capture_of(driver, stream, &capture));
  if (!capture.graph) return Status::ok();
  KT_RETURN_IF_ERROR(keep(driver, capture.graph, object, destroy));
  *kept = true;
  return Status::ok();
}

Status lease_of(const Driver& driver, Stream stream, LeaseId* out) {
  *out = 0;
  Capture capture;
  KT_RETURN_IF_ERROR(capture_of(driver, stream, &capture));
  if (!capture.graph) return Status::ok();
  Leases& list = leases();
  const std::lock_guard lock(list.mutex);
  for (const Lease& lease : list.all) {
    if (lease.driver == &driver && lease.capture == capture.id && !lease.ended.load(std::memory_order_acquire)) {
      *out = lease.id;
      return Status::ok();
    }
  }
  Lease& lease = list.all.emplace_back();
  lease.driver = &driver;
  lease.capture = capture.id;
  lease.id = list.all.size();
  const Status status = keep(driver, capture.graph, &lease, end_lease);
  if (status.is_ok()) {
    *out = lease.id;
  } else {
    lease.reported = true;  // nobody has it
    lease.ended.store(true, std::memory_order_relaxed);
  }
  return status;
}

std::vector<LeaseId> take_ended_leases() {
  Leases& list = leases();
  const std::lock_guard lock(list.mutex);
  std::vector<LeaseId> ended;
  for (Lease& lease : list.all) {
    if (lease.reported || !lease.ended.load(std::memory_order_acquire)) continue;
    lease.reported = true;
    ended.push_back(lease.id);
  }
  return ended;
}

}  // namespace kt::cuda
