#include "threads/pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cstdio>
#include <mutex>
#include <string>
#include <utility>

#include "threads/gate.h"
#include "threads/process.h"
#include "threads/thread.h"

namespace kt {
namespace {

// Two lines: Intel's L2 fetches lines in pairs, so 64 bytes apart still disturbs.
constexpr size_t kLine = 128;
constexpr int kMaxThreads = kMaxCpus;
// Waiting inside a job: longer than the imbalance of a phase, and than a hypervisor keeps a core from the worker that
// is waited for. A waiter that sleeps meanwhile hands its own core to the hypervisor too, and comes late to the next
// phase (5..50 us on an idle host, milliseconds on a busy one).
constexpr int64_t kBarrierSpinNs = 20'000'000;

#ifndef NDEBUG
thread_local const Pool* running_pool = nullptr;
#endif

}  // namespace

struct Pool::Impl {
  // The workers of one node. `gate` is the only line they watch: a new job and the end of a barrier both advance it.
  // One gate is enough for both because a worker that waits for one cannot be waiting for the other.
  struct Group {
    alignas(kLine) Gate gate;
    Job job = nullptr;  // null = leave. On the gate's line, so a woken worker has it without another miss.
    void* context = nullptr;
    alignas(kLine) std::atomic<int> arrived{0};
    int threads = 0;
  };
  struct Thread {
    Impl* impl;
    Worker worker;
    pthread_t handle;
  };

  // Everyone at once. The last worker of a node speaks for the node; true for the last worker of all.
  bool arrive(Group& group);
  void barrier(int node);
  void node_barrier(int node);
  void start(Job job, void* context);
  void leave_foreign_cpu() const;
  void make_way() const;
  Status start_threads(Pool* pool);
  void stop_threads();
  static void* thread_main(void* argument);

  std::unique_ptr<Group[]> groups;
  int group_count = 0;
  alignas(kLine) std::atomic<int> arrived_groups{0};
  alignas(kLine) Gate done;  // watched by the caller of run() only

