// What a decoder's config must be like; errors name the block and the part.
#include <cmath>
#include <string>

#include "decoder/decoder.h"

namespace kt {
namespace {

std::string shape(int rows, int columns) { return "[" + std::to_string(rows) + ", " + std::to_string(columns) + "]"; }

struct Checker {
  Workspace* workspace;
  std::string where;

  Status wrong(const std::string& what) const { return Status::invalid(where + what); }

  Status linear(const char* name, const Linear* linear, int rows, int columns) const {
    if (!linear) return wrong(std::string(name) + " is missing");
    const LinearConfig& c = linear->config();
    if (c.rows != rows || c.columns != columns) {
      return wrong(std::string(name) + " is " + shape(c.rows, c.columns) + "; it must be " + shape(rows, columns));
    }
    if (linear->workspace().get() != workspace) return wrong(std::string(name) + " runs on another pool");
    if (const Status status = linear->ready(); !status.is_ok()) return wrong(name + (": " + status.message()));
    return Status::ok();
  }

  Status weights(const char* name, const std::vector<float>& values, int size) const {
    if (values.size() == static_cast<size_t>(size)) return Status::ok();
    return wrong(std::string(name) + " has " + std::to_string(values.size()) + " elements; it must have " +
                 std::to_string(size));
  }

  // They read the same rows, which are quantised once.
  Status same_kind(std::initializer_list<const Linear*> linears) const {
    const Linear* first = nullptr;
    for (const Linear* linear : linears) {
      if (!linear || linear->act() == ActKind::bf16) continue;
      if (first && first->act() != linear->act()) {
        return wrong(std::string("linears of ") + format_name(first->config().format) + " and " +
                     format_name(linear->config().format) + " cannot read the same input; pack both in one format");
      }
      first = linear;
    }
    return Status::ok();
  }

  Status projections(const AttentionConfig& a, int hidden) const {
    const int query = a.heads * a.head_dim, key = a.kv_heads * a.head_dim;
    KT_RETURN_IF_ERROR(linear("q", a.q, query, hidden));
    KT_RETURN_IF_ERROR(linear("k", a.k, key, hidden));
    KT_RETURN_IF_ERROR(linear("v", a.v, key, hidden));
    KT_RETURN_IF_ERROR(same_kind({a.q, a.k, a.v}));
    const auto norm = [&](const char* name, const std::vector<float>& values, int whole) {
      const bool per_head = values.size() == static_cast<size_t>(a.head_dim);
      return values.empty() || per_head ? Status::ok() : weights(name, values, whole);
    };
    KT_RETURN_IF_ERROR(norm("q_norm", a.q_norm, query));
    return norm("k_norm", a.k_norm, key);
  }

  // Matrices of heads, one below the other.
  Status of_heads(const char* name, const Linear* matrix, const AttentionConfig& a, int rows, int columns) const {
    if (rows < kPanelRows || rows % kPanelRows) {
      return wrong(std::string(name) + " has " + std::to_string(rows) +
                   " rows for a head; they must be a multiple of " + std::to_string(kPanelRows));
    }
    KT_RETURN_IF_ERROR(linear(name, matrix, a.heads * rows, columns));
    if (matrix->act() == ActKind::bf16 && !matrix->config().bias) return Status::ok();
    return wrong(std::string(name) + " must be packed in bf16, without a bias");
  }

  Status latent(const AttentionConfig& a, int hidden) const {
    const LatentConfig& l = a.latent;
    if (l.rank < 1 || l.nope < 1 || a.kv_heads != 1 || a.head_dim != l.rank + a.rotary) {
      return wrong("a latent of " + std::to_string(l.rank) + " elements and " + std::to_string(a.rotary) +
                   " that are turned cannot be " + std::to_string(a.kv_heads) + " keys of " +
                   std::to_string(a.head_dim));
    }
    KT_RETURN_IF_ERROR(linear("kv_a", l.kv_a, a.head_dim, hidden));
    KT_RETURN_IF_ERROR(weights("kv_norm", l.kv_norm, l.rank));
    const int q_rank = l.q_a ? l.q_a->config().rows : hidden;
    if (l.q_a) {
      KT_RETURN_IF_ERROR(linear("q_a", l.q_a, q_rank, hidden));
      KT_RETURN_IF_ERROR(weights("q_norm", l.q_norm, q_rank));
    }
    KT_RETURN_IF_ERROR(linear("q", a.q, a.heads * a.query_dim(), q_rank));
    KT_RETURN_IF_ERROR(same_kind({l.q_a ? l.q_a : a.q, l.kv_a}));
    KT_RETURN_IF_ERROR(of_heads("k_up", l.k_up, a, l.rank, l.nope));
    KT_RETURN_IF_ERROR(of_heads("v_up", l.v_up, a, l.value_dim, l.rank));
    return l.eps > 0 ? Status::ok() : wrong("eps of its latents must be above 0");
  }

