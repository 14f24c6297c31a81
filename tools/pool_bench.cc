// Overhead of the pool and the queue in microseconds: what a forward with nothing to compute would cost.
//   g++ -std=c++20 -O2 -DNDEBUG -Icpp tools/pool_bench.cc cpp/threads/*.cc cpp/runtime/queue.cc -pthread -o pool_bench
//   ./pool_bench [threads]     default: every CPU this process may use
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "runtime/queue.h"
#include "threads/gate.h"
#include "threads/pool.h"

namespace {

std::vector<int> allowed_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof(set), &set);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

struct Case {
  kt::Pool* pool = nullptr;
  kt::Queue* queue = nullptr;  // null = the caller runs the pool itself
  int barriers = 0;
  int gap_us = 0;  // asleep between two calls
};

void job(void* context, const kt::Worker& worker) {
  const int barriers = static_cast<const Case*>(context)->barriers;
  for (int i = 0; i < barriers; ++i) worker.barrier();
}

kt::Status task(void* context) {
  return static_cast<const Case*>(context)->pool->run(job, context);
}

void measure(const char* name, Case c, int calls) {
  std::vector<double> us;
  us.reserve(calls);
  for (int i = 0; i < calls + 10; ++i) {
    if (c.gap_us > 0) usleep(c.gap_us);
    const int64_t start_ns = kt::monotonic_ns();
    if (c.queue == nullptr) {
      (void)c.pool->run(job, &c);
    } else {
      c.queue->submit(task, &c);
      (void)c.queue->sync();
    }
    if (i >= 10) us.push_back(static_cast<double>(kt::monotonic_ns() - start_ns) / 1000);
  }
  std::sort(us.begin(), us.end());
  const auto at = [&](double q) { return us[static_cast<size_t>(q * static_cast<double>(us.size() - 1))]; };
  std::printf("%-44s %8.2f %8.2f %8.2f %9.1f\n", name, at(0.0), at(0.5), at(0.99), at(1.0));
  std::fflush(stdout);
}

std::unique_ptr<kt::Pool> make_pool(const std::vector<int>& cpus, int threads, int spin_us) {
  kt::PoolConfig config;
  config.nodes.resize(1);
  config.nodes[0].threads = threads;
  if (threads <= static_cast<int>(cpus.size())) config.nodes[0].cpus.assign(cpus.begin(), cpus.begin() + threads);
  config.spin_us = spin_us;
  std::unique_ptr<kt::Pool> pool;
  if (!kt::Pool::create(config, &pool).is_ok()) std::exit(1);
  return pool;
}

void measure_queue(const char* name, Case c, int cpu, int sync_spin_us, int calls) {
  kt::QueueConfig config;
  config.cpu = cpu;
  config.sync_spin_us = sync_spin_us;
  std::unique_ptr<kt::Queue> queue;
  if (!kt::Queue::create(config, &queue).is_ok()) std::exit(1);
  c.queue = queue.get();
  measure(name, c, calls);
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<int> cpus = allowed_cpus();
  const int threads = argc > 1 ? std::atoi(argv[1]) : static_cast<int>(cpus.size());
  if (threads < 1) return 1;
  std::printf("%d threads on %d CPUs%23s %8s %8s %8s %9s\n", threads, static_cast<int>(cpus.size()), "", "min us",
              "median", "p99", "max");
  auto pool = make_pool(cpus, threads, 500);
  measure("run", {pool.get()}, 20'000);
  measure("run, 4 barriers", {pool.get(), nullptr, 4}, 20'000);
  measure("run, 4 barriers, 300 us apart", {pool.get(), nullptr, 4, 300}, 500);
  measure("run, 4 barriers, 2 ms apart (parked)", {pool.get(), nullptr, 4, 2000}, 200);
  for (const int spin_us : {0, 20, 200}) {
    char name[64];
    std::snprintf(name, sizeof(name), "submit+sync, 4 barriers, sync spin %d", spin_us);
    measure_queue(name, {pool.get(), nullptr, 4}, cpus[0], spin_us, 5'000);
    std::snprintf(name, sizeof(name), "  300 us apart, sync spin %d", spin_us);
    measure_queue(name, {pool.get(), nullptr, 4, 300}, cpus[0], spin_us, 500);
    std::snprintf(name, sizeof(name), "  2 ms apart (parked), sync spin %d", spin_us);
    measure_queue(name, {pool.get(), nullptr, 4, 2000}, cpus[0], spin_us, 200);
  }
  pool.reset();
  for (const int more : {1, threads, 3 * threads}) {
    char name[64];
    std::snprintf(name, sizeof(name), "%d threads, run, 4 barriers", threads + more);
    auto larger = make_pool(cpus, threads + more, 500);
    measure(name, {larger.get(), nullptr, 4}, 2'000);
  }
  return 0;
}
