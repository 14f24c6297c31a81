// How long to spin for an event that comes again and again, such as the next layer of a model on a GPU.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace kt {

// Twice the longest of the recent waits, so that the next one like it ends while somebody spins. A decode step has many
// short waits, between its layers, and a long one before the next step, in which the host samples and schedules (1 to
// 3 ms in SGLang): the longest is forgotten by 1/256 with each wait, so it lasts for the 177 that halve it. A wait of
// over kLongestWaitNs is a pause between requests and says nothing about the next.
//
// One thread adds, any may read.
class SpinBudget {
 public:
  static constexpr int64_t kLongestWaitNs = 5'000'000;

  // 0: no spinning, whatever the waits are.
  explicit SpinBudget(int64_t least_ns) : least_ns_(least_ns), ns_(least_ns) {}

  int64_t ns() const { return ns_.load(std::memory_order_relaxed); }

  void add_wait(int64_t wait_ns) {
    if (wait_ns > kLongestWaitNs || least_ns_ == 0) return;
    longest_ns_ = std::max(wait_ns, longest_ns_ - longest_ns_ / 256);
    ns_.store(std::max(least_ns_, 2 * longest_ns_), std::memory_order_relaxed);
  }

 private:
  int64_t least_ns_;
  int64_t longest_ns_ = 0;
  std::atomic<int64_t> ns_;
};

}  // namespace kt
