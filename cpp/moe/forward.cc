#include "moe/forward.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <initializer_list>
#include <optional>

#include "moe/gathered_rows.h"

namespace kt {
namespace {

// Rows per expert from which on a product is bound by arithmetic.
constexpr int kManyRows = 16;
// Few rows: so many tasks of gate and up for each worker, so that a core that is slower than others, or taken away for
// a while, leaves little to wait for, but none of fewer bytes. Both in one process, on a shared host, 14 threads, 8
// tokens of qwen3-30b: bf16 4965 -> 4811 us, int8 1641 -> 1558, int4 807 -> 741; as two builds in turns it was lost in
// the noise of 4 %. One token of int4 was fastest with tasks of 96 KB (100 us; 32 KB 107).
constexpr int kFewRowsTasksPerWorker = 32;
constexpr size_t kLeastTaskBytes = 96 * 1024;
// What reading its activations costs a task of the down projection, in panels of output.
constexpr int kReadPanels = 2;
// The experts of a long prompt are taken in two halves, with sums of their own that are added at last: tasks of half
// the time, because workers waited for the last one for an eighth (dsv3) to a third (qwen3-30b) of the down projection
// where cores differ in speed. It pays if an output is worth more multiplications than its sums cost: layers in turns,
// 16 threads, dsv3 (16384 for an output) 2 to 6 % faster, qwen3-30b (6144) 0 to 5 % slower. No better: sums of
// quarters, halves of the tokens, columns by the speed that was seen in gate and up.
constexpr int kHalves = 2;
constexpr int64_t kHalvesFrom = 8192;
// Columns of one task of the reduction, about. Blocks may be of 16: two workers would write one line of the output.
constexpr int kReducePiece = kMaxSpan;
// Blocks of columns to try; narrower ones only where even the widest are more.
constexpr int kMostBlocks = 256;

int clamp(int value, int low, int high) { return value < low ? low : value > high ? high : value; }

}  // namespace

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
  const int parts, blocks;  // of down
  TaskCounter gate_up_tasks[kMaxNodes], down_tasks[kMaxNodes];

  ForwardPass(Layer& l, Workspace& w, const ForwardArgs& a)
      : layer(l),
        workspace(w),
        args(a),
        isa(*l.isa_),
        act(l.act()),
        plan(w.plan()),
        quantised(act != ActKind::bf16),
        hidden(l.config_.hidden),
        input_rows(l.kernels(kUp), plan, GatheredRows::Rows::tokens, tokens()),
        hidden_rows(l.kernels(kDown), plan, GatheredRows::Rows::pairs, plan.pairs()),
        parts(down_parts()),
        blocks(down_blocks()) {
    for (int i = 0; i < w.pool().node_count(); ++i) {
      if (!quantised) continue;
      const int span = many_rows() ? isa.many_rows_span : kActGroup;
      w.node(i).input.layout(act, args.routing.tokens, hidden, span);
      w.node(i).hidden_quantised.layout(act, plan.pairs() + kRowUnit, l.shards_[i].size, span);
    }
  }

  int tokens() const { return args.routing.tokens; }
  // Whether products are bound by arithmetic rather than by reading weights.
  bool many_rows() const { return !steady() && plan.pairs() >= kManyRows * plan.active(); }
  // Whether a token's result must not depend on the others. Formats that keep the codes of files change their kernels
  // with the number of rows.
  bool steady() const { return tokens() <= kSteadyRows && !grouped_kind(layer.config_.format()); }
  // Of one call of gemm.
  int most_rows() const { return steady() ? isa.steady_rows : isa.max_rows; }
  const Layer::Shard& shard(const Worker& worker) const { return layer.shards_[worker.node]; }

  // Gate and up of two formats need two kinds of rows, and an expert with an order of its columns rows of its own: they
  // are made in each task.
  bool gathers_input() const { return input_rows.any() && layer.paired() && !layer.has_columns(); }
  Acts input_acts() const { return bf16_acts(args.input, hidden); }
  Acts hidden_acts(const Worker& worker) const {
    return bf16_acts(reinterpret_cast<const uint16_t*>(workspace.node(worker.node).hidden.data()),
                     hidden_pitch(shard(worker).size));
  }

