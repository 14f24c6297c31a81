// Bells: words through which someone who cannot call submit() starts work on the queue.
#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "runtime/queue.h"

namespace {

using kt::Queue;
using kt::QueueConfig;
using kt::Status;

std::unique_ptr<Queue> make_queue(int spin_us) {
  QueueConfig config;
  config.spin_us = spin_us;
  std::unique_ptr<Queue> queue;
  KT_CHECK(Queue::create(config, &queue).is_ok());
  return queue;
}

struct Rung {
  std::atomic<uint32_t> word{0};
  std::atomic<int> count{0};
  std::atomic<uint32_t> last{0};

  static void ring(void* context, uint32_t value) {
    auto& rung = *static_cast<Rung*>(context);
    rung.last.store(value);
    rung.count.fetch_add(1);
  }
  void add_to(Queue& queue) { queue.add_bell(&word, ring, this); }
  bool heard(int times) const {
    for (int i = 0; i < 20'000 && count.load() < times; ++i) usleep(100);
    return count.load() == times;
  }
};

bool wait_parked(const Queue& queue) {
  for (int i = 0; i < 2000; ++i) {
    if (queue.parked()) return true;
    usleep(1000);
  }
  return false;
}

// Of the queue's thread. Reading it, in contrast to asking for it, does not wake the thread.
clockid_t cpu_clock(Queue& queue) {
  clockid_t clock;
  queue.submit(
      [](void* context) {
        pthread_getcpuclockid(pthread_self(), static_cast<clockid_t*>(context));
        return Status::ok();
      },
      &clock);
  KT_CHECK(queue.sync().is_ok());
  return clock;
}

int64_t read_ns(clockid_t clock) {
  timespec used{};
  clock_gettime(clock, &used);
  return int64_t{used.tv_sec} * 1'000'000'000 + used.tv_nsec;
}

KT_TEST(bell_is_heard_however_the_thread_waits) {
  for (int spin_us : {0, 100, 2'000'000}) {  // it naps, spins a little and naps, spins
    auto queue = make_queue(spin_us);
    Rung rung;
    rung.add_to(*queue);
    int times = 0;
    for (int wait_us : {0, 20, 200, 3'000, 0, 60'000}) {
      usleep(wait_us);
      rung.word.store(7 + times, std::memory_order_release);
      KT_CHECK(rung.heard(++times));
      KT_CHECK(rung.last.load() == static_cast<uint32_t>(6 + times));
      KT_CHECK(rung.word.load() == 0);
    }
    queue->remove_bell(&rung.word);
  }
}

// Whether others want the cores: then a yield lasts, and the queue's thread is right to sleep.
bool cores_are_busy() {
  for (int i = 0; i < 2000; ++i) {
    const int64_t before = read_ns(CLOCK_MONOTONIC);
    sched_yield();
    if (read_ns(CLOCK_MONOTONIC) - before >= 50'000) return true;
    usleep(i % 100 == 0 ? 1000 : 0);
  }
  return false;
}

KT_TEST(bell_expected_is_spun_for) {
  auto queue = make_queue(50'000);
  const clockid_t clock = cpu_clock(*queue);
  Rung rung;
  rung.add_to(*queue);
  bool spun = false;
  for (int i = 0; i < 20 && !spun; ++i) {  // a core that others need is left to them
    usleep(100'000);                       // it naps by now
    const int64_t napping = read_ns(clock);
    usleep(10'000);
    const int64_t before = read_ns(clock);
    queue->expect_bell();
    usleep(10'000);
    spun = read_ns(clock) - before > 10 * (before - napping) && read_ns(clock) - before > 1'000'000;
  }
  if (!spun && cores_are_busy()) {
    std::printf("  the cores are busy: that it spins is not judged\n");
  } else {
    KT_CHECK(spun);
  }
  rung.word.store(1);
  KT_CHECK(rung.heard(1));
  queue->remove_bell(&rung.word);
}

KT_TEST(spin_budget_is_twice_the_longest_of_the_recent_waits) {
  constexpr int64_t kUs = 1000, kMs = 1'000'000;
  kt::SpinBudget budget(500 * kUs);
  for (int step = 0; step < 3; ++step) {  // of a model with 48 layers
    for (int layer = 0; layer < 47; ++layer) budget.add_wait(100 * kUs);
    budget.add_wait(2 * kMs);
    KT_CHECK(budget.ns() == 4 * kMs);
  }
  for (int layer = 0; layer < 60; ++layer) budget.add_wait(100 * kUs);
  KT_CHECK(budget.ns() > 2 * kMs);  // it lasts to the next step
  budget.add_wait(kt::SpinBudget::kLongestWaitNs + 1);
  KT_CHECK(budget.ns() < 4 * kMs);  // a pause, not a step
  for (int i = 0; i < 2000; ++i) budget.add_wait(100 * kUs);
  KT_CHECK(budget.ns() == 500 * kUs);

  kt::SpinBudget none(0);
  none.add_wait(2 * kMs);
  KT_CHECK(none.ns() == 0);
}

KT_TEST(bells_that_keep_coming_are_spun_for) {
  for (int spin_us : {0, 100}) {
    auto queue = make_queue(spin_us);
    Rung rung;
    rung.add_to(*queue);
    KT_CHECK(queue->spin_ns() == spin_us * 1000);
    for (int times = 1; times <= 50; ++times) {
      usleep(1000);
      rung.word.store(1, std::memory_order_release);
      KT_CHECK(rung.heard(times));
    }
    // Waits of 1 ms and more; on a busy machine some are of over 5 ms, which do not count.
    KT_CHECK(spin_us == 0 ? queue->spin_ns() == 0 : queue->spin_ns() >= 1'900'000);
    KT_CHECK(queue->spin_ns() <= 2 * kt::SpinBudget::kLongestWaitNs);
    queue->remove_bell(&rung.word);
  }
}

KT_TEST(bells_do_not_keep_an_idle_core_busy) {
  auto queue = make_queue(500);
  const clockid_t clock = cpu_clock(*queue);
  std::array<Rung, 100> rung;  // as many as a model with graphs of many sizes has stages
  for (Rung& one : rung) one.add_to(*queue);
  usleep(50'000);
  const int64_t before = read_ns(clock);
  usleep(1'000'000);
#if defined(__SANITIZE_THREAD__)
  constexpr int64_t kMostNs = 300'000'000;  // the sanitizer makes a look at 100 words ten times as long
#else
  constexpr int64_t kMostNs = 30'000'000;
#endif
  KT_CHECK(read_ns(clock) - before < kMostNs);
  rung[99].word.store(3);
  KT_CHECK(rung[99].heard(1));
  for (Rung& one : rung) queue->remove_bell(&one.word);
  usleep(20'000);  // of the last nap and the spinning
  KT_CHECK(wait_parked(*queue));
  const int64_t parked = read_ns(clock);
  usleep(200'000);
  KT_CHECK(read_ns(clock) == parked);
  rung[0].word.store(3);
  usleep(5'000);
  KT_CHECK(rung[0].count.load() == 0);
}

struct Chain {
  Queue* queue;
  std::atomic<bool> stop{false};
  std::atomic<int> count{0};

  static Status task(void* context) {
    auto& chain = *static_cast<Chain*>(context);
    chain.count.fetch_add(1);
    if (!chain.stop.load() && !chain.queue->try_submit(task, context)) return Status::invalid("full");
    return Status::ok();
  }
};

KT_TEST(bells_are_heard_between_tasks) {
  auto queue = make_queue(50);
  Rung rung;
  rung.add_to(*queue);
  Chain chain{queue.get()};
  queue->submit(Chain::task, &chain);  // there is always another task
  for (int i = 1; i <= 100; ++i) {
    rung.word.store(i);
    KT_CHECK(rung.heard(i));
  }
  chain.stop.store(true);
  KT_CHECK(queue->sync().is_ok());
  queue->remove_bell(&rung.word);
}

// A bell that is rung again as soon as it was heard.
struct Eager {
  std::atomic<uint32_t> word{0};
  std::atomic<bool> stop{false};
  std::atomic<int> count{0};

  static void ring(void* context, uint32_t value) {
    auto& eager = *static_cast<Eager*>(context);
    eager.count.fetch_add(1);
    if (!eager.stop.load()) eager.word.store(value);
  }
};

KT_TEST(bells_take_turns_with_each_other_and_with_tasks) {
  auto queue = make_queue(50);
  Eager first;
  Rung second;
  queue->add_bell(&first.word, Eager::ring, &first);
  second.add_to(*queue);
  first.word.store(1);
  for (int i = 1; i <= 50; ++i) {
    second.word.store(i);
    KT_CHECK(second.heard(i));
    int count = 0;
    queue->submit(
        [](void* context) {
          ++*static_cast<int*>(context);
          return Status::ok();
        },
        &count);
    KT_CHECK(queue->sync().is_ok() && count == 1);
  }
  KT_CHECK(first.count.load() > 50);
  first.stop.store(true);
  queue->remove_bell(&first.word);
  queue->remove_bell(&second.word);
}

KT_TEST(bells_come_and_go_while_others_ring) {
  auto queue = make_queue(50);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i) {
        auto rung = std::make_unique<Rung>();
        rung->add_to(*queue);
        rung->word.store(i + 1);
        if (!rung->heard(1) || rung->last.load() != static_cast<uint32_t>(i + 1)) wrong.fetch_add(1);
        queue->remove_bell(&rung->word);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  KT_CHECK(wrong.load() == 0);
}

// After remove_bell nothing of it is used: neither the word nor what ring() gets.
struct Slow {
  std::atomic<uint32_t> word{0};
  std::atomic<bool> begun{false};
  std::atomic<bool> ended{false};

  static void ring(void* context, uint32_t) {
    auto& slow = *static_cast<Slow*>(context);
    slow.begun.store(true);
    usleep(5'000);
    slow.ended.store(true);
  }
};

KT_TEST(bell_that_was_removed_has_rung_to_the_end) {
  auto queue = make_queue(50);
  Slow slow;
  queue->add_bell(&slow.word, Slow::ring, &slow);
  slow.word.store(1);
  while (!slow.begun.load()) usleep(100);
  queue->remove_bell(&slow.word);
  KT_CHECK(slow.ended.load());
}

}  // namespace
