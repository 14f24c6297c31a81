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

}  // namespace

Status lease_of(const Driver& driver, Stream stream, LeaseId* out) {
  *out = 0;
  int status = 0;
  KT_CUDA(driver, cuStreamIsCapturing, stream, &status);
  if (status != kCaptureActive) return Status::ok();
  uint64_t capture = 0;
  Graph graph = nullptr;
  if (driver.cuStreamGetCaptureInfo_v2) {
    KT_CUDA(driver, cuStreamGetCaptureInfo_v2, stream, &status, &capture, &graph, nullptr, nullptr);
  }
  Leases& list = leases();
  const std::lock_guard lock(list.mutex);
  for (Lease& lease : list.all) {
    if (lease.driver == &driver && lease.capture == capture && !lease.ended.load(std::memory_order_acquire)) {
      *out = lease.id;
      return Status::ok();
    }
  }
  Lease& lease = list.all.emplace_back();
  lease.driver = &driver;
  lease.capture = capture;
  lease.id = list.all.size();
  *out = lease.id;
  if (graph && driver.cuUserObjectCreate && driver.cuGraphRetainUserObject) {
    UserObject object = nullptr;
    KT_CUDA(driver, cuUserObjectCreate, &object, &lease, end_lease, 1, kUserObjectNoDestructorSync);
    KT_CUDA(driver, cuGraphRetainUserObject, graph, object, 1, kGraphUserObjectMove);
  }
  return Status::ok();
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
