// Whether another thread wants the core of this one.
#pragma once

#include <cstdint>

namespace kt {

// Told of every yield that took long. Such a yield may mean another thread with work, or a hypervisor that gave the
// core to another guest for a while. In the first case this thread should sleep: spinning costs both, because the
// scheduler counts it as use of the core, so an event finds the spinner without a claim and waits for the other's slice
// to end, while a sleeper is let in when it is woken. In the second it must not: a guest's core that sleeps is given
// away for good, and comes back milliseconds after it is needed, at every barrier of a call: the likely reason, not
// seen in the act, why calls of 0.2 ms took 15 to 22 ms on a busy host when a long yield and a switch were enough.
//
// What tells them apart is the time this thread was ready while others of this system ran. A thread that wants the core
// for itself takes nearly all of what a spinner yields; threads of the kernel run for microseconds, even if a
// hypervisor stretches one such run to a few milliseconds.
class ContentionWatch {
 public:
  static constexpr int64_t kLongYieldNs = 50'000;
  static constexpr int64_t kWindowNs = 20'000'000;  // several slices of 3 to 8 ms
  static constexpr int64_t kGapNs = 20'000'000;     // without long yields: nobody wants the core any more
  static constexpr int64_t kSleepNs = 200'000'000;

  // Whether to sleep instead of spinning.
  bool sleeps(int64_t now_ns) const { return now_ns < sleep_until_ns_; }

  // A yield of at least kLongYieldNs ended now; `waited_ns`: how long so far this thread was ready and did not run, or
  // less than 0 where the system does not tell. True: sleep, now and whenever sleeps().
  bool add_long_yield(int64_t now_ns, int64_t waited_ns) {
    if (waited_ns < 0) return false;
    const bool goes_on = now_ns - seen_ns_ < kGapNs;
    seen_ns_ = now_ns;
    const int64_t window_ns = now_ns - start_ns_;
    if (goes_on && window_ns < kWindowNs) return false;
    const bool contended = goes_on && waited_ns - start_waited_ns_ > window_ns / 2;
    start_ns_ = now_ns;
    start_waited_ns_ = waited_ns;
    if (contended) sleep_until_ns_ = now_ns + kSleepNs;
    return contended;
  }

 private:
  int64_t seen_ns_ = -kGapNs;
  int64_t start_ns_ = 0;
  int64_t start_waited_ns_ = 0;
  int64_t sleep_until_ns_ = 0;
};

}  // namespace kt
