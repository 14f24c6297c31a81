#include "decoder/decoder.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>

#include "decoder/step.h"

namespace kt {
namespace {

// Hands out pieces of one allocation: first without memory, to count the bytes.
struct Arena {
  uint8_t* base;
  size_t used = 0;

  template <class T>
  T* take(size_t count) {
    uint8_t* at = base ? base + used : nullptr;
    used += (count * sizeof(T) + 127) / 128 * 128;
    return reinterpret_cast<T*>(at);
  }
};

// layout(Arena&) twice: for the size, and for the places.
template <class Layout>
Status allocate_arena(int numa_id, std::vector<NumaBuffer>* memory, const Layout& layout) {
  Arena sizes{nullptr};
  layout(sizes);
  NumaBuffer buffer;
  KT_RETURN_IF_ERROR(NumaBuffer::allocate(sizes.used, numa_id, &buffer));
  Arena arena{buffer.data()};
  layout(arena);
  memory->push_back(std::move(buffer));
  return Status::ok();
}

struct Largest {
  int query = 1, key = 1, mixed = 1, group = 1, head_dim = 1, mixed_dim = 1, heads = 1, mlp = 0, experts = 1, top_k = 1,
      routing = 1;
  int q_rank = 0, latent_query = 0, latent_value = 0;

