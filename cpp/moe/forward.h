// The forward pass of one chunk of tokens (see ARCHITECTURE.md, "Forward").
#pragma once

#include <memory>

#include "kernels/kernel.h"
#include "moe/layer.h"
#include "moe/workspace.h"
#include "threads/tasks.h"

namespace kt {

// Tokens of one pass. More would read each expert fewer times, but the workspace grows with them: intermediate rows,
// and sums of a worker.
constexpr int kChunkTokens = 4096;

// Elements from row to row of the bf16 intermediate; 32 elements of padding spread the rows over the cache sets.
constexpr size_t hidden_pitch(int shard_size) { return static_cast<size_t>(padded_depth(shard_size)) + 32; }

// Output panels of one task of the down projection with a few rows an expert, at most: the sums of 2048 tokens are
// then 1 to 1.5 MB.
constexpr int down_panels_max(const IsaTable& isa) { return 3 * isa.max_panels / 8; }

// Of the experts that the workspace's plan does not leave out.
Status run_forward(Layer& layer, Workspace& workspace, const ForwardArgs& args);

// A forward inside a job of the pool, of at most kChunkTokens tokens and of a layer with all its weights, by somebody
// who holds the workspace's mutex: one worker plans; then, after a barrier of all workers, all of them work. Results
// are there after another barrier.
class PlannedForward {
 public:
  PlannedForward();
  ~PlannedForward();
  void plan(Layer& layer, Workspace& workspace, const ForwardArgs& args);
  void work(const Worker& worker);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kt
