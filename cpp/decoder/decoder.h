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

// q, k and v of the normed input; q and k normed and turned; softmax over the slot's keys; o.
struct AttentionConfig {
  const Linear* q = nullptr;
  const Linear* k = nullptr;
  const Linear* v = nullptr;
  const Linear* o = nullptr;
  int heads = 0, kv_heads = 0, head_dim = 0;
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
  bool interleaved = false;
  // bf16 [slots][kv_heads][max_len][head_dim], pitches in elements.
  uint16_t* keys = nullptr;
  uint16_t* values = nullptr;
  size_t slot_pitch = 0, head_pitch = 0, position_pitch = 0;
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
    uint16_t *x, *q, *k, *v, *mixed;        // [batch][hidden], [batch][heads * head_dim], ...
    float *gate, *up;                       // [batch][mlp_pitch]
    float *router, *scalar;                 // [batch][experts], [batch]
    int32_t* ids;                           // [batch][top_k]
    float* weights;                         // [batch][top_k]
    float *parts, *most, *sum;              // [batch][kv_heads][kMaxParts][query heads], parts with head_dim each
    float *residual_scales, *logit_scales;  // [batch]; null: 1
  };
  // What a node's workers write for themselves, so that nobody waits for another node.
  struct NodeBuffers {
    uint16_t* normed;  // [batch][hidden]
    uint16_t* mlp;     // [batch][mlp_pitch]
  };
  struct ThreadBuffers {
    float* heads;    // [query heads of a key head + 1][head_dim]: turned
    float* mixed;    // [query heads of a key head][head_dim], sums and largest scores behind
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
