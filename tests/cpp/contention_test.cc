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

// Long yields every millisecond, `share` per cent of the time spent waiting for others. True: it sleeps at the end.
bool sleeps_after(int64_t ms, int64_t share) {
  ContentionWatch watch;
  bool said = false;
  for (int64_t i = 1; i <= ms; ++i) said = watch.add_long_yield(i * kMs, i * kMs * share / 100) || said;
  KT_CHECK_EQ(said, watch.sleeps(ms * kMs));
  return said;
}

KT_TEST(contention_a_thread_that_takes_the_core_is_seen_within_a_few_slices) {
  KT_CHECK(sleeps_after(25, 95));
  KT_CHECK(!sleeps_after(15, 95));
}

KT_TEST(contention_long_yields_without_waiting_are_the_hypervisor) { KT_CHECK(!sleeps_after(100, 0)); }

KT_TEST(contention_short_runs_of_the_kernel_do_not_count) { KT_CHECK(!sleeps_after(100, 30)); }

KT_TEST(contention_ends_by_itself) {
  ContentionWatch watch;
  int64_t now = kMs;
  while (!watch.add_long_yield(now, now)) now += kMs;
  KT_CHECK(watch.sleeps(now + kMs));
  KT_CHECK(!watch.sleeps(now + ContentionWatch::kSleepNs));
}

KT_TEST(contention_yields_far_apart_are_not_one_window) {
  ContentionWatch watch;
  for (int64_t i = 1; i < 20; ++i) KT_CHECK(!watch.add_long_yield(i * ContentionWatch::kGapNs, i * 19 * kMs));
}

KT_TEST(contention_nothing_is_known_without_the_account_of_the_kernel) {
  ContentionWatch watch;
  for (int64_t i = 1; i < 100; ++i) KT_CHECK(!watch.add_long_yield(i * kMs, -1));
}

void pin_to(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
}

KT_TEST(contention_a_spinner_beside_a_busy_thread_sleeps) {
  if (kt::waited_for_core_ns() < 0) {
    std::printf("  skipped: no /proc/thread-self/schedstat here, so spinners never sleep for others\n");
    return;
  }
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
    // A few slices of the other; the budget is only there to end a test that fails.
    slept = !kt::spin_until([] { return false; }, {.budget_ns = 5'000 * kMs}) &&
            kt::contention_watch.sleeps(kt::monotonic_ns());
  });
  spinner.join();
  stop.store(true);
  busy.join();
  KT_CHECK(slept);
}

}  // namespace
