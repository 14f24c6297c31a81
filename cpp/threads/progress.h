// Tasks that wait for others of the same job.
#pragma once

#include <atomic>

#include "threads/gate.h"

namespace kt {

// How many tasks of a kind are done, for those that need all of them. Tasks must be taken in an order in which none
// needs one behind it, and done by each worker in that order: then the first that is not done waits for nobody. Two
// lines apart, as TaskCounter.
class alignas(128) Progress {
 public:
  void reset() { done_.store(0, std::memory_order_relaxed); }
  // What the caller wrote before is seen by everyone whose wait() counts it, and by whoever adds later. Returns how
  // many are done.
  int add() { return done_.fetch_add(1, std::memory_order_acq_rel) + 1; }
  void wait(int count) const {
    const auto there = [&] { return done_.load(std::memory_order_acquire) >= count; };
    while (!spin_until(there, kPolicy)) yield_core();
  }

 private:
  // Those who are waited for have started long before as a rule.
  static constexpr SpinPolicy kPolicy{1'000'000, 1000};
  std::atomic<int> done_{0};
};

}  // namespace kt
