#include "dense/linear.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <string>
#include <utility>

namespace kt {
namespace {

// A list of rows lets tile kernels copy them: without one they read up to whole blocks of rows.
constexpr auto kRowNumbers = [] {
  std::array<int32_t, Linear::kChunkRows> numbers{};
  for (int i = 0; i < Linear::kChunkRows; ++i) numbers[i] = i;
  return numbers;
}();

Status in_range(const char* name, int value, int most) {
  if (value >= 1 && value <= most) return Status::ok();
  return Status::invalid(std::string(name) + " is " + std::to_string(value) + "; it must be in 1.." +
                         std::to_string(most));
}

// Panels of one task: even where there are several, because vector kernels take two at once.
int block_of(int panels, int threads, int most) {
  const int block = std::clamp(panels / (threads * kTasksPerWorker), 1, most);
  return block > 1 ? block & ~1 : 1;
}

}  // namespace

Linear::Linear(std::shared_ptr<Workspace> workspace, const IsaTable* isa, const LinearConfig& config)
    : workspace_(std::move(workspace)),
      isa_(isa),
      config_(config),
      panel_size_(panel_bytes({config.format, 0}, config.columns)) {
  if (config_.bias) bias_.resize(static_cast<size_t>(panel_count(config_.rows)) * kPanelRows);
}

Status Linear::create(std::shared_ptr<Workspace> workspace, const IsaTable* isa, const LinearConfig& config,
                      std::unique_ptr<Linear>* out) {
  // Far above any model, and low enough that padded sizes fit int.
  KT_RETURN_IF_ERROR(in_range("rows", config.rows, 1 << 28));
  KT_RETURN_IF_ERROR(in_range("columns", config.columns, 1 << 24));
  if (!isa->formats[static_cast<int>(config.format)].pack) {
    return Status::invalid(std::string("a linear cannot have the format ") + format_name(config.format) +
                           ", which keeps the codes of a file; choose bf16, int8, int4 or int4g");
  }
  KT_RETURN_IF_ERROR(workspace->pool().usable());
  std::unique_ptr<Linear> linear(new Linear(std::move(workspace), isa, config));
  KT_RETURN_IF_ERROR(linear->split());
  KT_RETURN_IF_ERROR(linear->workspace_->ensure(linear->needs()));
  *out = std::move(linear);
  return Status::ok();
}

Status Linear::split() {
  Pool& pool = workspace_->pool();
  const int nodes = pool.node_count(), panels = panel_count(config_.rows);
  if (nodes > kMaxNodes) {
    return Status::invalid("the pool has " + std::to_string(nodes) + " nodes; a linear can use at most " +
                           std::to_string(kMaxNodes));
  }
  shards_.resize(nodes);
  for (int i = 0; i < nodes; ++i) {
    Shard& shard = shards_[i];
    shard.begin = static_cast<int>(static_cast<int64_t>(panels) * i / nodes);
    shard.panels = static_cast<int>(static_cast<int64_t>(panels) * (i + 1) / nodes) - shard.begin;
    if (shard.panels == 0) continue;
    KT_RETURN_IF_ERROR(NumaBuffer::allocate(shard.panels * panel_size_, pool.node(i).numa_id, &shard.weights));
  }
  return Status::ok();
}

WorkspaceNeeds Linear::needs() const {
  WorkspaceNeeds n;
  if (act() != ActKind::bf16) n.input_bytes = ActRows::bytes(act(), kChunkRows, config_.columns);
  n.scratch_bytes = isa_->gemm_scratch_bytes(config_.columns, isa_->max_panels);
  n.c_bytes = static_cast<size_t>(round_up(isa_->max_rows, kRowUnit)) * isa_->max_panels * kPanelRows * 4;
  return n;
}

size_t Linear::packed_bytes() const { return static_cast<size_t>(panel_count(config_.rows)) * panel_size_; }

Status Linear::load(const uint16_t* weights) {
  struct Context {
    const Linear* linear;
    const uint16_t* weights;
  } context{this, weights};
  KT_RETURN_IF_ERROR(workspace_->pool().usable());
  const std::lock_guard lock(workspace_->mutex());
  KT_RETURN_IF_ERROR(workspace_->pool().run(
      [](void* c, const Worker& worker) {
        const Linear& l = *static_cast<Context*>(c)->linear;
        const Shard& shard = l.shards_[worker.node];
        for (int p = worker.index; p < shard.panels; p += worker.node_threads) {
          const int row = (shard.begin + p) * kPanelRows, k = l.config_.columns;
          l.kernels().pack(static_cast<Context*>(c)->weights + static_cast<size_t>(row) * k, k,
                           std::min(kPanelRows, l.config_.rows - row), k, l.panel(shard, p));
        }
      },
      &context));
  has_weights_.store(true, std::memory_order_release);
  return Status::ok();
}

Status Linear::load_bias(const float* bias) {
  if (!config_.bias) return Status::invalid("this linear has no room for a bias; make it with bias=True");
  KT_RETURN_IF_ERROR(workspace_->pool().usable());
  const std::lock_guard lock(workspace_->mutex());
  std::copy_n(bias, config_.rows, bias_.begin());
  has_bias_.store(true, std::memory_order_release);
  return Status::ok();
}

void Linear::decode(float* out) const {
  const int k = config_.columns;
  std::vector<float> rows(static_cast<size_t>(kPanelRows) * k);
  for (const Shard& shard : shards_) {
    for (int p = 0; p < shard.panels; ++p) {
      const int row = (shard.begin + p) * kPanelRows;
      decode_panel({config_.format, 0}, panel(shard, p), k, k, rows.data());
      std::copy_n(rows.data(), static_cast<size_t>(std::min(kPanelRows, config_.rows - row)) * k,
                  out + static_cast<size_t>(row) * k);
    }
  }
}

ActRows Linear::quantised(int node, int count) const {
  return ActRows::at(workspace_->node(node).input.memory.data(), act(), count, config_.columns, span(count));
}

void Linear::quantise(const Worker& worker, const LinearArgs& args) const {
  if (act() == ActKind::bf16) return;
  quantise_rows(*isa_, act(), worker, args.input, args.input_pitch, args.count, config_.columns,
                quantised(worker.node, args.count));
}

void Linear::quantise_piece(int node, const LinearArgs& args, int row, int from, int to) const {
  quantise_columns(*isa_, act(), args.input + row * args.input_pitch, row, from, to, quantised(node, args.count));
}

void Linear::multiply(const Worker& worker, const LinearArgs& args, TaskCounter& tasks) const {
  const Shard& shard = shards_[worker.node];
  const int block = block_of(shard.panels, worker.node_threads, isa_->max_panels);
  const int group = panel_count(config_.rows) / args.groups;
  for (int first; (first = tasks.take() * block) < shard.panels;) {
    const int last = std::min(first + block, shard.panels);
    for (int count; first < last; first += count) {
      count = std::min(last - first, group - (shard.begin + first) % group);
      multiply_panels(worker, args, shard, first, count);
    }
  }
}

void Linear::multiply_panels(const Worker& worker, const LinearArgs& args, const Shard& shard, int first,
                             int count) const {
  Workspace::Thread& thread = workspace_->thread(worker.global);
  GemmArgs g{};
  g.panels = panel(shard, first);
  g.n_panels = count;
  g.k = config_.columns;
  const int group_rows = panel_count(config_.rows) / args.groups * kPanelRows;
  const size_t column = static_cast<size_t>(shard.begin + first) * kPanelRows, group = column / group_rows;
  const size_t place = group * args.output_step + column % group_rows;
  g.acts = act() == ActKind::bf16 ? bf16_acts(args.input + group * args.input_step, args.input_pitch)
                                  : quantised(worker.node, args.count).acts();
  g.c = reinterpret_cast<float*>(thread.c.data());
  g.lay_out_rows();
  g.scratch = thread.scratch.data();
  g.format = config_.format;
  const int most = args.count > kSteadyRows ? isa_->max_rows : isa_->steady_rows;
  const int columns = std::min(count * kPanelRows, config_.rows - static_cast<int>(column));
  for (int row = 0; row < args.count; row += g.m) {
    g.rows = kRowNumbers.data() + row;
    g.m = std::min(args.count - row, most);
    kernels().gemm(g);
    for (int i = 0; i < g.m; ++i) {
      const size_t t = static_cast<size_t>(row) + i, at = t * args.output_pitch + place;
      isa_->finish({g.c + i * g.c_pitch, config_.bias ? bias_.data() + column : nullptr,
                    args.row_scales ? args.row_scales[t] : 1.0f,
                    args.addend ? args.addend + t * args.addend_pitch + column : nullptr, columns,
                    args.bf16 ? args.bf16 + at : nullptr, args.f32 ? args.f32 + at : nullptr});
    }
  }
}

Status Linear::ready() const {
  if (!has_weights_.load(std::memory_order_acquire)) return Status::invalid("this linear has no weights; load them");
  if (config_.bias && !has_bias_.load(std::memory_order_acquire)) {
    return Status::invalid("this linear was made for a bias and has none; load it");
  }
  return Status::ok();
}

Status Linear::check_groups(const LinearArgs& args) const {
  if (args.groups == 1) return Status::ok();
  if (args.groups < 1 || config_.rows % (args.groups * kPanelRows)) {
    return Status::invalid(std::to_string(config_.rows) + " rows cannot be " + std::to_string(args.groups) +
                           " groups of a multiple of " + std::to_string(kPanelRows) + " rows");
  }
  if (act() != ActKind::bf16 || config_.bias || args.addend) {
    return Status::invalid("groups of rows need a linear in bf16 without bias, and no addend");
  }
  return Status::ok();
}

Status Linear::check(const LinearArgs& args) const {
  if (args.count < 0) return Status::invalid(std::to_string(args.count) + " rows in one call; pass 0 or more");
  if (args.count == 0) return Status::ok();
  if (!args.input || !(args.bf16 || args.f32)) {
    return Status::invalid("an address is 0; input and output may be missing only with 0 rows");
  }
  const auto too_short = [](const char* name, size_t pitch, int width) {
    return Status::invalid(std::string(name) + " rows are " + std::to_string(pitch) +
                           " elements apart; they are longer: " + std::to_string(width));
  };
  if (args.input_pitch < static_cast<size_t>(config_.columns)) {
    return too_short("input", args.input_pitch, config_.columns);
  }
  KT_RETURN_IF_ERROR(check_groups(args));
  if (args.output_pitch < static_cast<size_t>(config_.rows))
    return too_short("output", args.output_pitch, config_.rows);
  if (args.addend && args.addend_pitch < static_cast<size_t>(config_.rows)) {
    return too_short("addend", args.addend_pitch, config_.rows);
  }
  return ready();
}

Status Linear::forward(const LinearArgs& args) {
  KT_RETURN_IF_ERROR(check(args));
  struct Pass {
    const Linear* linear;
    LinearArgs args;
    TaskCounter tasks[kMaxNodes];
  };
  KT_RETURN_IF_ERROR(workspace_->pool().usable());
  const std::lock_guard lock(workspace_->mutex());
  for (int row = 0; row < args.count; row += kChunkRows) {
    Pass pass{this, args, {}};
    LinearArgs& part = pass.args;
    part.count = std::min(kChunkRows, args.count - row);
    part.input += row * args.input_pitch;
    if (part.bf16) part.bf16 += row * args.output_pitch;
    if (part.f32) part.f32 += row * args.output_pitch;
    if (part.addend) part.addend += row * args.addend_pitch;
    if (part.row_scales) part.row_scales += row;
    KT_RETURN_IF_ERROR(workspace_->pool().run(
        [](void* c, const Worker& worker) {
          Pass& p = *static_cast<Pass*>(c);
          p.linear->quantise(worker, p.args);
          if (p.linear->act() != ActKind::bf16) worker.node_barrier();
          p.linear->multiply(worker, p.args, p.tasks[worker.node]);
        },
        &pass));
  }
  return Status::ok();
}

}  // namespace kt
