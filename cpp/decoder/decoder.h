// A transformer that decodes: one call takes one token of each live request through all layers.
//
//   x = embedding[token] * embedding_scale
//   for each layer:   x += residual_scale * attention(norm(x));   x += residual_scale * ffn(norm(x))
//   logits = logits_scale * head(norm(x))
//
// ffn is an MLP, experts, or experts beside a shared MLP. The residual x and what is between products is bf16, as in
// transformers; inside a step everything is f32. A row's logits depend neither on the other rows nor on the number of
// threads, to the bit, as far as the products do not (see dense/linear.h).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "decoder/router.h"
#include "dense/linear.h"
#include "moe/forward.h"
#include "moe/layer.h"

namespace kt {

// Multi-head latent attention: what is kept of a token is one latent c of `rank` elements, whose keys and values of
// each head would be K_h c and V_h c, and one turned key r that all heads share. Neither K_h c nor V_h c is ever made:
//
//   c = norm(kv_a x),  r = turn(the rest of kv_a x),  q_h = q norm(q_a x), or q x:  [nope | rotary] elements
//   score_h(j) = scale * (K_h^T q_h . c_j + turn(q_h) . r_j),   out_h = V_h sum_j softmax_j(score_h) c_j
//
// which is attention of all heads over one key [c | r] whose value is c.
struct LatentConfig {
  const Linear* q_a = nullptr;   // [q_rank, hidden]; null: q reads the normed input
  const Linear* kv_a = nullptr;  // [rank + rotary, hidden]; null: this is not the block's attention
  const Linear* k_up = nullptr;  // [heads * rank, nope], bf16: K_h^T of all heads
  const Linear* v_up = nullptr;  // [heads * value_dim, rank], bf16: V_h
  int rank = 0, nope = 0, value_dim = 0;
  std::vector<float> q_norm, kv_norm;  // [q_rank], [rank]
  float eps = 0;                       // of both
};

// q, k and v of the normed input; q and k normed and turned; softmax over the slot's keys; o.
struct AttentionConfig {
  const Linear* q = nullptr;
  const Linear* k = nullptr;  // k and v: null with latents
  const Linear* v = nullptr;
  const Linear* o = nullptr;
  int heads = 0, kv_heads = 0, head_dim = 0;  // with latents 1 key head, of rank + rotary elements
  LatentConfig latent;
  // RMS norms of q and k: [head_dim], of each head, or [heads * head_dim], of whole rows; empty: none.
  std::vector<float> q_norm, k_norm;
  std::vector<float> sinks;  // [heads]: logits of a key without value; empty: none
  float scale = 0;
  float softcap = 0;  // 0: none
  int window = 0;     // keys that a token sees, itself included; 0: all
  // f32 [max_len][rotary / 2]; read at the positions of a call.
  const float* cos = nullptr;
  const float* sin = nullptr;
  int rotary = 0;
  RotaryPairs pairs = RotaryPairs::halves;
  // bf16 [slots][kv_heads][max_len][head_dim], pitches in elements. Values of latents are the keys.
  uint16_t* keys = nullptr;
  uint16_t* values = nullptr;
  size_t slot_pitch = 0, head_pitch = 0, position_pitch = 0;

  bool is_latent() const { return latent.kv_a != nullptr; }
  // Elements of a query, of what its head sums up, and of what o reads of its head.
  int query_dim() const { return is_latent() ? latent.nope + rotary : head_dim; }
  int mixed_dim() const { return is_latent() ? latent.rank : head_dim; }
  int value_dim() const { return is_latent() ? latent.value_dim : head_dim; }
};

// down(silu(gate x) * up x), times sigmoid(scalar x) where there is a scalar.
struct MlpConfig {
  const Linear* gate = nullptr;
  const Linear* up = nullptr;
  const Linear* down = nullptr;
  const Linear* scalar = nullptr;  // one row
};

struct BlockConfig {
  std::vector<float> attention_norm, ffn_norm;  // [hidden]
  AttentionConfig attention;
  MlpConfig mlp;                   // all null: none
  const Linear* router = nullptr;  // with experts
  RouterConfig routing;
  Layer* experts = nullptr;
};

struct DecoderConfig {
  int hidden = 0, vocabulary = 0;
  int slots = 0, max_len = 0, max_batch = 0;
  float eps = 0;
  float embedding_scale = 1, residual_scale = 1, logits_scale = 1;
  const uint16_t* embedding = nullptr;  // bf16 [vocabulary][hidden]
  std::vector<float> final_norm;
  const Linear* head = nullptr;
  std::vector<BlockConfig> blocks;
};

// One token for each of `count` requests. The token's keys and values are written at its position of its slot; those
// before it are read. No slot may come twice.
struct DecodeArgs {
  int count = 0;
  const int64_t* slots = nullptr;
  const int64_t* tokens = nullptr;
  const int64_t* positions = nullptr;
  float* logits = nullptr;  // [count][vocabulary]
};

class Decoder {
 public:
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  // What the config points to must outlive the decoder; all of it must run on the pool of this workspace.
  static Status create(std::shared_ptr<Workspace> workspace, const IsaTable* isa, DecoderConfig config,
                       std::unique_ptr<Decoder>* out);

  // Allocates nothing. Waits for others who use the workspace.
  Status decode(const DecodeArgs& args);

  const DecoderConfig& config() const { return config_; }

 private:
  friend struct DecodeStep;

  // Where things lie in memory_; sizes are those of the largest batch and block.
  struct Buffers {
    uint16_t *x, *q, *k, *v, *mixed;        // [batch][hidden], [batch][heads * query_dim], ...
    uint16_t *q_a, *values;                 // [batch][q_rank], [batch][heads * value_dim] of latents
    float* queries;                         // [batch][heads][rank + rotary] of latents
    float *gate, *up;                       // [batch][mlp_pitch]
    float *router, *scalar;                 // [batch][experts], [batch]
    int32_t* ids;                           // [batch][top_k]
    float* weights;                         // [batch][top_k]
    float *parts, *most, *sum;              // [batch][kv_heads][kMaxParts][query heads], parts with mixed_dim each
    float *residual_scales, *logit_scales;  // [batch]; null: 1
  };
  // What a node's workers write for themselves, so that nobody waits for another node.
  struct NodeBuffers {
    uint16_t* normed;  // [batch][hidden], or [batch][q_rank]
    uint16_t* mlp;     // [batch][mlp_pitch]
  };
  struct ThreadBuffers {
    float* heads;    // [query heads of a key head + 1][head_dim]: turned
    float* mixed;    // [query heads of a key head][mixed_dim], sums and largest scores behind
    float* routing;  // of route()
  };

  Decoder(std::shared_ptr<Workspace> workspace, const IsaTable* isa, DecoderConfig config);
  Status check() const;
  Status check(const DecodeArgs& args) const;
  Status allocate();
  // Of tasks_: those of the blocks, then those of the head, of each node.
  size_t task_count() const;
  TaskCounter& head_tasks(int node) { return tasks_[task_count() - node_buffers_.size() + node]; }

  std::shared_ptr<Workspace> workspace_;
  const IsaTable* isa_;
  DecoderConfig config_;
  size_t mlp_pitch_ = 0;
  Buffers buffers_{};
  std::vector<NodeBuffers> node_buffers_;
  std::vector<ThreadBuffers> thread_buffers_;
  std::vector<NumaBuffer> memory_;
  std::unique_ptr<TaskCounter[]> tasks_;  // reset at each call
  PlannedForward experts_;
};

}  // namespace kt
