#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "moe/forward_pass.h"

namespace kt {
namespace {

// Few rows: so many tasks of gate and up for each worker, so that a core that is slower than others, or taken away for
// a while, leaves little to wait for, but none of fewer bytes. Both in one process, on a shared host, 14 threads, 8
// tokens of qwen3-30b: bf16 4965 -> 4811 us, int8 1641 -> 1558, int4 807 -> 741; as two builds in turns it was lost in
// the noise of 4 %. One token of int4 was fastest with tasks of 96 KB (100 us; 32 KB 107).
constexpr int kFewRowsTasksPerWorker = 32;
constexpr size_t kLeastTaskBytes = 96 * 1024;

// Columns between the last panel and the padded depth are read by tile kernels, times zero weights.
void clear_padding(uint16_t* rows, int m, size_t pitch, int size) {
  const int from = round_up(size, kPanelRows), to = padded_depth(size);
  if (from == to) return;
  for (int i = 0; i < m; ++i) std::memset(rows + i * pitch + from, 0, 2 * static_cast<size_t>(to - from));
}

}  // namespace

// Pairs of panels in a task of gate and up.
int ForwardPass::gate_up_block(const Layer::Shard& s, int threads) const {
  const int pairs = panel_count(s.size), most = std::min(pairs, isa.max_panels / 2), all = plan.active() * pairs;
  if (many_rows()) return std::clamp(all / (threads * kTasksPerWorker), 1, most);
  const size_t pair_bytes = (layer.gated() ? layer.panel_size(kGate, s) : 0) + layer.panel_size(kUp, s);
  const int least = std::clamp(static_cast<int>(kLeastTaskBytes / pair_bytes), all / (threads * kFewRowsTasksPerWorker),
                               all / (threads * kTasksPerWorker));
  return std::clamp(least, 1, most);
}

int ForwardPass::gate_up_blocks(const Worker& worker) const {
  return div_up(panel_count(shard(worker).size), gate_up_block(shard(worker), worker.node_threads));
}

// Tasks: (expert by descending rows, block of panel pairs). Each writes its own columns of the intermediate rows.
void ForwardPass::gate_up(const Worker& worker) {
  const Layer::Shard& s = shard(worker);
  Workspace::Node& node = this->node(worker);
  Workspace::Thread& thread = workspace.thread(worker.global);
  const int pairs = panel_count(s.size);
  const int block = gate_up_block(s, worker.node_threads);
  const int blocks = gate_up_blocks(worker);
  const Acts acts = quantised ? node.input.acts() : input_acts();
  uint16_t* h = hidden_data(worker);
  const size_t pitch = hidden_pitch(s.size);
  for (int task; (task = gate_up_tasks[worker.node].take()) < plan.active() * blocks;) {
    const int slot = plan.by_size(task / blocks);
    const int first = task % blocks * block, count = std::min(block, pairs - first);
    GemmArgs g{};
    g.k = hidden;
    g.acts = acts;
    g.scratch = thread.scratch.data();
    const float* biases = s.gate_up_bias(plan.expert(slot));
    const float* bias = biases ? biases + static_cast<size_t>(2) * first * kPanelRows : nullptr;
    for (int row = plan.begin(slot); row < plan.end(slot); row += g.m) {
      g.rows = plan.tokens() + row;
      g.m = std::min(plan.end(slot) - row, most_rows());
      if (gathers_input()) input_rows.use(node, slot, &g);
      order_columns(layer.columns_[plan.expert(slot)], thread, &g);
      const GateUp c = gate_up_products(s, plan.expert(slot), first, count, bias, g, thread);
      isa.swiglu(c, g.m, count, layer.config_.activation, h + row * pitch + static_cast<size_t>(first) * kPanelRows,
                 pitch);
      if (first + count == pairs) clear_padding(h + row * pitch, g.m, pitch, s.size);
    }
    if (follows() && node.intermediate[slot].add() == blocks) {
      if (quantised) quantise_expert(worker, slot);
      node.intermediate[slot].add();
    }
  }
}

// Intermediate rows, which are complete.
void ForwardPass::quantise_expert(const Worker& worker, int slot) const {
  const int size = shard(worker).size;
  quantise_range(isa, act, hidden_data(worker), hidden_pitch(size), plan.begin(slot), plan.end(slot), size,
                 node(worker).hidden_quantised);
}

// Of one format, gate and up are one product over pairs of panels; of two, two, one behind the other in c.
// Without gates there is the product of up alone.
GateUp ForwardPass::gate_up_products(const Layer::Shard& s, int expert, int first, int count, const float* bias,
                                     GemmArgs g, Workspace::Thread& thread) const {
  float* c = reinterpret_cast<float*>(thread.c.data());
  const bool paired = layer.paired(), gated = layer.gated();
  g.n_panels = paired && gated ? 2 * count : count;
  g.lay_out_rows();
  if (paired && gated && g.m >= kManyRows) g.lay_out_pairs();
  const size_t room = static_cast<size_t>(round_up(g.m, kRowUnit)) * g.c_pitch;
  for (const Matrix matrix : {kGate, kUp}) {
    if (matrix == kGate && !gated) continue;
    g.panels = layer.panel(s, expert, matrix, first);
    g.group = layer.panel_groups_[matrix];
    g.format = layer.config_.formats[matrix];
    g.c = c + (matrix == kUp && gated ? room : 0);
    layer.kernels(matrix).gemm(g);
    if (!gated) return {nullptr, c, g.c_pitch, kPanelRows, nullptr};
    if (paired) return {c, c + kPanelRows, g.c_pitch, g.c_step, bias};
  }
  return {c, c + room, g.c_pitch, kPanelRows, bias};
}

// The rows of a call in the order of an expert's columns, if it has one.
void ForwardPass::order_columns(const std::vector<int32_t>& columns, Workspace::Thread& thread, GemmArgs* g) const {
  if (columns.empty()) return;
  uint16_t* out = reinterpret_cast<uint16_t*>(thread.rows.data());
  for (int i = 0; i < g->m; ++i, out += hidden) {
    const uint16_t* row = args.input + static_cast<size_t>(g->rows[i]) * hidden;
    for (int j = 0; j < hidden; ++j) out[j] = row[columns[j]];
  }
  g->rows = nullptr;
  g->acts.data = thread.rows.data();
}

}  // namespace kt
