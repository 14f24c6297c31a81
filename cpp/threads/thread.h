// One operating system thread: started, named, pinned; and where its memory goes.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <array>

#include "base/status.h"

namespace kt {

// 8192 is the largest NR_CPUS of a mainline kernel; a single cpu_set_t ends at 1024.
inline constexpr int kMaxCpus = 8192;
class CpuMask {
 public:
  void add(int cpu) { CPU_SET_S(cpu, sizeof(sets_), sets_.data()); }
  bool has(int cpu) const { return CPU_ISSET_S(cpu, sizeof(sets_), sets_.data()); }
  void remove(int cpu) { CPU_CLR_S(cpu, sizeof(sets_), sets_.data()); }
  int count() const { return CPU_COUNT_S(sizeof(sets_), sets_.data()); }

  // The CPUs the calling thread may run on; empty when the kernel refuses to tell.
  static CpuMask of_this_thread();
  bool apply_to(pthread_t thread) const;

 private:
  std::array<cpu_set_t, kMaxCpus / CPU_SETSIZE> sets_{};
};

struct ThreadStart {
  void* (*main)(void*);
  void* argument;
  const char* name;  // 15 characters at most
  int cpu = -1;      // -1 = float
};

// A refused pinning (the CPU is offline, or outside the container's set) is not an error: *pinned tells.
Status start_thread(const ThreadStart& start, pthread_t* thread, bool* pinned);

// Lets the calling thread take turns with others on its core every 0.1 ms and not every 3 ms, and preempt sooner when
// woken. Its share of the core stays the same, and no privilege is needed. Linux 6.12 and newer; older kernels ignore
// it. Measured with another process busy on one of two cores, an empty job: every 300 us 7.6 -> 3.6 ms, back to back
// p99 3..8 ms -> 3 us. Only for a thread that has a core to itself: sched_yield gives up the rest of a slice, so among
// threads that share a core those with the long slice starve (8 threads on 2 cores, four barriers: 50 -> 300 us).
bool ask_short_slices();

// The calling thread's new memory comes from this node while it has free pages. False where the system refuses.
bool prefer_memory_of(int numa_id);

}  // namespace kt