  explicit Largest(const DecoderConfig& c) {
    for (const BlockConfig& b : c.blocks) {
      const AttentionConfig& a = b.attention;
      query = std::max(query, a.heads * a.query_dim());
      mixed = std::max(mixed, a.heads * a.mixed_dim());
      mixed_dim = std::max(mixed_dim, a.mixed_dim());
      if (a.is_latent()) {
        if (a.latent.q_a) q_rank = std::max(q_rank, a.latent.q_a->config().rows);
        latent_query = std::max(latent_query, a.heads * a.head_dim);
        latent_value = std::max(latent_value, a.heads * a.value_dim());
      }
      key = std::max(key, a.kv_heads * a.head_dim);
      group = std::max(group, a.heads / a.kv_heads);
      heads = std::max(heads, a.heads);
      head_dim = std::max(head_dim, a.head_dim);
      if (b.mlp.gate) mlp = std::max(mlp, b.mlp.gate->config().rows);
      if (!b.experts) continue;
      experts = std::max(experts, b.routing.num_experts);
      top_k = std::max(top_k, b.routing.top_k);
      routing = std::max(routing, route_scratch(b.routing));
    }
  }
};

}  // namespace

Decoder::Decoder(std::shared_ptr<Workspace> workspace, const IsaTable* isa, DecoderConfig config)
    : workspace_(std::move(workspace)), isa_(isa), config_(std::move(config)) {}

Status Decoder::create(std::shared_ptr<Workspace> workspace, const IsaTable* isa, DecoderConfig config,
                       std::unique_ptr<Decoder>* out) {
  KT_RETURN_IF_ERROR(workspace->pool().usable());
  std::unique_ptr<Decoder> decoder(new Decoder(std::move(workspace), isa, std::move(config)));
  KT_RETURN_IF_ERROR(decoder->check());
  // Weights of experts carry what the residual is scaled with.
  for (BlockConfig& b : decoder->config_.blocks) b.routing.scale *= decoder->config_.residual_scale;
  KT_RETURN_IF_ERROR(decoder->allocate());
  *out = std::move(decoder);
  return Status::ok();
}

size_t Decoder::task_count() const {
  return (config_.blocks.size() * kDecodePhases + 1) * static_cast<size_t>(workspace_->pool().node_count());
}

Status Decoder::allocate() {
  const Pool& pool = workspace_->pool();
  const Largest most(config_);
  const size_t batch = static_cast<size_t>(config_.max_batch), hidden = static_cast<size_t>(config_.hidden);
  mlp_pitch_ = static_cast<size_t>(padded_depth(most.mlp));
  KT_RETURN_IF_ERROR(allocate_arena(pool.node(0).numa_id, &memory_, [&](Arena& a) {
    Buffers& b = buffers_;
    b.x = a.take<uint16_t>(batch * hidden);
    b.q = a.take<uint16_t>(batch * most.query);
    b.k = a.take<uint16_t>(batch * most.key);
    b.v = a.take<uint16_t>(batch * most.key);
    b.mixed = a.take<uint16_t>(batch * most.mixed);
    b.q_a = a.take<uint16_t>(batch * most.q_rank);
    b.values = a.take<uint16_t>(batch * most.latent_value);
    b.queries = a.take<float>(batch * most.latent_query);
    b.gate = a.take<float>(batch * mlp_pitch_);
    b.up = a.take<float>(batch * mlp_pitch_);
    b.router = a.take<float>(batch * most.experts);
    b.scalar = a.take<float>(batch);
    b.ids = a.take<int32_t>(batch * most.top_k);
    b.weights = a.take<float>(batch * most.top_k);
    b.most = a.take<float>(batch * most.heads * kMaxParts);
    b.sum = a.take<float>(batch * most.heads * kMaxParts);
    b.residual_scales = config_.residual_scale == 1 ? nullptr : a.take<float>(batch);
    b.logit_scales = config_.logits_scale == 1 ? nullptr : a.take<float>(batch);
    b.parts = a.take<float>(batch * most.mixed * kMaxParts);  // last: touched only by long contexts
  }));
  if (buffers_.residual_scales) std::fill_n(buffers_.residual_scales, batch, config_.residual_scale);
  if (buffers_.logit_scales) std::fill_n(buffers_.logit_scales, batch, config_.logits_scale);
  node_buffers_.resize(pool.node_count());
  for (int i = 0; i < pool.node_count(); ++i) {
    KT_RETURN_IF_ERROR(allocate_arena(pool.node(i).numa_id, &memory_, [&](Arena& a) {
      node_buffers_[i].normed = a.take<uint16_t>(batch * std::max<size_t>(hidden, most.q_rank));
      node_buffers_[i].mlp = a.take<uint16_t>(batch * mlp_pitch_);
    }));
    for (int t = 0; t < pool.node(i).threads; ++t) {
      ThreadBuffers& thread = thread_buffers_.emplace_back();
      KT_RETURN_IF_ERROR(allocate_arena(pool.node(i).numa_id, &memory_, [&](Arena& a) {
        thread.heads = a.take<float>(static_cast<size_t>(most.group + 1) * most.head_dim);
        thread.mixed = a.take<float>(static_cast<size_t>(most.group) * (most.mixed_dim + 2));
        thread.routing = a.take<float>(most.routing);
      }));
    }
  }
  tasks_ = std::make_unique<TaskCounter[]>(task_count());
  return Status::ok();
}

Status Decoder::check(const DecodeArgs& args) const {
  if (args.count < 0 || args.count > config_.max_batch) {
    return Status::invalid(std::to_string(args.count) + " tokens in one call; this decoder was made for at most " +
                           std::to_string(config_.max_batch));
  }
  if (args.count > 0 && !(args.slots && args.tokens && args.positions && args.logits)) {
    return Status::invalid("an address is 0; slots, tokens, positions and logits may be missing only with 0 tokens");
  }
  const auto outside = [](const char* name, int64_t value, int most, int row) {
    return Status::invalid(std::string(name) + " " + std::to_string(value) + " of row " + std::to_string(row) +
                           " is not in 0.." + std::to_string(most - 1));
  };
  for (int i = 0; i < args.count; ++i) {
    if (args.slots[i] < 0 || args.slots[i] >= config_.slots) return outside("slot", args.slots[i], config_.slots, i);
    if (args.positions[i] < 0 || args.positions[i] >= config_.max_len)
      return outside("position", args.positions[i], config_.max_len, i);
    if (args.tokens[i] < 0 || args.tokens[i] >= config_.vocabulary)
      return outside("token", args.tokens[i], config_.vocabulary, i);
    if (std::find(args.slots, args.slots + i, args.slots[i]) != args.slots + i) {
      return Status::invalid("slot " + std::to_string(args.slots[i]) + " comes twice; a call has one token of each");
    }
  }
  return Status::ok();
}

Status Decoder::decode(const DecodeArgs& args) {
  KT_RETURN_IF_ERROR(check(args));
  KT_RETURN_IF_ERROR(workspace_->pool().usable());
  if (args.count == 0) return Status::ok();
  const std::lock_guard lock(workspace_->mutex());
  DecodeStep step{*this, args};
  return workspace_->pool().run(
      [](void* context, const Worker& worker) { static_cast<DecodeStep*>(context)->work(worker); }, &step);
}

}  // namespace kt
