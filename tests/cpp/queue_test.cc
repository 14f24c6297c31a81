#include "runtime/queue.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "threads/pool.h"

namespace {

using kt::Queue;
using kt::QueueConfig;
using kt::Status;

std::unique_ptr<Queue> make_queue(int capacity = 64, int spin_us = 50, int sync_spin_us = 0) {
  QueueConfig config;
  config.capacity = capacity;
  config.spin_us = spin_us;
  config.sync_spin_us = sync_spin_us;
  std::unique_ptr<Queue> queue;
  KT_CHECK(Queue::create(config, &queue).is_ok());
  return queue;
}

int64_t process_cpu_us() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  const auto us = [](const timeval& t) { return int64_t{t.tv_sec} * 1'000'000 + t.tv_usec; };
  return us(usage.ru_utime) + us(usage.ru_stime);
}

bool wait_parked(const Queue& queue) {
  for (int i = 0; i < 2000; ++i) {
    if (queue.parked()) return true;
    usleep(1000);
  }
  return false;
}

// A task that stands still until the test opens it.
struct Door {
  std::atomic<bool> open{false};
  std::atomic<int> passed{0};
};

Status wait_at_door(void* context) {
  auto& door = *static_cast<Door*>(context);
  while (!door.open.load()) usleep(100);
  door.passed.fetch_add(1);
  return Status::ok();
}

Status count_up(void* context) {
  ++*static_cast<int*>(context);  // plain: sync() must order it before the reader
  return Status::ok();
}

struct Step {
  std::vector<int>* order;
  int number;
};

Status append(void* context) {
  auto& step = *static_cast<Step*>(context);
  step.order->push_back(step.number);
  return Status::ok();
}

Status fail_first(void*) { return Status::invalid("first"); }
Status fail_second(void*) { return Status::system("second"); }

KT_TEST(queue_keeps_the_order) {
  for (int spin_us : {0, 200}) {
    auto queue = make_queue(16, spin_us, spin_us);
    std::vector<int> order;
    std::vector<Step> steps;
    for (int i = 0; i < 2000; ++i) steps.push_back({&order, i});
    for (Step& step : steps) queue->submit(append, &step);
    KT_CHECK(queue->sync().is_ok());
    KT_CHECK(order.size() == steps.size());
    for (int i = 0; i < static_cast<int>(order.size()); ++i) KT_CHECK(order[i] == i);
  }
}

KT_TEST(queue_sync_after_every_submit) {
  for (int spin_us : {0, 20}) {
    auto queue = make_queue(1, spin_us, spin_us);
    int count = 0;
    for (int i = 0; i < 2000; ++i) {
      queue->submit(count_up, &count);
      KT_CHECK(queue->sync().is_ok());
      KT_CHECK(count == i + 1);
    }
  }
}

KT_TEST(queue_sync_allows_pending) {
  auto queue = make_queue();
  int count = 0;
  Door door;
  for (int i = 0; i < 3; ++i) queue->submit(count_up, &count);
  queue->submit(wait_at_door, &door);
  queue->submit(count_up, &count);
  KT_CHECK(queue->sync(2).is_ok());  // returns although the door is closed
  KT_CHECK(queue->sync(100).is_ok());
  KT_CHECK(queue->pending() == 2);
  KT_CHECK(door.passed.load() == 0);
  door.open.store(true);
  KT_CHECK(queue->sync(1).is_ok());
  KT_CHECK(door.passed.load() == 1);
  KT_CHECK(queue->sync().is_ok());
  KT_CHECK(count == 4 && queue->pending() == 0);
}

KT_TEST(queue_reports_the_first_error_once) {
  auto queue = make_queue();
  int count = 0;
  queue->submit(count_up, &count);
  queue->submit(fail_first, nullptr);
  queue->submit(fail_second, nullptr);
  queue->submit(count_up, &count);
  const Status first = queue->sync();
  KT_CHECK(first.code() == Status::Code::invalid && first.message() == "first");
  KT_CHECK(count == 2);
  KT_CHECK(queue->sync().is_ok());
  queue->submit(fail_second, nullptr);
  KT_CHECK(queue->sync().code() == Status::Code::system);
  KT_CHECK(queue->sync().is_ok());
}