  // Pairs of panels in a task of gate and up.
  int gate_up_block(const Layer::Shard& s, int threads) const {
    const int pairs = panel_count(s.size), most = std::min(pairs, isa.max_panels / 2), all = plan.active() * pairs;
    if (many_rows()) return clamp(all / (threads * kTasksPerWorker), 1, most);
    const size_t pair_bytes = (layer.gated() ? layer.panel_size(kGate, s) : 0) + layer.panel_size(kUp, s);
    const int least = clamp(static_cast<int>(kLeastTaskBytes / pair_bytes), all / (threads * kFewRowsTasksPerWorker),
                            all / (threads * kTasksPerWorker));
    return clamp(least, 1, most);
  }

  // Tasks: (expert by descending rows, block of panel pairs). Each writes its own columns of the intermediate rows.
  void gate_up(const Worker& worker) {
    const Layer::Shard& s = shard(worker);
    Workspace::Node& node = workspace.node(worker.node);
    Workspace::Thread& thread = workspace.thread(worker.global);
    const int pairs = panel_count(s.size);
    const int block = gate_up_block(s, worker.node_threads);
    const int blocks = div_up(pairs, block);
    const Acts acts = quantised ? node.input.acts() : input_acts();
    uint16_t* h = reinterpret_cast<uint16_t*>(node.hidden.data());
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
    }
  }

  // Of one format, gate and up are one product over pairs of panels; of two, two, one behind the other in c.
  // Without gates there is the product of up alone.
  GateUp gate_up_products(const Layer::Shard& s, int expert, int first, int count, const float* bias, GemmArgs g,
                          Workspace::Thread& thread) const {
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
  void order_columns(const std::vector<int32_t>& columns, Workspace::Thread& thread, GemmArgs* g) const {
    if (columns.empty()) return;
    uint16_t* out = reinterpret_cast<uint16_t*>(thread.rows.data());
    for (int i = 0; i < g->m; ++i, out += hidden) {
      const uint16_t* row = args.input + static_cast<size_t>(g->rows[i]) * hidden;
      for (int j = 0; j < hidden; ++j) out[j] = row[columns[j]];
    }
    g->rows = nullptr;
    g->acts.data = thread.rows.data();
  }

  // Columns between the last panel and the padded depth are read by tile kernels, times zero weights.
  static void clear_padding(uint16_t* rows, int m, size_t pitch, int size) {
    const int from = round_up(size, kPanelRows), to = padded_depth(size);
    if (from == to) return;
    for (int i = 0; i < m; ++i) std::memset(rows + i * pitch + from, 0, 2 * static_cast<size_t>(to - from));
  }

  // Tasks: blocks of output columns, of all experts or of half of them. Each writes sums of its own; the one that has
  // the second half waits for the first, which was taken long before, and adds both: the same additions in every run.
  void down(const Worker& worker) {
    Workspace::Node& node = workspace.node(worker.node);
    const bool whole = parts == 1;
    const int middle = whole ? plan.active() : half_of_experts();
    for (int task; (task = down_tasks[worker.node].take()) < blocks * parts;) {
      const Columns columns = columns_of(task % blocks);
      const bool second = task >= blocks;
      // In the node's memory if another one adds something to it: the second half, or other nodes.
      float* shared = partial(worker.node, columns);
      float* own = reinterpret_cast<float*>(workspace.thread(worker.global).sum.data());
      float* sum = second || (whole && alone()) ? own : shared;
      add_experts(worker, columns, second ? middle : 0, second ? plan.active() : middle, sum);
      if (!second && !whole) {
        node.halves[task].leave();
      } else if (second) {
        node.halves[task - blocks].wait();
        add_halves(columns, shared, sum);
      } else if (alone()) {
        for (int t = 0; t < tokens(); ++t) store(columns, {columns.row(sum, t)}, t);
      }
    }
  }

  // Output columns of a task.
  struct Columns {
    int first_panel, panels;
    int first() const { return first_panel * kPanelRows; }
    int count() const { return panels * kPanelRows; }
    float* row(float* sums, int token) const { return sums + static_cast<size_t>(token) * count(); }
  };
  Columns columns_of(int block) const {
    const int64_t panels = panel_count(hidden);
    const int first = static_cast<int>(panels * block / blocks), end = static_cast<int>(panels * (block + 1) / blocks);
    return {first, end - first};
  }
  // Sums of a node, block by block, each row by row.
  float* partial(int node, const Columns& columns) const {
    return reinterpret_cast<float*>(workspace.node(node).partial.data()) +
           static_cast<size_t>(tokens()) * columns.first();
  }
  bool alone() const { return layer.shards_.size() == 1; }

  // Not by the number of threads: sums of halves are rounded otherwise than one sum.
  int down_parts() const {
    const int64_t multiplications = static_cast<int64_t>(plan.pairs()) * layer.config_.intermediate;
    const bool heavy = multiplications >= kHalvesFrom * tokens() && panel_count(hidden) <= Workspace::kMaxBlocks;
    return many_rows() && heavy && plan.active() > 1 ? kHalves : 1;
  }
  // Few rows: many small tasks, since only the weights' bytes count. Many rows: each task reads all activations, which
  // costs as much as kReadPanels panels more, so wide ones; but the last round should keep every worker busy, and half
  // a task is lost behind it.
  int down_blocks() const {
    const int panels = panel_count(hidden), widest = down_panels_max(isa);
    int threads = 1;  // of the largest node, because all have the same blocks
    for (int i = 0; i < workspace.pool().node_count(); ++i)
      threads = std::max(threads, workspace.pool().node(i).threads);
    if (!many_rows()) return div_up(panels, clamp(panels / (threads * kTasksPerWorker), 1, widest));
    int best = 1, least = INT_MAX;
    const int fewest = div_up(panels, widest);
    for (int n = fewest; n <= std::max(fewest, std::min(panels, kMostBlocks)); ++n) {
      const int half_rounds = 2 * div_up(n * parts, threads) + 1;
      const int time = half_rounds * (div_up(panels, n) + kReadPanels);
      if (time < least) {
        least = time;
        best = n;
      }
    }
    return best;
  }
  // The first active expert behind half of the pairs.
  int half_of_experts() const {
    int slot = 1;
    while (slot + 1 < plan.active() && plan.begin(slot + 1) <= plan.pairs() / 2) ++slot;
    return slot;
  }

  // The weighted sums of the experts [from, to) for all tokens.
  void add_experts(const Worker& worker, const Columns& columns, int from, int to, float* sum) {
    const Layer::Shard& s = shard(worker);
    Workspace::Node& node = workspace.node(worker.node);
    Workspace::Thread& thread = workspace.thread(worker.global);
    std::memset(sum, 0, static_cast<size_t>(tokens()) * columns.count() * 4);
    GemmArgs g{};
    g.n_panels = columns.panels;
    g.k = s.size;
    g.group = layer.panel_groups_[kDown];
    g.format = layer.config_.formats[kDown];
    g.acts = quantised ? node.hidden_quantised.acts() : hidden_acts(worker);
    g.c = reinterpret_cast<float*>(thread.c.data());
    g.lay_out_rows();
    g.scratch = thread.scratch.data();
    for (int slot = from; slot < to; ++slot) {
      g.panels = layer.panel(s, plan.expert(slot), kDown, columns.first_panel);
      g.next = slot + 1 < to ? layer.panel(s, plan.expert(slot + 1), kDown, columns.first_panel) : nullptr;
      const float* bias = s.down_bias(plan.expert(slot));
      for (int row = plan.begin(slot); row < plan.end(slot); row += g.m) {
        g.first_row = row;
        g.m = std::min(plan.end(slot) - row, most_rows());
        hidden_rows.use(node, slot, &g);
        layer.kernels(kDown).gemm(g);
        for (int i = 0; i < g.m; ++i) {
          float* at = columns.row(sum, plan.tokens()[row + i]);
          const float weight = plan.weights()[row + i];
          isa.accumulate(at, g.c_at(i, 0), weight, columns.count());
          if (bias) isa.accumulate(at, bias + columns.first(), weight, columns.count());
        }
      }
    }
  }

  void add_halves(const Columns& columns, float* first, float* second) const {
    for (int t = 0; t < tokens(); ++t) {
      if (alone()) {
        store(columns, {columns.row(first, t), columns.row(second, t)}, t);
      } else {
        isa.accumulate(columns.row(first, t), columns.row(second, t), 1.0f, columns.count());
      }
    }
  }

  void store(const Columns& columns, std::initializer_list<const float*> parts_of_row, size_t token) const {
    store(columns, parts_of_row.begin(), static_cast<int>(parts_of_row.size()), token);
  }
  void store(const Columns& columns, const float* const* parts_of_row, int n, size_t token) const {
    const size_t at = token * hidden + columns.first();
    isa.store(parts_of_row, n, std::min(columns.count(), hidden - columns.first()),
              args.addend ? args.addend + at : nullptr, args.output + at);
  }

  // Sums the nodes' partial outputs.
  void reduce(const Worker& worker) const {
    const int nodes = static_cast<int>(layer.shards_.size()), pieces = div_up(hidden, kReducePiece);
    for (int i = worker.global; i < tokens() * pieces; i += worker.total_threads) {
      const int64_t piece = i % pieces;
      for (int block = static_cast<int>(blocks * piece / pieces); block < blocks * (piece + 1) / pieces; ++block) {
        const Columns columns = columns_of(block);
        const float* parts_of_row[kMaxNodes];
        for (int n = 0; n < nodes; ++n) parts_of_row[n] = columns.row(partial(n, columns), i / pieces);
        store(columns, parts_of_row, nodes, i / pieces);
      }
    }
  }

  void work(const Worker& worker) {
    Workspace::Node& node = workspace.node(worker.node);
    if (quantised) {
      quantise_rows(isa, act, worker, args.input, hidden, tokens(), hidden, node.input);
      worker.node_barrier();
    } else if (gathers_input()) {
      input_rows.gather(worker, input_acts(), hidden, node);
      worker.node_barrier();
    }
    gate_up(worker);
    worker.node_barrier();
    if (quantised) {
      quantise_rows(isa, act, worker, reinterpret_cast<const uint16_t*>(node.hidden.data()),
                    hidden_pitch(shard(worker).size), plan.pairs(), shard(worker).size, node.hidden_quantised);
      worker.node_barrier();
    } else if (hidden_rows.any()) {
      hidden_rows.gather(worker, hidden_acts(worker), shard(worker).size, node);
      worker.node_barrier();
    }
    down(worker);
    if (layer.shards_.size() > 1) {
      worker.barrier();
      reduce(worker);
    }
  }
};

Status run_forward(Layer& layer, Workspace& workspace, const ForwardArgs& args) {
  workspace.plan().build(args.routing);
  ForwardPass pass(layer, workspace, args);
  return workspace.pool().run(
      [](void* context, const Worker& worker) { static_cast<ForwardPass*>(context)->work(worker); }, &pass);
}

struct PlannedForward::Impl {
  ForwardArgs args;
  std::optional<ForwardPass> pass;
};

PlannedForward::PlannedForward() : impl_(std::make_unique<Impl>()) {}
PlannedForward::~PlannedForward() = default;

void PlannedForward::plan(Layer& layer, Workspace& workspace, const ForwardArgs& args) {
  impl_->args = args;
  workspace.plan().leave_out(layer.config().num_experts, layer.mask(), args.skip);
  workspace.plan().build(args.routing);
  impl_->pass.emplace(layer, workspace, impl_->args);
}

void PlannedForward::work(const Worker& worker) { impl_->pass->work(worker); }

}  // namespace kt
