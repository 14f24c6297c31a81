#include <algorithm>

#include "moe/forward_pass.h"

namespace kt {
namespace {

// Tokens of one task of sums.
constexpr int kSumTokens = 512;
// Products of a token are fetched so many tokens before they are added.
constexpr int kTokensAhead = 4;

}  // namespace

Regions ForwardPass::lay_out_regions() const {
  workspace.plan().cut(most_rows());
  const int pairs = div_up(panel_count(hidden), 2), chunks = static_cast<int>(plan.chunks().size());
  const auto enough = static_cast<int>(static_cast<int64_t>(chunks) * pairs / (most_threads() * kTasksPerWorker));
  Regions r;
  r.pairs = std::clamp(enough, least_region_pairs(hidden), region_pairs(isa, hidden, plan.product_rows()));
  r.count = div_up(pairs, r.pairs);
  r.products = chunks;
  r.sums = r.pairs * div_up(tokens(), kSumTokens);
  for (int i = 0; i < workspace.pool().node_count(); ++i) {
    for (int j = 0; j < r.count; ++j) workspace.node(i).regions[j].reset();
    for (int j = 0; j < plan.active(); ++j) workspace.node(i).intermediate[j].reset();
  }
  return r;
}

// Rows of all pairs for one pair of panels of a region.
float* ForwardPass::products(const Worker& worker, int region, int pair) const {
  return reinterpret_cast<float*>(node(worker).products.data()) +
         (region % Regions::kKept * regions.pairs + pair) * pair_floats(plan.product_rows());
}

// A worker takes its next task before it does one, so that the last product of a task can fetch the first weights of
// the next: 2 cores, 512 tokens of qwen3-30b, int8 1 %, Q4_K 4 %; 16 threads of a busy host, AVX-512, int8 11 %.
void ForwardPass::down_by_region(const Worker& worker) {
  TaskCounter& tasks = down_tasks[worker.node];
  int next;
  for (int i = tasks.take(); i < regions.tasks(); i = next) {
    next = tasks.take();
    const Regions::Task task = regions.task(i);
    RegionProgress* progress = &node(worker).regions[task.region];
    if (task.product) {
      if (task.region >= Regions::kKept) progress[-Regions::kKept].sums.wait(regions.sums);
      if (follows()) wait_for_rows(worker, plan.chunks()[task.index]);
      multiply_chunk(worker, task, first_weights(worker, next));
      progress->products.add();
    } else {
      progress->products.wait(regions.products);
      sum_tokens(worker, task);
      progress->sums.add();
    }
  }
}

const uint8_t* ForwardPass::first_weights(const Worker& worker, int i) const {
  if (i >= regions.tasks()) return nullptr;
  const Regions::Task task = regions.task(i);
  if (!task.product) return nullptr;
  const int expert = plan.expert(plan.chunks()[task.index].slot);
  return layer.panel(shard(worker), expert, kDown, 2 * task.region * regions.pairs);
}

// All tasks of gate and up have been taken when a worker comes here. Kernels read whole units of rows, so those of
// experts behind this one too.
void ForwardPass::wait_for_rows(const Worker& worker, const Plan::Chunk& chunk) const {
  // Of an expert: its tasks, and one for what was done to its rows behind the last of them.
  const int end = chunk.first + round_up(chunk.count, kRowUnit), tasks = gate_up_blocks(worker) + 1;
  for (int slot = chunk.slot; slot < plan.active() && plan.begin(slot) < end; ++slot) {
    node(worker).intermediate[slot].wait(tasks);
  }
}

// Columns of a region for one chunk of rows. next: the weights after those.
void ForwardPass::multiply_chunk(const Worker& worker, const Regions::Task& task, const uint8_t* next) {
  const Layer::Shard& s = shard(worker);
  const Plan::Chunk& chunk = plan.chunks()[task.index];
  const int expert = plan.expert(chunk.slot), begin = 2 * task.region * regions.pairs;
  const int end = std::min(begin + 2 * regions.pairs, panel_count(hidden));
  const float* bias = s.down_bias(expert);
  GemmArgs g = down_args(worker);
  g.first_row = chunk.first;
  g.m = chunk.count;
  hidden_rows.use(node(worker), chunk.slot, &g);
  g.c_pitch = kPairColumns;
  g.c_step = pair_floats(plan.product_rows());
  for (int panel = begin; panel < end; panel += g.n_panels) {
    g.n_panels = std::min(end - panel, isa.max_panels);
    g.panels = layer.panel(s, expert, kDown, panel);
    g.next = panel + g.n_panels < end ? layer.panel(s, expert, kDown, panel + g.n_panels) : next;
    g.c = products(worker, task.region, (panel - begin) / 2) + static_cast<size_t>(chunk.row) * kPairColumns;
    layer.kernels(kDown).gemm(g);
    for (int p = 0; bias && p < g.n_panels; ++p) {
      const float* of_panel = bias + static_cast<size_t>(panel + p) * kPanelRows;
      for (int i = 0; i < g.m; ++i) isa.accumulate(g.c_at(i, p), of_panel, 1, kPanelRows);
    }
  }
}

// Of a pair of panels, for some tokens.
void ForwardPass::sum_tokens(const Worker& worker, const Regions::Task& task) const {
  const int pieces = div_up(tokens(), kSumTokens), pair = task.index / pieces;
  const int column = (task.region * regions.pairs + pair) * kPairColumns;
  if (column >= hidden) return;
  const int begin = task.index % pieces * kSumTokens, end = std::min(begin + kSumTokens, tokens());
  CombineArgs a{};
  a.c = products(worker, task.region, pair);
  a.columns = std::min(kPairColumns, hidden - column);
  for (int t = begin; t < end; ++t) {
    if (t + kTokensAhead < end) {
      const Plan::TokenPairs ahead = plan.of_token(t + kTokensAhead);
      for (int i = 0; i < ahead.count; ++i) {
        const float* row = a.c + static_cast<size_t>(ahead.rows[i]) * kPairColumns;
        __builtin_prefetch(row);
        __builtin_prefetch(row + kPanelRows);
      }
    }
    const Plan::TokenPairs of = plan.of_token(t);
    a.rows = of.rows;
    a.weights = of.weights;
    a.n = of.count;
    if (alone()) {
      const size_t at = static_cast<size_t>(t) * hidden + column;
      a.addend = args.addend ? args.addend + at : nullptr;
      a.bf16 = args.output + at;
    } else {
      a.f32 = partial(worker.node, t, column);
    }
    isa.combine(a);
  }
}

}  // namespace kt