KT_TEST(queue_full_holds_submitters_back) {
  auto queue = make_queue(4);
  Door door;
  int count = 0;
  queue->submit(wait_at_door, &door);
  for (int i = 0; i < 3; ++i) KT_CHECK(queue->try_submit(count_up, &count));
  KT_CHECK(!queue->try_submit(count_up, &count));
  std::atomic<bool> returned{false};
  std::thread submitter([&] {
    queue->submit(count_up, &count);
    returned.store(true);
  });
  usleep(20'000);
  KT_CHECK(!returned.load());
  door.open.store(true);
  submitter.join();
  KT_CHECK(queue->sync().is_ok());
  KT_CHECK(count == 4);
}

KT_TEST(queue_takes_many_submitters_and_waiters) {
  auto queue = make_queue(8, 20);
  int count = 0;
  std::atomic<int> errors{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 500; ++i) {
        queue->submit(count_up, &count);
        if (i % 7 == t && !queue->sync(t).is_ok()) errors.fetch_add(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  KT_CHECK(queue->sync().is_ok());
  KT_CHECK(count == 2000 && errors.load() == 0);
}

KT_TEST(queue_task_may_submit_another) {
  struct Chain {
    Queue* queue;
    int count = 0;
  };
  auto queue = make_queue();
  Chain chain{queue.get()};
  queue->submit(
      [](void* context) {
        auto& c = *static_cast<Chain*>(context);
        return c.queue->try_submit(count_up, &c.count) ? Status::ok() : Status::invalid("full");
      },
      &chain);
  KT_CHECK(queue->sync().is_ok());
  KT_CHECK(queue->sync().is_ok());  // the second task was submitted before the first sync returned
  KT_CHECK(chain.count == 1);
}

KT_TEST(queue_parks_wakes_and_idles) {
  auto queue = make_queue(16, 200);
  int count = 0;
  for (int i = 0; i < 10; ++i) {
    KT_CHECK(wait_parked(*queue));
    queue->submit(count_up, &count);
    KT_CHECK(queue->sync().is_ok());
  }
  KT_CHECK(count == 10);
  KT_CHECK(wait_parked(*queue));
  const int64_t before_us = process_cpu_us();
  usleep(200'000);
  KT_CHECK(process_cpu_us() - before_us < 2'000);
}

KT_TEST(queue_sync_does_not_burn_a_core) {
  auto queue = make_queue();
  const int64_t before_us = process_cpu_us();
  queue->submit(
      [](void*) {
        usleep(100'000);
        return Status::ok();
      },
      nullptr);
  KT_CHECK(queue->sync().is_ok());
  KT_CHECK(process_cpu_us() - before_us < 10'000);
}

KT_TEST(queue_finishes_its_tasks_when_destroyed) {
  int count = 0;
  for (int i = 0; i < 50; ++i) {
    auto queue = make_queue(64, i % 2 == 0 ? 0 : 1000);
    for (int k = 0; k < i; ++k) queue->submit(count_up, &count);
  }
  KT_CHECK(count == 49 * 50 / 2);
}

struct Sum {
  kt::Pool* pool;
  std::vector<int> parts;
  int total = 0;
};

KT_TEST(queue_drives_a_pool) {
  kt::PoolConfig config;
  config.nodes.resize(1);
  config.nodes[0].threads = 2;
  std::unique_ptr<kt::Pool> pool;
  KT_CHECK(kt::Pool::create(config, &pool).is_ok());
  auto queue = make_queue();
  Sum sum{pool.get(), std::vector<int>(2)};
  for (int i = 0; i < 500; ++i) {
    queue->submit(
        [](void* context) {
          return static_cast<Sum*>(context)->pool->run(
              [](void* inner, const kt::Worker& w) {
                auto& s = *static_cast<Sum*>(inner);
                s.parts[w.global] = w.global + 1;
                w.barrier();
                if (w.global == 0) s.total += s.parts[0] + s.parts[1];
              },
              context);
        },
        &sum);
    if (i % 3 == 0) KT_CHECK(queue->sync(1).is_ok());
  }
  KT_CHECK(queue->sync().is_ok());
  KT_CHECK(sum.total == 1500);
}

KT_TEST(queue_refuses_a_forked_child_and_can_be_destroyed_there) {
  auto queue = make_queue();
  int count = 0;
  const pid_t child = fork();
  if (child == 0) {
    alarm(10);  // a child that waits for a thread it does not have is killed
    queue->submit(count_up, &count);
    const bool refused = !queue->try_submit(count_up, &count);
    const Status status = queue->sync();
    const bool said = status.code() == Status::Code::unsupported && status.message().find("fork") != std::string::npos;
    queue.reset();
    _exit(refused && said && count == 0 ? 0 : 1);
  }
  int status = -1;
  KT_CHECK(waitpid(child, &status, 0) == child);
  KT_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  queue->submit(count_up, &count);
  KT_CHECK(queue->sync().is_ok() && count == 1);
}

KT_TEST(queue_refuses_nonsense) {
  std::unique_ptr<Queue> queue;
  QueueConfig config;
  config.capacity = 0;
  KT_CHECK(Queue::create(config, &queue).code() == Status::Code::invalid);
  config.capacity = 1;
  config.spin_us = -1;
  KT_CHECK(Queue::create(config, &queue).code() == Status::Code::invalid);
  config.spin_us = 0;
  config.sync_spin_us = -1;
  KT_CHECK(Queue::create(config, &queue).code() == Status::Code::invalid);
  KT_CHECK(queue == nullptr);
}

}  // namespace
