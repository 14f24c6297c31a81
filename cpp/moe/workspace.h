// Scratch memory of a forward pass, shared by all layers of a pool: layers run one at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "moe/act_rows.h"
#include "moe/plan.h"
#include "moe/regions.h"
#include "threads/numa_buffer.h"
#include "threads/pool.h"
#include "threads/progress.h"

namespace kt {

// What a layer needs, per node and per worker.
struct WorkspaceNeeds {
  int num_experts = 0;
  int max_pairs = 0;
  size_t input_bytes = 0;   // quantised input of a node
  size_t hidden_bytes = 0;  // bf16 intermediate rows of a node
  size_t hidden_quantised_bytes = 0;
  size_t gathered_few_bytes = 0;  // rows of a node as kernels for a few rows take them
  size_t gathered_many_bytes = 0;
  size_t partial_bytes = 0;   // f32 output of a node, where there are several
  size_t products_bytes = 0;  // f32 rows of pairs of a node, for long prompts
  size_t scratch_bytes = 0;   // kernels' scratch of a worker
  size_t c_bytes = 0;         // product of a worker
  size_t sum_bytes = 0;       // output columns of a worker, for short prompts
  size_t rows_bytes = 0;      // input of a worker in the order of an expert's columns
};

// Tasks of a region that are done.
struct RegionProgress {
  Progress products, sums;
  void reset() {
    products.reset();
    sums.reset();
  }
};

class Workspace {
 public:
  explicit Workspace(Pool* pool) : pool_(pool) {}

  // Grows to the largest needs so far. Called when a layer is made or loaded, never in forward.
  Status ensure(const WorkspaceNeeds& needs);

  struct Node {
    ActBuffer input, hidden_quantised;
    NumaBuffer hidden, partial, products, gathered_few, gathered_many;
    std::unique_ptr<RegionProgress[]> regions = std::make_unique<RegionProgress[]>(Regions::kMost);
    std::vector<Progress> intermediate;  // of each active expert: tasks of gate and up that are done
  };
  struct Thread {
    NumaBuffer scratch, c, sum, rows;
  };

  Pool& pool() { return *pool_; }
  std::mutex& mutex() { return mutex_; }
  Plan& plan() { return plan_; }
  Node& node(int i) { return nodes_[i]; }
  Thread& thread(int global) { return threads_[global]; }

 private:
  Pool* pool_;
  std::mutex mutex_;
  Plan plan_;
  std::vector<Node> nodes_;
  std::vector<Thread> threads_;
};

}  // namespace kt
