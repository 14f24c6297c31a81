// How threads wait for each other here: spin for a bounded time, give the core away now and then, at last sleep in the
// kernel. Linux only.
#pragma once

#include <atomic>
#include <cstdint>

#include "threads/contention.h"

namespace kt {

// Bounded by time, not by count: a pause takes 5 ns on Zen 2, 40 ns on Skylake, and microseconds in a guest whose
// hypervisor traps it.
struct SpinPolicy {
  int64_t budget_ns = 0;  // then sleep
  // Between two sched_yield. A spinner that never yields keeps a thread that was just woken on its core waiting for a
  // scheduler tick or a whole slice (3..8 ms); alone on the core the call costs 0.1..0.5 us. submit and sync around an
  // empty job with as many workers as cores: 5 us at 1000, 8..14 us at 5000.
  int64_t yield_ns = 1000;
};

// Between two looks at the clock: 32 pauses are 0.2..1.3 us, the look 20..50 ns.
inline constexpr int kPausesPerLook = 32;

inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // yield is a no-op on most cores
#endif
}

int64_t monotonic_ns();
void yield_core();

// How long this thread was ready to run while others ran on its core; -1 where the kernel keeps no such account. A file
// of /proc is read: 3 us.
int64_t waited_for_core_ns();

inline thread_local ContentionWatch contention_watch;

// True as soon as ready() is, false when the caller should sleep.
template <class Ready>
bool spin_until(const Ready& ready, SpinPolicy policy) {
  if (ready()) return true;
  if (policy.budget_ns <= 0) return false;
  const int64_t start_ns = monotonic_ns();
  if (contention_watch.sleeps(start_ns)) return false;
  int64_t yielded_ns = start_ns;
  for (;;) {
    for (int i = 0; i < kPausesPerLook; ++i) {
      cpu_pause();
      if (ready()) return true;
    }
    const int64_t now_ns = monotonic_ns();
    if (now_ns - start_ns >= policy.budget_ns) return false;
    if (now_ns - yielded_ns >= policy.yield_ns) {
      yield_core();
      yielded_ns = monotonic_ns();
      if (yielded_ns - now_ns >= ContentionWatch::kLongYieldNs &&
          contention_watch.add_long_yield(yielded_ns, waited_for_core_ns())) {
        return ready();
      }
    }
  }
}

// A counter that one thread advances and others wait on. Put it on a cache line that nobody else writes.
class Gate {
 public:
  uint32_t epoch() const { return epoch_.load(std::memory_order_acquire); }

  // One thread at a time. What it wrote before is seen by everyone whose wait() returns.
  void advance() {
    bump();
    wake();
  }
  // The two halves of advance(), for a caller that bumps under a lock and wakes outside.
  void bump() { epoch_.store(epoch_.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst); }
  // No system call unless somebody sleeps. Sequentially consistent with sleep(): either this load sees the sleeper, or
  // the sleeper's futex call sees the new epoch.
  void wake() {
    if (sleepers_.load(std::memory_order_seq_cst) != 0) wake_sleepers();
  }

  // Returns when the epoch is no longer `old`.
  void wait(uint32_t old, SpinPolicy policy) {
    if (!spin_until([&] { return epoch() != old; }, policy)) sleep(old);
  }

  // The same without spinning, and for at most so long. False: the epoch is still `old`.
  bool sleep_for(uint32_t old, int64_t ns);

  int sleepers() const { return sleepers_.load(std::memory_order_relaxed); }

 private:
  void sleep(uint32_t old);
  void wake_sleepers();

  std::atomic<uint32_t> epoch_{0};
  std::atomic<int32_t> sleepers_{0};
};

}  // namespace kt
