// One step of a decoder, in one job of the pool.
#pragma once

#include "decoder/decoder.h"

namespace kt {

// Products, and attention, whose tasks are counted; of each block and node.
enum DecodePhase : int {
  kQ,
  kK,  // with latents, kv_a
  kV,
  kQA,
  kKUp,
  kAttend,
  kMerge,
  kVUp,
  kO,
  kRouter,
  kScalar,
  kMlpGate,
  kMlpUp,
  kMlpDown,
  kDecodePhases,
};

// Attention over more keys than kSplitKeys is cut into parts of equal length, at most kMaxParts, which are computed
// side by side and merged in order. Where it is cut depends on the number of keys alone. 128 keys take 8 heads of 128
// elements 11 us (one core of Zen 4), many times what handing out a task takes.
constexpr int kSplitKeys = 128;
constexpr int kMaxParts = 32;

// Heads that share a latent are handed out in blocks of a multiple of so many, which read a key together.
constexpr int kLeastHeads = 4;

// The keys that a token at `position` sees: parts of `length`, from `begin`.
struct KeySpan {
  int begin, count, length, parts;

  static KeySpan of(int window, int position) {
    KeySpan s;
    s.begin = window > 0 && position >= window ? position + 1 - window : 0;
    s.count = position + 1 - s.begin;
    s.length = round_up(div_up(s.count, kMaxParts), kSplitKeys);
    s.parts = div_up(s.count, s.length);
    return s;
  }
};

struct DecodeStep {
  Decoder& decoder;
  const DecodeArgs& args;

  // By every worker.
  void work(const Worker& worker);

 private:
  const DecoderConfig& config() const { return decoder.config_; }
  const IsaTable& isa() const { return *decoder.isa_; }
  Decoder::Buffers& buffers() const { return decoder.buffers_; }
  size_t hidden() const { return static_cast<size_t>(config().hidden); }
  TaskCounter& tasks(int block, DecodePhase phase, int node) const {
    const int nodes = static_cast<int>(decoder.node_buffers_.size());
    return decoder.tasks_[(static_cast<size_t>(block) * kDecodePhases + phase) * nodes + node];
  }

  void begin(const Worker& worker);
  void attention(const Worker& worker, int block);
  void mlp(const Worker& worker, int block);
  void experts(const Worker& worker, int block);
  void head(const Worker& worker);

  // Rows of x that are normed, one behind the other.
  struct NormArgs {
    const uint16_t* x;
    int columns;
    const std::vector<float>& weight;
    float eps;
  };
  NormArgs residual(const std::vector<float>& weight) const {
    return {buffers().x, config().hidden, weight, config().eps};
  }
  void norm(const Worker& worker, const NormArgs& rows, std::initializer_list<const Linear*> readers);
  LinearArgs reads_normed(const Worker& worker, int columns) const;
  void to_bf16(const Worker& worker, const Linear* linear, uint16_t* out, int block, DecodePhase phase) const;
  void to_f32(const Worker& worker, const Linear* linear, float* out, size_t pitch, int block, DecodePhase phase) const;
  void activate(const Worker& worker, const MlpConfig& config);
  LinearArgs reads_activated(const Worker& worker, const MlpConfig& config) const;
  void route_rows(const Worker& worker, const BlockConfig& block);

  void project(const Worker& worker, int block);
  bool is_split(const AttentionConfig& a) const;
  void attend_tasks(const Worker& worker, int block);
  void attend_part(const Worker& worker, const AttentionConfig& a, int row, int kv_head, int part);
  void turn_queries(const AttentionConfig& a, int row, int kv_head, float* out) const;
  void append(const AttentionConfig& a, int row, int kv_head, float* scratch) const;
  void merge_tasks(const Worker& worker, int block);
  void finish_head(const AttentionConfig& a, int row, int head, const float* mixed, float most, float sum) const;
  size_t part_at(const AttentionConfig& a, int row, int kv_head, int part) const;

  void project_latents(const Worker& worker, int block);
  void turn_latent_query(const AttentionConfig& a, int row, int head) const;
  void append_latent(const Worker& worker, const AttentionConfig& a, int row) const;
  int heads_together(const Worker& worker, const AttentionConfig& a) const;
  void attend_latents(const Worker& worker, const AttentionConfig& a, int row, int head, int count, int part);
  void expand_values(const Worker& worker, int block);
};

}  // namespace kt
