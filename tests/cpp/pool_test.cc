#include "threads/pool.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

namespace {

using kt::Pool;
using kt::PoolConfig;
using kt::PoolNode;
using kt::Status;
using kt::Worker;

std::unique_ptr<Pool> make_pool(const std::vector<int>& node_threads, int spin_us = 100) {
  PoolConfig config;
  config.spin_us = spin_us;
  for (int threads : node_threads) {
    PoolNode node;
    node.threads = threads;
    config.nodes.push_back(node);
  }
  std::unique_ptr<Pool> pool;
  KT_CHECK(Pool::create(config, &pool).is_ok());
  return pool;
}

// One thread alone, even and odd, more than the machine has, and one to three nodes of unequal size.
const std::vector<std::vector<int>> kShapes = {{1},    {2},    {3},    {8},       {1, 1},
                                               {1, 2}, {2, 1}, {4, 4}, {1, 1, 1}, {3, 2, 3}};

void run(Pool& pool, Pool::Job job, void* context) { KT_CHECK(pool.run(job, context).is_ok()); }

int64_t process_cpu_us() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  const auto us = [](const timeval& t) { return int64_t{t.tv_sec} * 1'000'000 + t.tv_usec; };
  return us(usage.ru_utime) + us(usage.ru_stime);
}

bool wait_parked(const Pool& pool, int expected) {
  for (int i = 0; i < 2000; ++i) {
    if (pool.parked_threads() == expected) return true;
    usleep(1000);
  }
  return false;
}

// Plain ints, so that a broken barrier is also a data race for the thread sanitizer.
struct Phases {
  std::vector<int> values;     // one per worker
  std::vector<int> node_sums;  // one per node
  std::atomic<int> wrong{0};
};

void phases_job(void* context, const Worker& w) {
  auto& p = *static_cast<Phases*>(context);
  for (int round = 0; round < 3; ++round) {
    p.values[w.global] = round + 1;
    w.node_barrier();
    if (w.index == 0) {
      int sum = 0;
      for (int i = 0; i < w.node_threads; ++i) sum += p.values[w.global + i];
      p.node_sums[w.node] = sum;
    }
    w.barrier();
    int sum = 0;
    for (int i = 0; i < w.pool->node_count(); ++i) sum += p.node_sums[i];
    if (sum != (round + 1) * w.total_threads) p.wrong.fetch_add(1);
    w.barrier();
  }
}

KT_TEST(pool_barriers_separate_phases) {
  for (const std::vector<int>& shape : kShapes) {
    auto pool = make_pool(shape);
    Phases p;
    p.values.resize(pool->total_threads());
    p.node_sums.resize(pool->node_count());
    const int runs = pool->total_threads() <= 3 ? 1000 : 100;
    for (int i = 0; i < runs; ++i) {
      std::fill(p.values.begin(), p.values.end(), 0);
      run(*pool, phases_job, &p);
    }
    KT_CHECK(p.wrong.load() == 0);
  }
}

struct Seen {
  std::vector<Worker> workers;
  std::vector<std::thread::id> ids;
};

KT_TEST(pool_numbers_its_workers) {
  for (const std::vector<int>& shape : kShapes) {
    auto pool = make_pool(shape);
    Seen seen;
    seen.workers.resize(pool->total_threads());
    seen.ids.resize(pool->total_threads());
    run(
        *pool,
        [](void* context, const Worker& w) {
          auto& s = *static_cast<Seen*>(context);
          s.workers[w.global] = w;
          s.ids[w.global] = std::this_thread::get_id();
        },
        &seen);
    KT_CHECK(pool->node_count() == static_cast<int>(shape.size()));
    KT_CHECK(seen.ids[0] == std::this_thread::get_id());
    int global = 0;
    for (int node = 0; node < pool->node_count(); ++node) {
      KT_CHECK(pool->node(node).threads == shape[node]);
      for (int index = 0; index < shape[node]; ++index, ++global) {
        const Worker& w = seen.workers[global];
        KT_CHECK(w.pool == pool.get() && w.node == node && w.index == index && w.node_threads == shape[node]);
        KT_CHECK(w.global == global && w.total_threads == pool->total_threads());
      }
    }
    std::sort(seen.ids.begin(), seen.ids.end());
    KT_CHECK(std::unique(seen.ids.begin(), seen.ids.end()) == seen.ids.end());
  }
}

KT_TEST(pool_runs_thousands_of_empty_jobs) {
  for (int threads : {1, 2, 3, 8}) {
    auto pool = make_pool({threads});
    int count = 0;
    for (int i = 0; i < 5000; ++i) {
      run(
          *pool,
          [](void* context, const Worker& w) {
            if (w.global == w.total_threads - 1) ++*static_cast<int*>(context);
          },
          &count);
    }
    KT_CHECK(count == 5000);
  }
}