  Status attention(const AttentionConfig& a, int hidden, int max_len) const {
    if (a.heads < 1 || a.kv_heads < 1 || a.heads % a.kv_heads) {
      return wrong(std::to_string(a.heads) + " heads cannot share " + std::to_string(a.kv_heads) + " key heads");
    }
    if (a.head_dim < 16 || a.head_dim % 16) {
      return wrong("head_dim is " + std::to_string(a.head_dim) + "; it must be a multiple of 16");
    }
    KT_RETURN_IF_ERROR(a.is_latent() ? latent(a, hidden) : projections(a, hidden));
    KT_RETURN_IF_ERROR(linear("o", a.o, hidden, a.heads * a.value_dim()));
    if (!a.sinks.empty()) KT_RETURN_IF_ERROR(weights("sinks", a.sinks, a.heads));
    if (a.rotary < 0 || a.rotary % 2 || a.rotary > a.head_dim) {
      return wrong("rotary is " + std::to_string(a.rotary) + "; it must be even and at most head_dim, " +
                   std::to_string(a.head_dim));
    }
    if (!a.keys || !(a.values || a.is_latent()) || (a.rotary && !(a.cos && a.sin)))
      return wrong("an address of its attention is 0");
    if (!std::isfinite(a.scale) || !(a.softcap >= 0) || a.window < 0) {
      return wrong("scale, softcap or window of its attention is out of range");
    }
    const size_t row = static_cast<size_t>(a.head_dim), head = a.position_pitch * max_len;
    if (a.position_pitch < row || a.head_pitch < head || a.slot_pitch < a.kv_heads * head) {
      return wrong("the pitches of its keys do not hold [slots, kv_heads, max_len, head_dim]");
    }
    return Status::ok();
  }

  Status mlp(const MlpConfig& m, int hidden) const {
    if (!m.gate || !m.up || !m.down) return wrong("gate, up and down of its MLP must be there together");
    const int rows = m.gate->config().rows;
    KT_RETURN_IF_ERROR(linear("gate", m.gate, rows, hidden));
    KT_RETURN_IF_ERROR(linear("up", m.up, rows, hidden));
    KT_RETURN_IF_ERROR(linear("down", m.down, hidden, rows));
    if (m.scalar) KT_RETURN_IF_ERROR(linear("scalar", m.scalar, 1, hidden));
    return same_kind({m.gate, m.up, m.scalar});
  }

  Status experts(const BlockConfig& b, int hidden, int max_batch) const {
    const LayerConfig& c = b.experts->config();
    const RouterConfig& r = b.routing;
    if (&b.experts->pool() != &workspace->pool()) return wrong("experts run on another pool");
    KT_RETURN_IF_ERROR(linear("router", b.router, r.num_experts, hidden));
    if (b.router->act() != ActKind::bf16) return wrong("its router must be packed in bf16");
    if (c.num_experts != r.num_experts || c.top_k != r.top_k || c.hidden != hidden) {
      return wrong("its experts are " + std::to_string(c.num_experts) + ", " + std::to_string(c.top_k) +
                   " a token, of hidden size " + std::to_string(c.hidden) + "; its router chooses " +
                   std::to_string(r.top_k) + " of " + std::to_string(r.num_experts));
    }
    if (r.top_k > r.num_experts) return wrong("top_k is above the number of experts");
    if (c.max_tokens < max_batch) return wrong("experts were made for " + std::to_string(c.max_tokens) + " tokens");
    if (b.experts->loaded_experts() != c.num_experts) return wrong("some experts have no weights");
    if (r.groups < 1 || r.num_experts % r.groups || r.top_groups < 1 || r.top_groups > r.groups) {
      return wrong("its experts cannot be in " + std::to_string(r.groups) + " groups");
    }
    if (r.group_best < 1 || r.group_best > (r.kind == RouterKind::softmax && r.groups > 1 ? 1 : 2)) {
      return wrong("group_best is " + std::to_string(r.group_best) + "; it must be 1, or 2 of a sigmoid router");
    }
    return r.correction.empty() ? Status::ok() : weights("correction", r.correction, r.num_experts);
  }
};

}  // namespace

Status Decoder::check() const {
  const DecoderConfig& c = config_;
  Checker checker{workspace_.get(), ""};
  const auto positive = [&](const char* name, int value) {
    return value > 0 ? Status::ok() : checker.wrong(std::string(name) + " is " + std::to_string(value));
  };
  KT_RETURN_IF_ERROR(positive("hidden", c.hidden));
  KT_RETURN_IF_ERROR(positive("vocabulary", c.vocabulary));
  KT_RETURN_IF_ERROR(positive("slots", c.slots));
  KT_RETURN_IF_ERROR(positive("max_len", c.max_len));
  KT_RETURN_IF_ERROR(positive("max_batch", c.max_batch));
  if (c.max_batch > Linear::kChunkRows) {
    return checker.wrong("max_batch is " + std::to_string(c.max_batch) + "; it can be at most " +
                         std::to_string(Linear::kChunkRows));
  }
  if (!c.embedding) return checker.wrong("the address of the embedding is 0");
  if (!(c.eps > 0)) return checker.wrong("eps must be above 0");
  KT_RETURN_IF_ERROR(checker.linear("head", c.head, c.vocabulary, c.hidden));
  KT_RETURN_IF_ERROR(checker.weights("final_norm", c.final_norm, c.hidden));
  for (size_t i = 0; i < c.blocks.size(); ++i) {
    const BlockConfig& b = c.blocks[i];
    checker.where = "block " + std::to_string(i) + ": ";
    KT_RETURN_IF_ERROR(checker.weights("attention_norm", b.attention_norm, c.hidden));
    KT_RETURN_IF_ERROR(checker.weights("ffn_norm", b.ffn_norm, c.hidden));
    KT_RETURN_IF_ERROR(checker.attention(b.attention, c.hidden, c.max_len));
    if (b.mlp.gate || !b.experts) KT_RETURN_IF_ERROR(checker.mlp(b.mlp, c.hidden));
    if (b.experts) KT_RETURN_IF_ERROR(checker.experts(b, c.hidden, c.max_batch));
  }
  return Status::ok();
}

}  // namespace kt
