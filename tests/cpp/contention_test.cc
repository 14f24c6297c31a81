// When a waiting thread stops spinning because another one wants its core.
#include "threads/contention.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <thread>

#include "check.h"
#include "threads/gate.h"

namespace {

using kt::ContentionWatch;

constexpr int64_t kMs = 1'000'000;

KT_TEST(contention_one_long_yield_says_nothing) {
  ContentionWatch watch;
  KT_CHECK(!watch.add_long_yield(kMs, 7));
  KT_CHECK(!watch.sleeps(kMs));
}

KT_TEST(contention_long_yields_without_switches_are_the_hypervisor) {
  ContentionWatch watch;
  for (int i = 1; i <= 100; ++i) KT_CHECK(!watch.add_long_yield(i * kMs, 7));
  KT_CHECK(!watch.sleeps(101 * kMs));
}

KT_TEST(contention_a_switch_between_long_yields_is_another_thread) {
  ContentionWatch watch;
  watch.add_long_yield(kMs, 7);
  KT_CHECK(watch.add_long_yield(4 * kMs, 8));
  KT_CHECK(watch.sleeps(5 * kMs));
  KT_CHECK(!watch.sleeps(4 * kMs + ContentionWatch::kSleepNs));
}

KT_TEST(contention_a_switch_of_long_ago_does_not_count) {
  ContentionWatch watch;
  watch.add_long_yield(kMs, 7);
  KT_CHECK(!watch.add_long_yield(kMs + ContentionWatch::kRecentNs, 8));
}

void pin_to(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
}

KT_TEST(contention_a_spinner_beside_a_busy_thread_sleeps) {
  const int cpu = sched_getcpu();
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    pin_to(cpu);
    while (!stop.load(std::memory_order_relaxed)) {
    }
  });
  bool slept = false;
  std::thread spinner([&] {
    pin_to(cpu);
    // Two slices of the other; the budget is only there to end a test that fails.
    slept = !kt::spin_until([] { return false; }, {.budget_ns = 5'000 * kMs}) &&
            kt::contention_watch.sleeps(kt::monotonic_ns());
  });
  spinner.join();
  stop.store(true);
  busy.join();
  KT_CHECK(slept);
}

}  // namespace
