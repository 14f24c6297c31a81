#include "threads/thread.h"

#include <linux/mempolicy.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "threads/node_mask.h"

namespace kt {
namespace {

// Signals of the process belong to the threads of the host program (Python's Ctrl-C). Faults stay open, else a crash in
// a worker would bypass the handler that reports it; so does SIGPROF, else profilers would not see the workers.
sigset_t blocked_signals() {
  sigset_t set;
  sigfillset(&set);
  for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS, SIGPROF}) sigdelset(&set, signal);
  return set;
}

// sched_setattr(2), first version of the structure. Declared here: glibc has it since 2.41 only, and the kernel's
// header clashes with <sched.h>.
struct SchedAttr {
  uint32_t size;
  uint32_t policy;
  uint64_t flags;
  int32_t nice;
  uint32_t priority;
  uint64_t runtime_ns;
  uint64_t deadline_ns;
  uint64_t period_ns;
};
static_assert(sizeof(SchedAttr) == 48);

constexpr uint64_t kSliceNs = 100'000;  // the smallest the kernel accepts

}  // namespace

CpuMask CpuMask::of_this_thread() {
  CpuMask mask;
  if (sched_getaffinity(0, sizeof(mask.sets_), mask.sets_.data()) != 0) return CpuMask();
  return mask;
}

bool CpuMask::apply_to(pthread_t thread) const {
  return pthread_setaffinity_np(thread, sizeof(sets_), sets_.data()) == 0;
}

Status start_thread(const ThreadStart& start, pthread_t* thread, bool* pinned) {
  *pinned = false;
  const sigset_t blocked = blocked_signals();
  sigset_t before;
  pthread_sigmask(SIG_SETMASK, &blocked, &before);
  const int error = pthread_create(thread, nullptr, start.main, start.argument);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error != 0) {
    return Status::system(std::string("cannot start thread ") + start.name + ": " + std::strerror(error) +
                          "; raise 'ulimit -u' or the container's limit of processes, or use fewer threads");
  }
  pthread_setname_np(*thread, start.name);
  if (start.cpu >= 0 && start.cpu < kMaxCpus) {
    CpuMask mask;
    mask.add(start.cpu);
    *pinned = mask.apply_to(*thread);
  }
  return Status::ok();
}

bool ask_short_slices() {
  SchedAttr attr{};
  if (syscall(SYS_sched_getattr, 0, &attr, sizeof(attr), 0) != 0) return false;
  if (attr.policy != SCHED_OTHER) return false;  // a real-time policy came from the user; its runtime means a quota
  attr.size = sizeof(attr);
  attr.runtime_ns = kSliceNs;
  return syscall(SYS_sched_setattr, 0, &attr, 0) == 0;
}

bool prefer_memory_of(int numa_id) {
  NodeMask mask;
  if (!mask.set(numa_id)) return false;
  return syscall(SYS_set_mempolicy, MPOL_PREFERRED, mask.words, NodeMask::kBits + 1) == 0;
}

}  // namespace kt
