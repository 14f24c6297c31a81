// One forward pass: what its steps share. gate_up.cc, down.cc and down_regions.cc have the steps, forward.cc their
// order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "moe/forward.h"
#include "moe/gathered_rows.h"
#include "moe/regions.h"

namespace kt {

// Rows per expert from which on a product is bound by arithmetic.
constexpr int kManyRows = 16;

struct ForwardPass {
  Layer& layer;
  Workspace& workspace;
  const ForwardArgs& args;
  const IsaTable& isa;
  const ActKind act;
  const Plan& plan;
  const bool quantised;
  const int hidden;
  const GatheredRows input_rows, hidden_rows;
  const int blocks;         // of down, for a few rows
  const Regions regions{};  // of down, for many; else none
  TaskCounter gate_up_tasks[kMaxNodes], down_tasks[kMaxNodes];

  ForwardPass(Layer& layer, Workspace& workspace, const ForwardArgs& args);
  void work(const Worker& worker);
  void make_hidden_rows(const Worker& worker) const;

  int tokens() const { return args.routing.tokens; }
  // Whether products are bound by arithmetic rather than by reading weights.
  bool many_rows() const { return !steady() && plan.pairs() >= kManyRows * plan.active(); }
  // Whether a token's result must not depend on the others. Formats that keep the codes of files change their kernels
  // with the number of rows.
  bool steady() const { return tokens() <= kSteadyRows && !grouped_kind(layer.config_.format()); }
  // Of one call of gemm.
  int most_rows() const { return steady() ? isa.steady_rows : isa.max_rows; }
  // Of the largest node, because all cut columns alike.
  int most_threads() const;
  bool alone() const { return layer.shards_.size() == 1; }
  const Layer::Shard& shard(const Worker& worker) const { return layer.shards_[worker.node]; }
  Workspace::Node& node(const Worker& worker) const { return workspace.node(worker.node); }

  // Gate and up of two formats need two kinds of rows, and an expert with an order of its columns rows of its own: they
  // are made in each task.
  bool gathers_input() const { return input_rows.any() && layer.paired() && !layer.has_columns(); }
  Acts input_acts() const { return bf16_acts(args.input, hidden); }
  uint16_t* hidden_data(const Worker& worker) const { return reinterpret_cast<uint16_t*>(node(worker).hidden.data()); }
  Acts hidden_acts(const Worker& worker) const {
    return bf16_acts(hidden_data(worker), hidden_pitch(shard(worker).size));
  }

  // Whether products of down start as soon as the rows they read are there, and not behind barriers. Rows are then
  // quantised by the worker who completes those of an expert, which would take long if experts are few. Gathered rows
  // lie where those of the input do, so they have to wait.
  bool follows() const {
    return regions.count > 0 && !hidden_rows.any() && (!quantised || plan.active() >= 2 * most_threads());
  }

  // gate_up.cc
  void gate_up(const Worker& worker);
  int gate_up_blocks(const Worker& worker) const;
  void quantise_expert(const Worker& worker, int slot) const;
  int gate_up_block(const Layer::Shard& s, int threads) const;
  GateUp gate_up_products(const Layer::Shard& s, int expert, int first, int count, const float* bias, GemmArgs g,
                          Workspace::Thread& thread) const;
  void order_columns(const std::vector<int32_t>& columns, Workspace::Thread& thread, GemmArgs* g) const;

  // down.cc: for a few rows
  struct Columns;
  int down_blocks() const;
  Columns columns_of(int block) const;
  void down_by_block(const Worker& worker);
  void add_experts(const Worker& worker, const Columns& columns, float* sum, size_t pitch);
  // Of any product of down.
  GemmArgs down_args(const Worker& worker) const;
  // Output columns of a node for another to add.
  size_t partial_pitch() const { return static_cast<size_t>(round_up(hidden, kPairColumns)); }
  float* partial(int node, int token, int column) const {
    return reinterpret_cast<float*>(workspace.node(node).partial.data()) + token * partial_pitch() + column;
  }
  void store(const float* const* parts, int count, int token, int column, int columns) const;
  void add_nodes(const Worker& worker) const;

  // down_regions.cc: for many
  Regions lay_out_regions() const;
  void down_by_region(const Worker& worker);
  float* products(const Worker& worker, int region, int pair) const;
  const uint8_t* first_weights(const Worker& worker, int task) const;
  void wait_for_rows(const Worker& worker, const Plan::Chunk& chunk) const;
  void multiply_chunk(const Worker& worker, const Regions::Task& task, const uint8_t* next);
  void sum_tokens(const Worker& worker, const Regions::Task& task) const;
};

}  // namespace kt
