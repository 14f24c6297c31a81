// Whether another thread wants the core of this one.
#pragma once

#include <cstdint>

namespace kt {

// Told of every yield that took long. One such yield may mean another thread with work, or a hypervisor that gave the
// core to another guest for a while. In the first case this thread should sleep: spinning costs both, because the
// scheduler counts it as use of the core, so an event finds the spinner without a claim and waits for the other's slice
// to end, while a sleeper is let in when it is woken. In the second it must not: a guest's core that sleeps is given
// away for good, and comes back milliseconds after it is needed. The number of switches to other threads tells one from
// the other.
class ContentionWatch {
 public:
  static constexpr int64_t kLongYieldNs = 50'000;
  // Another thread lets the next yield take long too, within a slice of 3 to 8 ms.
  static constexpr int64_t kRecentNs = 20'000'000;
  static constexpr int64_t kSleepNs = 100'000'000;

  // Whether to sleep instead of spinning.
  bool sleeps(int64_t now_ns) const { return now_ns < sleep_until_ns_; }

  // A yield of at least kLongYieldNs ended now; `switches`: how often so far another thread ran instead of this one,
  // which could have gone on. True: sleep, now and whenever sleeps().
  bool add_long_yield(int64_t now_ns, int64_t switches) {
    const bool contended = now_ns - seen_ns_ < kRecentNs && switches > switches_;
    seen_ns_ = now_ns;
    switches_ = switches;
    if (contended) sleep_until_ns_ = now_ns + kSleepNs;
    return contended;
  }

 private:
  int64_t seen_ns_ = -kRecentNs;
  int64_t switches_ = 0;
  int64_t sleep_until_ns_ = 0;
};

}  // namespace kt
