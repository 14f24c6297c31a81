#include "threads/thread.h"

#include <linux/mempolicy.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

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

bool prefer_memory_of(int numa_id) {
  NodeMask mask;
  if (!mask.set(numa_id)) return false;
  return syscall(SYS_set_mempolicy, MPOL_PREFERRED, mask.words, NodeMask::kBits + 1) == 0;
}

}  // namespace kt