KT_TEST(pool_serialises_callers) {
  for (int threads : {1, 2, 3}) {
    auto pool = make_pool({threads});
    Phases p;
    p.values.resize(threads);
    p.node_sums.resize(1);
    std::vector<std::thread> callers;
    for (int c = 0; c < 4; ++c) {
      callers.emplace_back([&] {
        for (int i = 0; i < 100; ++i) run(*pool, phases_job, &p);
      });
    }
    for (std::thread& caller : callers) caller.join();
    KT_CHECK(p.wrong.load() == 0);
  }
}

KT_TEST(pool_parks_and_wakes) {
  for (int spin_us : {0, 50}) {
    auto pool = make_pool({2, 1}, spin_us);
    std::atomic<int> count{0};
    for (int i = 0; i < 20; ++i) {
      KT_CHECK(wait_parked(*pool, 2));
      run(*pool, [](void* context, const Worker&) { static_cast<std::atomic<int>*>(context)->fetch_add(1); }, &count);
    }
    KT_CHECK(count.load() == 60);
  }
}

KT_TEST(pool_sleeps_in_long_barriers) {
  auto pool = make_pool({3});
  const int64_t before_us = process_cpu_us();
  run(
      *pool,
      [](void*, const Worker& w) {
        if (w.global == 1) usleep(100'000);
        w.barrier();
        if (w.global == 0) usleep(100'000);
        w.node_barrier();
      },
      nullptr);
  // Two waiters may spin for their budget of 20 ms at either barrier; without an end they would for 400 ms.
  KT_CHECK(process_cpu_us() - before_us < 150'000);
}

KT_TEST(pool_uses_no_cpu_when_idle) {
  auto pool = make_pool({3}, 500);
  run(*pool, [](void*, const Worker&) {}, nullptr);
  KT_CHECK(wait_parked(*pool, 2));
  const int64_t before_us = process_cpu_us();
  usleep(200'000);
  KT_CHECK(process_cpu_us() - before_us < 2'000);
}

KT_TEST(pool_spins_for_as_long_as_it_is_told) {
  auto pool = make_pool({3}, 1'000'000);
  pool->set_spin_ns(0);  // the least there is: a pool that spins goes on doing so
  run(*pool, [](void*, const Worker&) {}, nullptr);
  KT_CHECK(wait_parked(*pool, 2));

  auto never = make_pool({3}, 0);
  never->set_spin_ns(10'000'000'000);
  run(*never, [](void*, const Worker&) {}, nullptr);
  KT_CHECK(wait_parked(*never, 2));
}

KT_TEST(pool_is_destroyed_in_any_state) {
  for (int i = 0; i < 20; ++i) make_pool({3});  // never used, perhaps not even started
  for (int i = 0; i < 20; ++i) {                // spinning
    auto pool = make_pool({2, 1}, 1'000'000);
    run(*pool, [](void*, const Worker& w) { w.barrier(); }, nullptr);
  }
  for (int i = 0; i < 5; ++i) {  // parked
    auto pool = make_pool({3}, 0);
    run(*pool, [](void*, const Worker&) {}, nullptr);
    KT_CHECK(wait_parked(*pool, 2));
  }
}

KT_TEST(pool_pins_where_it_may) {
  PoolConfig config;
  PoolNode node;
  node.threads = 4;
  node.cpus = {0, 0, 8191};  // worker 2: no such CPU; worker 3 floats
  node.numa_id = 0;
  config.nodes = {node};
  std::unique_ptr<Pool> pool;
  KT_CHECK(Pool::create(config, &pool).is_ok());
  cpu_set_t allowed;
  KT_CHECK(sched_getaffinity(0, sizeof(allowed), &allowed) == 0);
  KT_CHECK(pool->pinned_threads() == (CPU_ISSET(0, &allowed) ? 1 : 0));
  int wrong = 0;
  run(
      *pool,
      [](void* context, const Worker& w) {
        cpu_set_t mine;
        sched_getaffinity(0, sizeof(mine), &mine);
        if (w.global == 1 && w.pool->pinned_threads() == 1 && CPU_COUNT(&mine) != 1) ++*static_cast<int*>(context);
      },
      &wrong);
  KT_CHECK(wrong == 0);
}

KT_TEST(pool_leaves_the_callers_affinity_alone) {
  cpu_set_t before;
  KT_CHECK(sched_getaffinity(0, sizeof(before), &before) == 0);
  if (CPU_COUNT(&before) < 2) return;
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE && cpus.size() < 2; ++cpu) {
    if (CPU_ISSET(cpu, &before)) cpus.push_back(cpu);
  }
  PoolConfig config;
  PoolNode node;
  node.threads = 2;
  node.cpus = cpus;
  config.nodes = {node};
  std::unique_ptr<Pool> pool;
  KT_CHECK(Pool::create(config, &pool).is_ok());
  // Stand on worker 1's CPU: run() must move this thread away, and give the whole mask back.
  cpu_set_t there;
  CPU_ZERO(&there);
  CPU_SET(cpus[1], &there);
  int at_home = 0;
  for (int i = 0; i < 20; ++i) {
    sched_setaffinity(0, sizeof(there), &there);
    sched_setaffinity(0, sizeof(before), &before);
    int cpu = -1;
    run(
        *pool,
        [](void* context, const Worker& w) {
          if (w.global == 0) *static_cast<int*>(context) = sched_getcpu();
          w.barrier();
        },
        &cpu);
    at_home += cpu == cpus[0];
  }
  KT_CHECK(at_home >= 10);  // not 20: the scheduler may move it too
  cpu_set_t after;
  KT_CHECK(sched_getaffinity(0, sizeof(after), &after) == 0);
  KT_CHECK(CPU_EQUAL(&before, &after));
}

KT_TEST(a_thread_makes_way_for_the_workers) {
  cpu_set_t before;
  KT_CHECK(sched_getaffinity(0, sizeof(before), &before) == 0);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE && cpus.size() < 2; ++cpu) {
    if (CPU_ISSET(cpu, &before)) cpus.push_back(cpu);
  }
  if (cpus.size() < 2) {
    std::printf("one CPU: not run\n");
    return;
  }
  for (const bool is_full : {false, true}) {
    PoolConfig config;
    PoolNode node;
    node.threads = is_full ? CPU_COUNT(&before) : 1;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &before) && static_cast<int>(node.cpus.size()) < node.threads) node.cpus.push_back(cpu);
    }
    config.nodes = {node};
    std::unique_ptr<Pool> pool;
    KT_CHECK(Pool::create(config, &pool).is_ok());
    cpu_set_t there;
    CPU_ZERO(&there);
    CPU_SET(cpus[0], &there);
    int elsewhere = 0;
    for (int i = 0; i < 20; ++i) {
      sched_setaffinity(0, sizeof(there), &there);
      sched_setaffinity(0, sizeof(before), &before);
      pool->make_way();
      elsewhere += sched_getcpu() != cpus[0];
    }
    if (!is_full) KT_CHECK(elsewhere >= 10);  // not 20: the scheduler may move it back
    cpu_set_t after;
    KT_CHECK(sched_getaffinity(0, sizeof(after), &after) == 0);
    KT_CHECK(CPU_EQUAL(&before, &after));
  }
}

KT_TEST(pool_refuses_a_forked_child_and_can_be_destroyed_there) {
  auto pool = make_pool({3});
  run(*pool, [](void*, const Worker&) {}, nullptr);
  const pid_t child = fork();
  if (child == 0) {
    alarm(10);  // a child that waits for threads it does not have is killed
    bool ran = false;
    const Status status = pool->run([](void* context, const Worker&) { *static_cast<bool*>(context) = true; }, &ran);
    const bool said = status.code() == Status::Code::unsupported && status.message().find("fork") != std::string::npos;
    pool.reset();
    _exit(said && !ran ? 0 : 1);
  }
  int status = -1;
  KT_CHECK(waitpid(child, &status, 0) == child);
  KT_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  run(*pool, [](void*, const Worker&) {}, nullptr);
}

KT_TEST(pool_refuses_nonsense) {
  std::unique_ptr<Pool> pool;
  PoolConfig config;
  KT_CHECK(Pool::create(config, &pool).code() == Status::Code::invalid);
  config.nodes.resize(1);
  config.nodes[0].threads = 0;
  KT_CHECK(Pool::create(config, &pool).code() == Status::Code::invalid);
  config.nodes[0].threads = 100'000;
  KT_CHECK(Pool::create(config, &pool).code() == Status::Code::invalid);
  config.nodes[0].threads = 1;
  config.nodes[0].cpus = {-1};
  KT_CHECK(Pool::create(config, &pool).code() == Status::Code::invalid);
  config.nodes[0].cpus = {};
  config.spin_us = -1;
  KT_CHECK(Pool::create(config, &pool).code() == Status::Code::invalid);
  KT_CHECK(pool == nullptr);
}

}  // namespace
