#include "moe/layer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "formats/gguf.h"
#include "moe/forward.h"
#include "moe/gathered_rows.h"

namespace kt {
namespace {

// Shards are cut at whole depth units, so that no quantisation group of the down projection is shared by two nodes, and
// at whole blocks of GGUF.
int shard_unit(const LayerConfig& c) { return std::max(kDepthUnit, gguf_block(c.formats[kDown]).weights); }

Status in_range(const char* name, int value, int most) {
  if (value >= 1 && value <= most) return Status::ok();
  return Status::invalid(std::string(name) + " is " + std::to_string(value) + "; it must be in 1.." +
                         std::to_string(most));
}

Status off_or_positive(const char* name, float value) {
  if (std::isfinite(value) && value >= 0) return Status::ok();
  return Status::invalid(std::string(name) + " is " + std::to_string(value) +
                         "; it must be above 0, or 0 to turn it off");
}

bool has_free_group(Format format) { return is_checkpoint(format) && grouped_kind(format)->scales != Scales::none; }

// Rows of a matrix are whole blocks.
Status check_blocks(const LayerConfig& c, Matrix matrix) {
  const int k = matrix == kDown ? c.intermediate : c.hidden, block = gguf_block(c.formats[matrix]).weights;
  if (block <= 1 || k % block == 0 || is_checkpoint(c.formats[matrix])) return Status::ok();
  return Status::invalid(std::string(matrix == kDown ? "intermediate_size" : "hidden_size") + " is " +
                         std::to_string(k) + "; " + kMatrixNames[matrix] + " in " + format_name(c.formats[matrix]) +
                         " needs a multiple of " + std::to_string(block));
}

Status check_formats(const LayerConfig& c) {
  for (const Matrix matrix : {kGate, kUp, kDown}) {
    const Format format = c.formats[matrix];
    if (!c.one_format() && gguf_block(format).weights == 0) {
      return Status::invalid(
          std::string("the matrices of a layer may have different formats only if all are types of ") + "GGUF, which " +
          format_name(format) + " is not");
    }
    KT_RETURN_IF_ERROR(check_blocks(c, matrix));
    // Without a group a format that is one of GGUF too has the one it has there.
    if (!has_free_group(format) || (c.group == 0 && gguf_block(format).weights)) continue;
    const int least = grouped_kind(format)->least_group;
    if (c.group < least || c.group % least) {
      return Status::invalid("group_size is " + std::to_string(c.group) + "; " + format_name(format) +
                             " needs a multiple of " + std::to_string(least));
    }
  }
  return Status::ok();
}

// What no model without gates has is not offered.
Status check_without_gates(const LayerConfig& c) {
  if (!c.one_format() || grouped_kind(c.format())) {
    return Status::invalid(std::string("experts without gates are made from bf16 weights, which ") +
                           format_name(c.format()) + " is not; use bf16, int8, int4 or int4g");
  }
  if (c.biases) return Status::invalid("experts without gates cannot have biases");
  if (c.activation.limit > 0) return Status::invalid("an activation without gates has no swiglu_limit; leave it out");
  return Status::ok();
}

Status check(const LayerConfig& c) {
  // Far above any model, and low enough that padded sizes and kChunkTokens * top_k fit int.
  KT_RETURN_IF_ERROR(in_range("num_experts", c.num_experts, 1 << 20));
  KT_RETURN_IF_ERROR(in_range("top_k", c.top_k, 1 << 16));
  KT_RETURN_IF_ERROR(in_range("hidden_size", c.hidden, 1 << 24));
  KT_RETURN_IF_ERROR(in_range("intermediate_size", c.intermediate, 1 << 24));
  KT_RETURN_IF_ERROR(in_range("max_tokens", c.max_tokens, 1 << 30));
  KT_RETURN_IF_ERROR(check_formats(c));
  KT_RETURN_IF_ERROR(off_or_positive("swiglu_limit", c.activation.limit));
  KT_RETURN_IF_ERROR(off_or_positive("swiglu_alpha", c.activation.alpha));
  if (c.activation.sloped() != (c.activation.alpha > 0)) {
    return Status::invalid(c.activation.sloped()
                               ? "this activation needs a swiglu_alpha above 0"
                               : "this activation has no swiglu_alpha; leave it out, or choose another activation");
  }
  return c.activation.gated() ? Status::ok() : check_without_gates(c);
}

}  // namespace

Layer::Layer(std::shared_ptr<Workspace> workspace, const IsaTable* isa, const LayerConfig& config)
    : workspace_(std::move(workspace)),
      isa_(isa),
      config_(config),
      chunk_tokens_(std::min(config.max_tokens, kChunkTokens)),
      columns_(config.num_experts),
      mask_(config.num_experts, 0),
      loaded_(config.num_experts, 0),
      parts_(config.num_experts, 0),
      scale_rows_(config.num_experts) {
  // A format that is one of GGUF too has the group that it has there, unless told.
  if (is_checkpoint(config_.format()) && config_.group == 0)
    config_.group = grouped_kind(config_.format())->least_group;
}

Status Layer::create(std::shared_ptr<Workspace> workspace, const IsaTable* isa, const LayerConfig& config,
                     std::unique_ptr<Layer>* out) {
  KT_RETURN_IF_ERROR(check(config));
  KT_RETURN_IF_ERROR(workspace->pool().usable());
  std::unique_ptr<Layer> layer(new Layer(std::move(workspace), isa, config));
  KT_RETURN_IF_ERROR(layer->split());
  KT_RETURN_IF_ERROR(layer->workspace_->ensure(layer->needs()));
  *out = std::move(layer);
  return Status::ok();
}

Status Layer::split() {
  const int nodes = workspace_->pool().node_count();
  const int unit = shard_unit(config_), units = div_up(config_.intermediate, unit);
  if (nodes > kMaxNodes) {
    return Status::invalid("the pool has " + std::to_string(nodes) + " nodes; a layer can use at most " +
                           std::to_string(kMaxNodes));
  }
  if (units < nodes) {
    return Status::invalid("intermediate_size " + std::to_string(config_.intermediate) + " cannot be split over " +
                           std::to_string(nodes) + " nodes: each needs at least " + std::to_string(unit) +
                           " columns; use at most " + std::to_string(units));
  }
  shards_.resize(nodes);
  for (int i = 0; i < nodes; ++i) {
    Shard& shard = shards_[i];
    shard.begin = units * i / nodes * unit;
    shard.size = std::min(units * (i + 1) / nodes * unit, config_.intermediate) - shard.begin;
  }
  for (const Matrix matrix : {kGate, kUp, kDown}) panel_groups_[matrix] = panel_group(config_.formats[matrix]);
  for (int i = 0; i < nodes; ++i) {
    Shard& shard = shards_[i];
    shard.gate_up_bytes = panels(kUp, shard) * (gated() ? panel_size(kGate, shard) : 0);
    shard.gate_up_bytes += panels(kUp, shard) * panel_size(kUp, shard);
    shard.down_bytes = panels(kDown, shard) * panel_size(kDown, shard);
    const size_t bytes = (shard.gate_up_bytes + shard.down_bytes) * config_.num_experts;
    KT_RETURN_IF_ERROR(NumaBuffer::allocate(bytes, workspace_->pool().node(i).numa_id, &shard.weights));
    if (config_.biases) KT_RETURN_IF_ERROR(allocate_biases(i));
  }
  return Status::ok();
}

// The largest that a panel can have: groups of a shard must begin where those of the matrix do.
int Layer::panel_group(Format format) const {
  const GroupedKind* kind = grouped_kind(format);
  if (!kind) return 0;
  if (is_checkpoint(format) && kind->scales == Scales::none) return GroupedLayout::kBlock;
  if (!has_free_group(format) || config_.group == 0 || kind->least_group < 32) return kind->least_group;
  const auto fits = [&](int group) {
    return config_.group % group == 0 &&
           std::all_of(shards_.begin(), shards_.end(), [&](const Shard& shard) { return shard.begin % group == 0; });
  };
  int group = kind->least_group;
  while (group < GroupedLayout::kBlock && fits(2 * group)) group *= 2;
  return group;
}

uint8_t* Layer::panel(const Shard& shard, int expert, Matrix matrix, int index) const {
  uint8_t* weights = shard.expert(expert);
  const size_t size = panel_size(matrix, shard), at = static_cast<size_t>(index);
  if (matrix == kDown) return weights + shard.gate_up_bytes + at * size;
  if (!gated()) return weights + at * size;
  if (paired()) return weights + (2 * at + matrix) * size;
  return weights + (matrix == kUp ? panels(kGate, shard) * panel_size(kGate, shard) : 0) + at * size;
}

Matrix Layer::panel_of(const Shard& shard, int position, int* index) const {
  const int pairs = panel_count(shard.size);
  if (!gated()) position += pairs;
  const Matrix matrix = position < pairs ? kGate : position < 2 * pairs ? kUp : kDown;
  *index = position - matrix * pairs;
  return matrix;
}

Status Layer::allocate_biases(int node) {
  Shard& shard = shards_[node];
  shard.gate_up_biases = static_cast<size_t>(2) * round_up(shard.size, kPanelRows);
  shard.down_biases = node == 0 ? round_up(config_.hidden, kPanelRows) : 0;
  const size_t bytes = (shard.gate_up_biases + shard.down_biases) * config_.num_experts * 4;
  return NumaBuffer::allocate(bytes, workspace_->pool().node(node).numa_id, &shard.biases);
}

Status Layer::check_expert(int expert) const {
  if (expert >= 0 && expert < config_.num_experts) return Status::ok();
  return Status::invalid("expert " + std::to_string(expert) + " is not in 0.." +
                         std::to_string(config_.num_experts - 1));
}

Status Layer::load_biases(int expert, const ExpertBiases& biases) {
  KT_RETURN_IF_ERROR(check_expert(expert));
  if (!config_.biases) return Status::invalid("this layer has no room for biases; make it with biases=True");
  KT_RETURN_IF_ERROR(workspace_->pool().usable());
  const std::lock_guard lock(workspace_->mutex());
  for (const Shard& shard : shards_) {
    float* to = shard.gate_up_bias(expert);
    for (int row = 0; row < shard.size; row += kPanelRows, to += 2 * kPanelRows) {
      const int count = std::min(kPanelRows, shard.size - row);
      std::copy_n(biases.gate + shard.begin + row, count, to);
      std::copy_n(biases.up + shard.begin + row, count, to + kPanelRows);
    }
  }
  std::copy_n(biases.down, config_.hidden, shards_.front().down_bias(expert));
  set_loaded(expert, kBiases);
  return Status::ok();
}

size_t Layer::expert_bytes() const {
  size_t bytes = 0;
  for (const Shard& shard : shards_) bytes += shard.gate_up_bytes + shard.down_bytes;
  return bytes;
}

WorkspaceNeeds Layer::needs() const {
  WorkspaceNeeds n;
  const ActKind act = this->act();
  const int max_pairs = chunk_tokens_ * config_.top_k;
  int widest = 0;
  for (const Shard& shard : shards_) widest = std::max(widest, shard.size);
  n.num_experts = config_.num_experts;
  n.max_pairs = max_pairs;
  n.hidden_bytes = static_cast<size_t>(max_pairs + kRowUnit) * hidden_pitch(widest) * 2;
  if (act != ActKind::bf16) {
    n.input_bytes = ActRows::bytes(act, chunk_tokens_, config_.hidden);
    n.hidden_quantised_bytes = ActRows::bytes(act, max_pairs + kRowUnit, widest);
  }
  GatheredRows::add_needs(kernels(kUp), chunk_tokens_, config_.hidden, &n);
  GatheredRows::add_needs(kernels(kDown), max_pairs, widest, &n);
  if (shards_.size() > 1) {
    n.partial_bytes = static_cast<size_t>(chunk_tokens_) * round_up(config_.hidden, kPairColumns) * 4;
  }
  const int most_product_rows = max_pairs + std::min(config_.num_experts, max_pairs) * (kRowUnit - 1);
  n.products_bytes = regions_bytes(*isa_, config_.hidden, most_product_rows);
  const int depth = std::max(config_.hidden, widest);
  n.scratch_bytes = isa_->gemm_scratch_bytes(depth, isa_->max_panels);
  n.c_bytes = GemmArgs::c_columns(isa_->max_rows) * div_up(isa_->max_panels, 2) * 4;
  if (has_columns()) n.rows_bytes = static_cast<size_t>(round_up(isa_->max_rows, kRowUnit)) * config_.hidden * 2;
  n.sum_bytes = static_cast<size_t>(chunk_tokens_) * down_panels_max(*isa_) * kPanelRows * 4;
  return n;
}

void Layer::pack_panel(const Shard& shard, int expert, const ExpertWeights& weights, int position) const {
  int index;
  const Matrix matrix = panel_of(shard, position, &index);
  const int row = index * kPanelRows, H = config_.hidden, I = config_.intermediate;
  uint8_t* out = panel(shard, expert, matrix, index);
  if (matrix == kDown) {
    kernels(kDown).pack(weights.down + static_cast<size_t>(row) * I + shard.begin, I, std::min(kPanelRows, H - row),
                        shard.size, out);
    return;
  }
  kernels(matrix).pack((matrix == kUp ? weights.up : weights.gate) + static_cast<size_t>(shard.begin + row) * H, H,
                       std::min(kPanelRows, shard.size - row), H, out);
}

Status Layer::load_expert(int expert, const ExpertWeights& weights) {
  KT_RETURN_IF_ERROR(check_expert(expert));
  if (!config_.one_format() || !kernels(kGate).pack) {
    return Status::invalid(std::string("a layer of ") + format_name(config_.format()) +
                           " takes the codes of a file, not bf16 weights");
  }
  struct Context {
    const Layer* layer;
    int expert;
    ExpertWeights weights;
  } context{this, expert, weights};
  KT_RETURN_IF_ERROR(workspace_->pool().usable());
  const std::lock_guard lock(workspace_->mutex());
  const Status packed = workspace_->pool().run(
      [](void* c, const Worker& worker) {
        const Context& job = *static_cast<Context*>(c);
        const Shard& shard = job.layer->shards_[worker.node];
        for (int p = worker.index; p < job.layer->panel_total(shard); p += worker.node_threads)
          job.layer->pack_panel(shard, job.expert, job.weights, p);
      },
      &context);
  if (packed.is_ok()) set_loaded(expert);
  return packed;
}

void Layer::set_loaded(int expert, Part part) {
  parts_[expert] |= part;
  if (parts_[expert] != (config_.biases ? kWeights | kBiases : kWeights)) return;
  loaded_count_.fetch_add(loaded_[expert] ? 0 : 1, std::memory_order_relaxed);
  loaded_[expert] = 1;
}

void Layer::unset_loaded(int expert, uint8_t parts) {
  parts_[expert] &= static_cast<uint8_t>(~parts);
  loaded_count_.fetch_sub(loaded_[expert] ? 1 : 0, std::memory_order_relaxed);
  loaded_[expert] = 0;
  columns_[expert].clear();
  if (is_checkpoint(config_.format())) scale_rows_[expert] = {0, 0, 0};  // others have none
}

Status Layer::check_loaded(const Routing& routing) const {
  if (loaded_experts() == config_.num_experts) return Status::ok();
  const int expert = workspace_->plan().first_missing(routing, loaded_.data());
  if (expert < 0) return Status::ok();
  return Status::invalid("expert " + std::to_string(expert) + " of this layer has no " +
                         (parts_[expert] & kWeights ? "biases" : "weights") +
                         "; load them, or mask the expert as one of the GPU");
}

Status Layer::decode_expert(int expert, float* gate, float* up, float* down) const {
  KT_RETURN_IF_ERROR(check_expert(expert));
  const int H = config_.hidden, I = config_.intermediate;
  const std::vector<int32_t>& columns = columns_[expert];
  for (const Shard& shard : shards_) {
    std::vector<float> rows(static_cast<size_t>(kPanelRows) * std::max(H, shard.size));
    for (int position = 0; position < panel_total(shard); ++position) {
      int index;
      const Matrix matrix = panel_of(shard, position, &index);
      const int k = depth(matrix, shard), row = index * kPanelRows;
      const int count = std::min(kPanelRows, (matrix == kDown ? H : shard.size) - row);
      decode_panel(format(matrix), panel(shard, expert, matrix, index), k, k, rows.data());
      for (int r = 0; r < count; ++r) {
        const float* from = rows.data() + static_cast<size_t>(r) * k;
        if (matrix == kDown) {
          std::copy_n(from, k, down + static_cast<size_t>(row + r) * I + shard.begin);
          continue;
        }
        float* to = (matrix == kUp ? up : gate) + static_cast<size_t>(shard.begin + row + r) * H;
        for (int j = 0; j < H; ++j) to[columns.empty() ? j : columns[j]] = from[j];
      }
    }
  }
  return Status::ok();
}

Status Layer::forward(const ForwardArgs& args) {
  if (args.routing.tokens < 0 || args.routing.tokens > config_.max_tokens) {
    return Status::invalid(std::to_string(args.routing.tokens) +
                           " tokens in one call; this layer was made for at most " +
                           std::to_string(config_.max_tokens));
  }
  if (args.routing.tokens > 0 && !(args.routing.ids && args.routing.weights && args.input && args.output)) {
    return Status::invalid("an address is 0; ids, weights, input and output may be missing only with 0 tokens");
  }
  if (args.routing.id_bytes != 4 && args.routing.id_bytes != 8) {
    return Status::invalid("ids have " + std::to_string(args.routing.id_bytes) + " bytes; pass int32 (4) or int64 (8)");
  }
  KT_RETURN_IF_ERROR(workspace_->pool().usable());
  const std::lock_guard lock(workspace_->mutex());
  workspace_->plan().leave_out(config_.num_experts, mask_.data(), args.skip);
  KT_RETURN_IF_ERROR(check_loaded(args.routing));
  for (int t = 0; t < args.routing.tokens; t += chunk_tokens_) {
    const int tokens = std::min(chunk_tokens_, args.routing.tokens - t);
    const size_t row = static_cast<size_t>(t) * config_.hidden;
    ForwardArgs pass = args;
    pass.routing = args.routing.part(t, tokens);
    pass.input += row;
    pass.output += row;
    if (pass.addend) pass.addend += row;
    KT_RETURN_IF_ERROR(run_forward(*this, *workspace_, pass));
  }
  return Status::ok();
}

}  // namespace kt
