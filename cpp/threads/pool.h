// Worker threads, one group per NUMA node, pinned, that run one job at a time on all workers at once.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"

namespace kt {

class Pool;

// What a job sees: who it is, and barriers. Worker `index` of node `node`; `global` counts over all nodes.
struct Worker {
  Pool* pool;
  int node;   // position in PoolConfig::nodes, not the operating system's node id
  int index;  // within the node, 0 .. node_threads-1
  int node_threads;
  int global;  // 0 .. total_threads-1; worker 0 is the thread that called run()
  int total_threads;

  void barrier() const;       // every worker of the pool
  void node_barrier() const;  // the workers of this node
};

struct PoolNode {
  int numa_id = -1;  // where this node's memory goes; -1 = wherever
  int threads = 1;
  std::vector<int> cpus;  // logical CPU per thread; empty or shorter than threads = the rest float
};

struct PoolConfig {
  std::vector<PoolNode> nodes;
  // How long an idle worker spins before it parks on a futex; 0 = park at once. The default covers the time a GPU
  // spends between two MoE layers (200..500 us), set_spin_ns() that between two steps. Spinners yield every few
  // microseconds, so other threads get the core.
  int spin_us = 500;
};

class Pool {
 public:
  using Job = void (*)(void* context, const Worker& worker);

  static Status create(const PoolConfig& config, std::unique_ptr<Pool>* out);
  ~Pool();

  // Runs job on every worker, the caller being worker 0, and returns when all are done. Calls from several threads
  // are serialised. Allocates nothing. The job must not throw, and every worker of a barrier's scope must reach it.
  // run() inside a job of the same pool is a programming error: an assertion in debug builds, else a deadlock.
  //
  // The caller's affinity stays as it is. When it happens to stand on the CPU of another worker it is moved once to the
  // CPU named for worker 0, because two workers on one core would take turns at every barrier.
  //
  // An error, and the job not run, in a child forked after the pool was made: the workers are not there.
  Status run(Job job, void* context);
  // The error run() would return, for whoever takes locks of his own before.
  Status usable() const;

  // Idle workers spin for so long from now on, if the pool was made to spin at all: for whoever knows when the next job
  // comes. From any thread.
  void set_spin_ns(int64_t ns);

  // For a thread that is about to wait without sleeping, as the one that drives a GPU does: off the CPUs of the
  // workers, if it stands on one and may run elsewhere. Its affinity stays as it is.
  void make_way() const;

  int total_threads() const;
  int node_count() const;
  const PoolNode& node(int i) const;
  // Workers whose pinning the system accepted. Worker 0 is never counted: it is the caller's thread.
  int pinned_threads() const;
  // Workers asleep in the kernel right now, for tests and for `doctor`.
  int parked_threads() const;

 private:
  friend struct Worker;
  struct Impl;
  explicit Pool(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kt
