#include "moe/layer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "base/bf16.h"
#include "moe/forward.h"

namespace kt {
namespace {

// Shards are cut at whole depth units, so that no quantisation group of the down projection is shared by two nodes.
constexpr int kShardUnit = kDepthUnit;

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

Status check(const LayerConfig& c) {
  // Far above any model, and low enough that padded sizes and kChunkTokens * top_k fit int.
  KT_RETURN_IF_ERROR(in_range("num_experts", c.num_experts, 1 << 20));
  KT_RETURN_IF_ERROR(in_range("top_k", c.top_k, 1 << 16));
  KT_RETURN_IF_ERROR(in_range("hidden_size", c.hidden, 1 << 24));
  KT_RETURN_IF_ERROR(in_range("intermediate_size", c.intermediate, 1 << 24));
  KT_RETURN_IF_ERROR(in_range("max_tokens", c.max_tokens, 1 << 30));
  if (const GroupedKind* kind = grouped_kind(c.format); kind && kind->scales != Scales::none) {
    if (c.group < kind->least_group || c.group % kind->least_group) {
      return Status::invalid("group_size is " + std::to_string(c.group) + "; " + format_name(c.format) +
                             " needs a multiple of " + std::to_string(kind->least_group));
    }
  }
  KT_RETURN_IF_ERROR(off_or_positive("swiglu_limit", c.activation.limit));
  KT_RETURN_IF_ERROR(off_or_positive("swiglu_alpha", c.activation.alpha));
  const bool silu = c.activation.kind == ActivationKind::silu;
  if (silu == (c.activation.alpha > 0)) {
    return Status::invalid(silu ? "silu has no swiglu_alpha; leave it out, or choose another activation"
                                : "this activation needs a swiglu_alpha above 0");
  }
  return Status::ok();
}

// Random codes, and one scale that makes their deviation about the one that is asked for.
template <class Next>
void random_panel(const GroupedKind& kind, int group, int k, float deviation, Next next, GroupedPanel* panel) {
  panel->reset(kind, k, group);
  const uint8_t mask = grouped_code_bits(kind.codes) == 8 ? 0xff : 15;
  for (int n = 0; n < kPanelRows; ++n) {
    for (int i = 0; i < k; ++i) {
      const uint8_t code = static_cast<uint8_t>(next()) & mask;
      panel->row(n)[i] = kind.codes == Codes::e4m3 ? code & 0xbf : code;  // e4m3 below 2: no NaN, few outliers
    }
    // Deviation of such codes: e4m3 0.6, e2m1 3, int4 4.6. A power of two has a code in every width.
    const float spread = kind.codes == Codes::e4m3 ? 0.6f : kind.codes == Codes::e2m1 ? 3.0f : 4.6f;
    const int exponent = std::ilogb(deviation / spread);
    panel->rows[n] = kind.row ? std::ldexp(1.0f, exponent) : 1.0f;
    const int of_group = kind.row ? 0 : exponent;
    const float f32 = std::ldexp(1.0f, of_group);
    const uint16_t bf16 = f32_to_bf16(f32), f16 = static_cast<uint16_t>(std::max(1, 15 + of_group) << 10);
    const uint8_t e8m0 = static_cast<uint8_t>(127 + of_group), e4m3 = 0x38;
    const void* scale = kind.scales == Scales::f32    ? static_cast<const void*>(&f32)
                        : kind.scales == Scales::bf16 ? static_cast<const void*>(&bf16)
                        : kind.scales == Scales::f16  ? static_cast<const void*>(&f16)
                        : kind.scales == Scales::e8m0 ? static_cast<const void*>(&e8m0)
                                                      : static_cast<const void*>(&e4m3);
    for (int g = 0; panel->width && g < panel->groups; ++g)
      std::memcpy(panel->row_scales(n) + static_cast<size_t>(g) * panel->width, scale, panel->width);
  }
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
      scale_rows_(config.num_experts) {}

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
  const int units = div_up(config_.intermediate, kShardUnit);
  if (nodes > kMaxNodes) {
    return Status::invalid("the pool has " + std::to_string(nodes) + " nodes; a layer can use at most " +
                           std::to_string(kMaxNodes));
  }
  if (units < nodes) {
    return Status::invalid("intermediate_size " + std::to_string(config_.intermediate) + " cannot be split over " +
                           std::to_string(nodes) + " nodes: each needs at least " + std::to_string(kShardUnit) +
                           " columns; use at most " + std::to_string(units));
  }
  shards_.resize(nodes);
  for (int i = 0; i < nodes; ++i) {
    Shard& shard = shards_[i];
    shard.begin = units * i / nodes * kShardUnit;
    shard.size = std::min(units * (i + 1) / nodes * kShardUnit, config_.intermediate) - shard.begin;
  }
  panel_group_ = panel_group();
  for (int i = 0; i < nodes; ++i) {
    Shard& shard = shards_[i];
    shard.gate_up_bytes = 2 * panel_count(shard.size) * panel_bytes(format(), config_.hidden);
    shard.down_bytes = panel_count(config_.hidden) * panel_bytes(format(), shard.size);
    const size_t bytes = (shard.gate_up_bytes + shard.down_bytes) * config_.num_experts;
    KT_RETURN_IF_ERROR(NumaBuffer::allocate(bytes, workspace_->pool().node(i).numa_id, &shard.weights));
    if (config_.biases) KT_RETURN_IF_ERROR(allocate_biases(i));
  }
  return Status::ok();
}

// The largest that a panel can have: groups of a shard must begin where those of the matrix do.
int Layer::panel_group() const {
  const GroupedKind* kind = grouped_kind(config_.format);
  if (!kind) return 0;
  if (kind->scales == Scales::none) return GroupedLayout::kBlock;
  if (kind->least_group < 32) return kind->least_group;
  const auto fits = [&](int group) {
    return config_.group % group == 0 &&
           std::all_of(shards_.begin(), shards_.end(), [&](const Shard& shard) { return shard.begin % group == 0; });
  };
  int group = kind->least_group;
  while (group < GroupedLayout::kBlock && fits(2 * group)) group *= 2;
  return group;
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
  const ActKind act = kernels().act;
  const int max_pairs = chunk_tokens_ * config_.top_k;
  int widest = 0;
  for (const Shard& shard : shards_) widest = std::max(widest, shard.size);
  n.num_experts = config_.num_experts;
  n.max_pairs = max_pairs;
  n.hidden_bytes = static_cast<size_t>(max_pairs + kRowUnit) * hidden_pitch(widest) * 2;
  if (act != ActKind::bf16) {
    n.input_bytes = ActBuffer::bytes(act, chunk_tokens_, config_.hidden);
    n.hidden_quantised_bytes = ActBuffer::bytes(act, max_pairs + kRowUnit, widest);
  }
  if (shards_.size() > 1)
    n.partial_bytes = static_cast<size_t>(chunk_tokens_) * round_up(config_.hidden, kPanelRows) * 4;
  const int depth = std::max(config_.hidden, widest);
  n.scratch_bytes = isa_->gemm_scratch_bytes(depth, isa_->max_panels);
  n.c_bytes = static_cast<size_t>(round_up(isa_->max_rows, kRowUnit)) * isa_->max_panels * kPanelRows * 4;
  if (has_columns()) n.rows_bytes = static_cast<size_t>(round_up(isa_->max_rows, kRowUnit)) * config_.hidden * 2;
  n.sum_bytes = static_cast<size_t>(chunk_tokens_) * down_panels_max(*isa_) * kPanelRows * 4;
  return n;
}

void Layer::pack_panel(const Shard& shard, int expert, const ExpertWeights& weights, int panel) const {
  const int gate_up_panels = 2 * panel_count(shard.size);
  if (panel < gate_up_panels) {
    const int row = panel / 2 * kPanelRows;
    const uint16_t* source = panel % 2 ? weights.up : weights.gate;
    uint8_t* out = shard.expert(expert) + panel * panel_bytes(format(), config_.hidden);
    kernels().pack(source + static_cast<size_t>(shard.begin + row) * config_.hidden, config_.hidden,
                   std::min(kPanelRows, shard.size - row), config_.hidden, out);
    return;
  }
  panel -= gate_up_panels;
  const int row = panel * kPanelRows;
  uint8_t* out = shard.expert(expert) + shard.gate_up_bytes + panel * panel_bytes(format(), shard.size);
  kernels().pack(weights.down + static_cast<size_t>(row) * config_.intermediate + shard.begin, config_.intermediate,
                 std::min(kPanelRows, config_.hidden - row), shard.size, out);
}

Status Layer::load_expert(int expert, const ExpertWeights& weights) {
  KT_RETURN_IF_ERROR(check_expert(expert));
  if (!kernels().pack) {
    return Status::invalid(std::string("a layer of ") + format_name(config_.format) +
                           " takes the codes of a checkpoint, not bf16 weights");
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
        const int panels = 2 * panel_count(shard.size) + panel_count(job.layer->config_.hidden);
        for (int p = worker.index; p < panels; p += worker.node_threads)
          job.layer->pack_panel(shard, job.expert, job.weights, p);
      },
      &context);
  if (packed.is_ok()) set_loaded(expert);
  return packed;
}

void Layer::fill_random_panel(int k, uint64_t* state, std::vector<uint16_t>* rows, GroupedPanel* codes,
                              uint8_t* panel) const {
  const auto next = [state] {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return static_cast<uint32_t>(*state >> 32);
  };
  const float deviation = 1.0f / __builtin_sqrtf(static_cast<float>(k));
  if (const GroupedKind* kind = grouped_kind(config_.format)) {
    random_panel(*kind, panel_group_, k, deviation, next, codes);
    put_grouped(*kind, panel_group_, *codes, panel);
    return;
  }
  const float scale = 3.4641f * deviation / 4294967296.0f;
  for (int i = 0; i < kPanelRows * k; ++i)
    (*rows)[i] = f32_to_bf16(static_cast<float>(static_cast<int32_t>(next())) * scale);
  kernels().pack(rows->data(), k, kPanelRows, k, panel);
}

Status Layer::fill_random(uint64_t seed) {
  struct Context {
    Layer* layer;
    uint64_t seed;
  } context{this, seed};
  KT_RETURN_IF_ERROR(workspace_->pool().usable());
  const std::lock_guard lock(workspace_->mutex());
  const Status packed = workspace_->pool().run(
      [](void* c, const Worker& worker) {
        const Context& job = *static_cast<Context*>(c);
        const Layer& layer = *job.layer;
        const Shard& shard = layer.shards_[worker.node];
        const int depth = std::max(layer.config_.hidden, shard.size);
        std::vector<uint16_t> rows(static_cast<size_t>(kPanelRows) * depth);
        GroupedPanel codes;
        uint64_t state = job.seed * 0x9e3779b97f4a7c15u + worker.global + 1;
        const int gate_up = 2 * panel_count(shard.size), panels = gate_up + panel_count(layer.config_.hidden);
        for (int e = 0; e < layer.config_.num_experts; ++e) {
          for (int p = worker.index; p < panels; p += worker.node_threads) {
            const int k = p < gate_up ? layer.config_.hidden : shard.size;
            uint8_t* out = p < gate_up
                               ? shard.expert(e) + p * panel_bytes(layer.format(), k)
                               : shard.expert(e) + shard.gate_up_bytes + (p - gate_up) * panel_bytes(layer.format(), k);
            layer.fill_random_panel(k, &state, &rows, &codes, out);
          }
        }
      },
      &context);
  for (int e = 0; packed.is_ok() && e < config_.num_experts; ++e) {
    set_loaded(e);
    // One scale for all rows of a panel: they are those of square blocks where a checkpoint would have such.
    const int rows = config_.format == Format::fp8 ? config_.group : 1;
    scale_rows_[e] = {rows, rows, rows};
    if (config_.biases) set_loaded(e, kBiases);
  }
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
  if (grouped_kind(config_.format)) scale_rows_[expert] = {0, 0, 0};  // others have none
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
  for (const Shard& shard : shards_) {
    std::vector<float> rows(static_cast<size_t>(kPanelRows) * std::max(H, shard.size));
    for (int p = 0; p < 2 * panel_count(shard.size); ++p) {
      decode_panel(format(), shard.expert(expert) + p * panel_bytes(format(), H), H, H, rows.data());
      const int row = p / 2 * kPanelRows, count = std::min(kPanelRows, shard.size - row);
      float* to = (p % 2 ? up : gate) + static_cast<size_t>(shard.begin + row) * H;
      const std::vector<int32_t>& columns = columns_[expert];
      if (columns.empty()) {
        std::copy_n(rows.data(), static_cast<size_t>(count) * H, to);
        continue;
      }
      for (int r = 0; r < count; ++r) {
        for (int j = 0; j < H; ++j) to[static_cast<size_t>(r) * H + columns[j]] = rows[static_cast<size_t>(r) * H + j];
      }
    }
    for (int p = 0; p < panel_count(H); ++p) {
      const uint8_t* panel = shard.expert(expert) + shard.gate_up_bytes + p * panel_bytes(format(), shard.size);
      decode_panel(format(), panel, shard.size, shard.size, rows.data());
      for (int r = 0; r < std::min(kPanelRows, H - p * kPanelRows); ++r) {
        std::copy_n(rows.data() + static_cast<size_t>(r) * shard.size, shard.size,
                    down + static_cast<size_t>(p * kPanelRows + r) * I + shard.begin);
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
