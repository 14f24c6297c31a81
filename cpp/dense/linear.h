// One matrix, packed on every node, times rows of activations.
//
//   out[t] = row_scale[t] * (W x[t] + bias) + addend[t],   W [rows, columns]
//
// With groups, blocks of rows of W read inputs of their own: one matrix holds those of all heads of an attention.
//
// The rows of W are cut over the nodes, so a node's outputs are columns of their own and nothing has to be summed. Of
// up to kSteadyRows rows in a call, each gets the bits that it would get alone, on every instruction set.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "formats/format.h"
#include "kernels/kernel.h"
#include "moe/workspace.h"
#include "threads/numa_buffer.h"
#include "threads/pool.h"
#include "threads/tasks.h"

namespace kt {

struct LinearConfig {
  Format format = Format::bf16;  // one that is made from bf16
  int rows = 0;
  int columns = 0;
  bool bias = false;
};

// Pitches are elements from row to row.
struct LinearArgs {
  int count = 0;
  const uint16_t* input = nullptr;  // bf16 [count][columns]
  size_t input_pitch = 0;
  uint16_t* bf16 = nullptr;  // [count][rows]: one of the two outputs
  float* f32 = nullptr;
  size_t output_pitch = 0;
  const uint16_t* addend = nullptr;  // bf16, or null; may be the output
  size_t addend_pitch = 0;
  const float* row_scales = nullptr;  // [count]; null: 1
  // Rows of W are so many equal groups, each a multiple of 16: group g reads the input and writes the output g steps
  // behind the first. Only of formats that read bf16 rows, without bias and addend.
  int groups = 1;
  size_t input_step = 0, output_step = 0;
};

class Linear {
 public:
  // Rows of one pass; more take several.
  static constexpr int kChunkRows = 1024;

  Linear(const Linear&) = delete;
  Linear& operator=(const Linear&) = delete;

  static Status create(std::shared_ptr<Workspace> workspace, const IsaTable* isa, const LinearConfig& config,
                       std::unique_ptr<Linear>* out);

  // Packs bf16 [rows, columns] with all workers. Blocking; waits for a forward that runs. This and forward are errors
  // in a child forked after the pool was made.
  Status load(const uint16_t* weights);
  // f32 [rows], of a matrix that was made for one: it is needed, as the weights are.
  Status load_bias(const float* bias);
  // Weights as the kernels see them, f32 [rows, columns].
  void decode(float* out) const;

  // Allocates nothing. One forward at a time runs per workspace; others wait.
  Status forward(const LinearArgs& args);

  // The two steps of a forward, inside a job of the pool: called by every worker, with a barrier of the node between
  // them, of at most kChunkRows rows, by somebody who holds the workspace's mutex. Matrices of the same columns and
  // kind of activations that read the same input may share one quantise.
  void quantise(const Worker& worker, const LinearArgs& args) const;
  void multiply(const Worker& worker, const LinearArgs& args, TaskCounter& tasks) const;
  // Instead of quantise: the columns [from, to) of one row for a node, of a matrix whose kernels read quantised rows.
  // `from` is a multiple of kMaxSpan, and so is `to` unless it is the end.
  void quantise_piece(int node, const LinearArgs& args, int row, int from, int to) const;
  // What forward would return for a matrix that lacks its weights.
  Status ready() const;

  const LinearConfig& config() const { return config_; }
  ActKind act() const { return kernels().act; }
  size_t packed_bytes() const;
  const std::shared_ptr<Workspace>& workspace() const { return workspace_; }
  const IsaTable& isa() const { return *isa_; }

 private:
  // The panels [begin, begin + panels) that one node holds.
  struct Shard {
    int begin = 0;
    int panels = 0;
    NumaBuffer weights;
  };

  Linear(std::shared_ptr<Workspace> workspace, const IsaTable* isa, const LinearConfig& config);
  Status split();
  WorkspaceNeeds needs() const;
  const FormatKernels& kernels() const { return isa_->formats[static_cast<int>(config_.format)]; }
  int span(int count) const { return count > kSteadyRows ? isa_->many_rows_span : kActGroup; }
  ActRows quantised(int node, int count) const;
  Status check_groups(const LinearArgs& args) const;
  uint8_t* panel(const Shard& shard, int index) const { return shard.weights.data() + index * panel_size_; }
  void multiply_panels(const Worker& worker, const LinearArgs& args, const Shard& shard, int first, int count) const;
  Status check(const LinearArgs& args) const;

  std::shared_ptr<Workspace> workspace_;
  const IsaTable* isa_;
  LinearConfig config_;
  size_t panel_size_;
  std::vector<Shard> shards_;
  std::vector<float> bias_;  // padded to whole panels with 0; empty without
  std::atomic<bool> has_weights_{false}, has_bias_{false};
};

}  // namespace kt