  alignas(kLine) std::mutex run_mutex;
  std::vector<PoolNode> nodes;
  std::vector<Thread> threads;  // workers 1 .. total-1; never resized after start
  int total = 0;
  int pinned = 0;
  bool oversubscribed = false;  // more threads than CPUs
  std::atomic<int64_t> idle_spin_ns{0};
  int64_t yield_ns = SpinPolicy{}.yield_ns;  // of idle workers
  SpinPolicy barrier_policy;
  CpuMask foreign_cpus;  // pinned by workers other than 0
  int home_cpu = -1;     // named for worker 0
  OwnerProcess owner;
};

bool Pool::Impl::arrive(Group& group) {
  // The resets are published by the release that follows: the group counter, a gate or `done`.
  if (group.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 != group.threads) return false;
  group.arrived.store(0, std::memory_order_relaxed);
  if (group_count == 1) return true;
  if (arrived_groups.fetch_add(1, std::memory_order_acq_rel) + 1 != group_count) return false;
  arrived_groups.store(0, std::memory_order_relaxed);
  return true;
}

void Pool::Impl::barrier(int node) {
  Group& group = groups[node];
  const uint32_t seen = group.gate.epoch();  // before arriving: afterwards it may already have moved
  if (!arrive(group)) {
    group.gate.wait(seen, barrier_policy);
    return;
  }
  for (int i = 0; i < group_count; ++i) groups[i].gate.advance();
}

void Pool::Impl::node_barrier(int node) {
  Group& group = groups[node];
  const uint32_t seen = group.gate.epoch();
  if (group.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 != group.threads) {
    group.gate.wait(seen, barrier_policy);
    return;
  }
  group.arrived.store(0, std::memory_order_relaxed);
  group.gate.advance();
}

void Pool::Impl::start(Job job, void* context) {
  for (int i = 0; i < group_count; ++i) {
    groups[i].job = job;
    groups[i].context = context;
    groups[i].gate.advance();
  }
}

void Pool::Impl::leave_foreign_cpu() const {
  const int cpu = sched_getcpu();
  if (cpu < 0 || cpu >= kMaxCpus || !foreign_cpus.has(cpu)) return;
  if (home_cpu < 0 || foreign_cpus.has(home_cpu)) return;
  const CpuMask before = CpuMask::of_this_thread();
  if (!before.has(home_cpu)) return;
  CpuMask home;
  home.add(home_cpu);
  // Narrowing the mask migrates at once; widening it again leaves the thread where it is now.
  if (home.apply_to(pthread_self())) before.apply_to(pthread_self());
}

void Pool::Impl::make_way() const {
  const int cpu = sched_getcpu();
  const auto is_ours = [&](int c) { return c == home_cpu || foreign_cpus.has(c); };
  if (cpu < 0 || cpu >= kMaxCpus || !is_ours(cpu)) return;
  const CpuMask before = CpuMask::of_this_thread();
  CpuMask elsewhere = before;
  for (const PoolNode& node : nodes) {
    for (int c : node.cpus) {
      if (c < kMaxCpus && is_ours(c)) elsewhere.remove(c);
    }
  }
  if (elsewhere.count() > 0 && elsewhere.apply_to(pthread_self())) before.apply_to(pthread_self());
}

void* Pool::Impl::thread_main(void* argument) {
  const auto* self = static_cast<const Thread*>(argument);
  Impl& impl = *self->impl;
  const Worker& worker = self->worker;
  Group& group = impl.groups[worker.node];
  if (!impl.oversubscribed) ask_short_slices();
  prefer_memory_of(impl.nodes[worker.node].numa_id);  // refused in most containers, where first touch has to do
#ifndef NDEBUG
  running_pool = worker.pool;
#endif
  uint32_t seen = 0;
  for (;;) {
    group.gate.wait(seen, {impl.idle_spin_ns.load(std::memory_order_relaxed), impl.yield_ns});
    if (group.job == nullptr) return nullptr;
    group.job(group.context, worker);
    seen = group.gate.epoch();
    if (impl.arrive(group)) impl.done.advance();
  }
}

Status Pool::Impl::start_threads(Pool* pool) {
  threads.reserve(total - 1);  // threads hold pointers into it
  int global = 0;
  for (int node = 0; node < group_count; ++node) {
    const std::vector<int>& cpus = nodes[node].cpus;
    for (int index = 0; index < nodes[node].threads; ++index, ++global) {
      const int cpu = index < static_cast<int>(cpus.size()) ? cpus[index] : -1;
      if (global == 0) {
        home_cpu = cpu;
        continue;
      }
      threads.push_back({this, {pool, node, index, nodes[node].threads, global, total}, {}});
      char name[16];
      std::snprintf(name, sizeof(name), "kt-w%d", global);
      bool is_pinned = false;
      const Status status = start_thread({thread_main, &threads.back(), name, cpu}, &threads.back().handle, &is_pinned);
      if (!status.is_ok()) {
        threads.pop_back();
        return status;
      }
      if (is_pinned) {
        foreign_cpus.add(cpu);
        ++pinned;
      }
    }
  }
  return Status::ok();
}

void Pool::Impl::stop_threads() {
  if (!owner.is_this()) return;
  start(nullptr, nullptr);
  for (const Thread& thread : threads) pthread_join(thread.handle, nullptr);
}

void Worker::barrier() const {
  if (total_threads > 1) pool->impl_->barrier(node);
}

void Worker::node_barrier() const {
  if (node_threads > 1) pool->impl_->node_barrier(node);
}

Pool::Pool(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Pool::~Pool() { impl_->stop_threads(); }

void Pool::make_way() const { impl_->make_way(); }

void Pool::set_spin_ns(int64_t ns) {
  if (impl_->idle_spin_ns.load(std::memory_order_relaxed) != 0)
    impl_->idle_spin_ns.store(std::max<int64_t>(1, ns), std::memory_order_relaxed);
}

static Status check(const PoolConfig& config) {
  if (config.nodes.empty()) return Status::invalid("a pool needs at least one node; pass one PoolNode per NUMA node");
  if (config.spin_us < 0) return Status::invalid("spin_us is " + std::to_string(config.spin_us) + "; pass 0 or more");
  int64_t total = 0;
  for (const PoolNode& node : config.nodes) {
    if (node.threads < 1) {
      return Status::invalid("a node has " + std::to_string(node.threads) + " threads; give every node at least 1");
    }
    for (int cpu : node.cpus) {
      if (cpu < 0) return Status::invalid("CPU " + std::to_string(cpu) + " does not exist; CPUs count from 0");
    }
    total += node.threads;
  }
  if (total > kMaxThreads) {
    return Status::invalid(std::to_string(total) + " threads are too many; use at most " + std::to_string(kMaxThreads));
  }
  return Status::ok();
}

Status Pool::create(const PoolConfig& config, std::unique_ptr<Pool>* out) {
  out->reset();
  KT_RETURN_IF_ERROR(check(config));
  auto impl = std::make_unique<Impl>();
  impl->nodes = config.nodes;
  impl->group_count = static_cast<int>(config.nodes.size());
  impl->groups = std::make_unique<Impl::Group[]>(config.nodes.size());
  for (int i = 0; i < impl->group_count; ++i) {
    impl->groups[i].threads = config.nodes[i].threads;
    impl->total += config.nodes[i].threads;
  }
  impl->idle_spin_ns = int64_t{config.spin_us} * 1000;
  impl->barrier_policy.budget_ns = kBarrierSpinNs;
  impl->oversubscribed = impl->total > CpuMask::of_this_thread().count();
  if (impl->oversubscribed) {  // whoever is waited for may need this very core: give it away at the first chance
    impl->yield_ns = 0;
    impl->barrier_policy.yield_ns = 0;
  }
  std::unique_ptr<Pool> pool(new Pool(std::move(impl)));
  KT_RETURN_IF_ERROR(pool->impl_->start_threads(pool.get()));
  *out = std::move(pool);
  return Status::ok();
}

Status Pool::usable() const { return impl_->owner.check("pool"); }

Status Pool::run(Job job, void* context) {
  KT_RETURN_IF_ERROR(usable());
  Impl& impl = *impl_;
#ifndef NDEBUG
  assert(running_pool != this && "run() inside a job of the same pool");
  const Pool* const outer = std::exchange(running_pool, this);
#endif
  {
    const std::lock_guard<std::mutex> lock(impl.run_mutex);
    const int node_threads = impl.groups[0].threads;
    const Worker worker{this, 0, 0, node_threads, 0, impl.total};
    if (impl.total == 1) {
      job(context, worker);
    } else {
      impl.leave_foreign_cpu();
      const uint32_t seen = impl.done.epoch();
      impl.start(job, context);
      job(context, worker);
      if (!impl.arrive(impl.groups[0])) impl.done.wait(seen, impl.barrier_policy);
    }
  }
#ifndef NDEBUG
  running_pool = outer;
#endif
  return Status::ok();
}

int Pool::total_threads() const { return impl_->total; }
int Pool::node_count() const { return impl_->group_count; }
const PoolNode& Pool::node(int i) const { return impl_->nodes[i]; }
int Pool::pinned_threads() const { return impl_->pinned; }

int Pool::parked_threads() const {
  int parked = 0;
  for (int i = 0; i < impl_->group_count; ++i) parked += impl_->groups[i].gate.sleepers();
  return parked;
}

}  // namespace kt
