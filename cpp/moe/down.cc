#include <algorithm>
#include <cstring>

#include "moe/forward_pass.h"

namespace kt {
namespace {

// Columns of one task that adds nodes up, about. Blocks may be of 16: two workers would write one line of the output.
constexpr int kAddPiece = kMaxSpan;

}  // namespace

// Output columns of a task.
struct ForwardPass::Columns {
  int first_panel, panels;
  int first() const { return first_panel * kPanelRows; }
  int count() const { return panels * kPanelRows; }
};

ForwardPass::Columns ForwardPass::columns_of(int block) const {
  const int64_t panels = panel_count(hidden);
  const int first = static_cast<int>(panels * block / blocks), end = static_cast<int>(panels * (block + 1) / blocks);
  return {first, end - first};
}

// Many small tasks, since only the weights' bytes count.
int ForwardPass::down_blocks() const {
  const int panels = panel_count(hidden);
  return div_up(panels, std::clamp(panels / (most_threads() * kTasksPerWorker), 1, down_panels_max(isa)));
}

// Tasks: blocks of output columns. Each goes over all experts and has sums of its own: no locks, and the same additions
// in every run.
void ForwardPass::down_by_block(const Worker& worker) {
  for (int task; (task = down_tasks[worker.node].take()) < blocks;) {
    const Columns columns = columns_of(task);
    if (!alone()) {
      add_experts(worker, columns, partial(worker.node, 0, columns.first()), partial_pitch());
      continue;
    }
    float* sum = reinterpret_cast<float*>(workspace.thread(worker.global).sum.data());
    add_experts(worker, columns, sum, columns.count());
    for (int t = 0; t < tokens(); ++t, sum += columns.count()) store(&sum, 1, t, columns.first(), columns.count());
  }
}

GemmArgs ForwardPass::down_args(const Worker& worker) const {
  GemmArgs g{};
  g.k = shard(worker).size;
  g.group = layer.panel_groups_[kDown];
  g.format = layer.config_.formats[kDown];
  g.acts = quantised ? node(worker).hidden_quantised.acts() : hidden_acts(worker);
  g.scratch = workspace.thread(worker.global).scratch.data();
  return g;
}

void ForwardPass::add_experts(const Worker& worker, const Columns& columns, float* sum, size_t pitch) {
  const Layer::Shard& s = shard(worker);
  for (int t = 0; t < tokens(); ++t) std::memset(sum + t * pitch, 0, columns.count() * sizeof(float));
  GemmArgs g = down_args(worker);
  g.n_panels = columns.panels;
  g.c = reinterpret_cast<float*>(workspace.thread(worker.global).c.data());
  g.lay_out_rows();
  for (int slot = 0; slot < plan.active(); ++slot) {
    const bool last = slot + 1 == plan.active();
    g.panels = layer.panel(s, plan.expert(slot), kDown, columns.first_panel);
    g.next = last ? nullptr : layer.panel(s, plan.expert(slot + 1), kDown, columns.first_panel);
    const float* bias = s.down_bias(plan.expert(slot));
    for (int row = plan.begin(slot); row < plan.end(slot); row += g.m) {
      g.first_row = row;
      g.m = std::min(plan.end(slot) - row, most_rows());
      hidden_rows.use(node(worker), slot, &g);
      layer.kernels(kDown).gemm(g);
      for (int i = 0; i < g.m; ++i) {
        float* at = sum + plan.tokens()[row + i] * pitch;
        const float weight = plan.weights()[row + i];
        isa.accumulate(at, g.c_at(i, 0), weight, columns.count());
        if (bias) isa.accumulate(at, bias + columns.first(), weight, columns.count());
      }
    }
  }
}

// The sum of parts, to the output.
void ForwardPass::store(const float* const* parts, int count, int token, int column, int columns) const {
  const size_t at = static_cast<size_t>(token) * hidden + column;
  isa.store(parts, count, std::min(columns, hidden - column), args.addend ? args.addend + at : nullptr,
            args.output + at);
}

void ForwardPass::add_nodes(const Worker& worker) const {
  const int nodes = static_cast<int>(layer.shards_.size()), pieces = div_up(hidden, kAddPiece);
  for (int i = worker.global; i < tokens() * pieces; i += worker.total_threads) {
    const int token = i / pieces, column = i % pieces * kAddPiece;
    const float* parts[kMaxNodes];
    for (int n = 0; n < nodes; ++n) parts[n] = partial(n, token, column);
    store(parts, nodes, token, column, kAddPiece);
  }
}

}  // namespace kt
