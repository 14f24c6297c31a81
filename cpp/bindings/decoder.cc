// Decoders: a spec is filled block by block and built. It keeps the linears and experts that it names; what is given by
// address, tables and caches, is the caller's business.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/status.h"
#include "decoder/decoder.h"
#include "kernels/dispatch.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Floats = std::optional<WeightArray>;

std::vector<float> floats_of(const char* name, const Floats& array) {
  if (!array) return {};
  if (array->ndim() != 1) throw nb::value_error((std::string(name) + " must have one dimension").c_str());
  const int size = static_cast<int>(array->shape(0));
  const float* data = bias_of(name, *array, size);
  return {data, data + size};
}

kt::BlockConfig& last_block(kt::DecoderConfig& spec) {
  if (spec.blocks.empty()) throw nb::value_error("there is no block yet; add_block comes first");
  return spec.blocks.back();
}

kt::DecoderConfig make_spec(int hidden, int vocabulary, int slots, int max_len, int max_batch, float eps,
                            uintptr_t embedding, const Floats& final_norm, const kt::Linear* head,
                            float embedding_scale, float residual_scale, float logits_scale) {
  kt::DecoderConfig c;
  c.hidden = hidden;
  c.vocabulary = vocabulary;
  c.slots = slots;
  c.max_len = max_len;
  c.max_batch = max_batch;
  c.eps = eps;
  c.embedding = reinterpret_cast<const uint16_t*>(embedding);
  c.final_norm = floats_of("final_norm", final_norm);
  c.head = head;
  c.embedding_scale = embedding_scale;
  c.residual_scale = residual_scale;
  c.logits_scale = logits_scale;
  return c;
}

void add_block(kt::DecoderConfig& spec, const Floats& attention_norm, const Floats& ffn_norm) {
  kt::BlockConfig b;
  b.attention_norm = floats_of("attention_norm", attention_norm);
  b.ffn_norm = floats_of("ffn_norm", ffn_norm);
  spec.blocks.push_back(std::move(b));
}

kt::RotaryPairs pairs_of(const std::string& name) {
  if (name == "halves") return kt::RotaryPairs::halves;
  if (name == "neighbours") return kt::RotaryPairs::neighbours;
  if (name == "gathered") return kt::RotaryPairs::gathered;
  throw nb::value_error(("pairs '" + name + "' are unknown; they are: halves, neighbours, gathered").c_str());
}

void set_attention(kt::DecoderConfig& spec, const kt::Linear* q, const kt::Linear* k, const kt::Linear* v,
                   const kt::Linear* o, int heads, int kv_heads, int head_dim, const Floats& q_norm,
                   const Floats& k_norm, const Floats& sinks, float scale, float softcap, int window, int rotary,
                   const std::string& pairs) {
  kt::AttentionConfig& a = last_block(spec).attention;
  a.q = q;
  a.k = k;
  a.v = v;
  a.o = o;
  a.heads = heads;
  a.kv_heads = kv_heads;
  a.head_dim = head_dim;
  a.q_norm = floats_of("q_norm", q_norm);
  a.k_norm = floats_of("k_norm", k_norm);
  a.sinks = floats_of("sinks", sinks);
  a.scale = scale;
  a.softcap = softcap;
  a.window = window;
  a.rotary = rotary;
  a.pairs = pairs_of(pairs);
}

void set_latent_attention(kt::DecoderConfig& spec, const kt::Linear* q_a, const kt::Linear* q, const kt::Linear* kv_a,
                          const kt::Linear* k_up, const kt::Linear* v_up, const kt::Linear* o, int heads, int rank,
                          int nope, int value_dim, const Floats& q_norm, const Floats& kv_norm, float eps, float scale,
                          int rotary, const std::string& pairs) {
  kt::AttentionConfig& a = last_block(spec).attention;
  a.q = q;
  a.o = o;
  a.heads = heads;
  a.kv_heads = 1;
  a.head_dim = rank + rotary;
  a.latent = {q_a, kv_a, k_up, v_up, rank, nope, value_dim, floats_of("q_norm", q_norm), floats_of("kv_norm", kv_norm),
              eps};
  a.scale = scale;
  a.rotary = rotary;
  a.pairs = pairs_of(pairs);
}

void set_memory(kt::DecoderConfig& spec, uintptr_t cos, uintptr_t sin, uintptr_t keys, uintptr_t values,
                size_t slot_pitch, size_t head_pitch, size_t position_pitch) {
  kt::AttentionConfig& a = last_block(spec).attention;
  a.cos = reinterpret_cast<const float*>(cos);
  a.sin = reinterpret_cast<const float*>(sin);
  a.keys = reinterpret_cast<uint16_t*>(keys);
  a.values = reinterpret_cast<uint16_t*>(values);
  a.slot_pitch = slot_pitch;
  a.head_pitch = head_pitch;
  a.position_pitch = position_pitch;
}

void set_mlp(kt::DecoderConfig& spec, const kt::Linear* gate, const kt::Linear* up, const kt::Linear* down,
             const kt::Linear* scalar) {
  last_block(spec).mlp = {gate, up, down, scalar};
}

void set_experts(kt::DecoderConfig& spec, kt::Layer* experts, const kt::Linear* router, const std::string& kind,
                 bool renormalise, float scale, int groups, int top_groups, int group_best, const Floats& correction) {
  if (kind != "softmax" && kind != "sigmoid") {
    throw nb::value_error(("router kind '" + kind + "' is unknown; the kinds are: softmax, sigmoid").c_str());
  }
  kt::BlockConfig& b = last_block(spec);
  b.experts = experts;
  b.router = router;
  kt::RouterConfig& r = b.routing;
  r.kind = kind == "sigmoid" ? kt::RouterKind::sigmoid : kt::RouterKind::softmax;
  r.num_experts = experts->config().num_experts;
  r.top_k = experts->config().top_k;
  r.renormalise = renormalise;
  r.scale = scale;
  r.groups = groups;
  r.top_groups = top_groups;
  r.group_best = group_best;
  r.correction = floats_of("correction", correction);
}

std::unique_ptr<kt::Decoder> make_decoder(kt::Pool& pool, const kt::DecoderConfig& spec,
                                          const std::optional<std::string>& variant) {
  const kt::IsaTable* isa = kt::active();
  if (variant) raise(kt::select(variant->c_str(), &isa));
  std::unique_ptr<kt::Decoder> decoder;
  raise(kt::Decoder::create(shared_workspace(&pool), isa, spec, &decoder));
  return decoder;
}

void decode(kt::Decoder& decoder, int count, uintptr_t slots, uintptr_t tokens, uintptr_t positions, uintptr_t logits) {
  const kt::DecodeArgs args{count, reinterpret_cast<const int64_t*>(slots), reinterpret_cast<const int64_t*>(tokens),
                            reinterpret_cast<const int64_t*>(positions), reinterpret_cast<float*>(logits)};
  raise_of([&] { return decoder.decode(args); });
}

}  // namespace

void bind_decoder(nb::module_& m) {
  nb::class_<kt::DecoderConfig>(m, "DecoderSpec", "What a Decoder is made of, block by block.")
      .def(nb::new_(&make_spec), nb::kw_only(), "hidden"_a, "vocabulary"_a, "slots"_a, "max_len"_a, "max_batch"_a,
           "eps"_a, "embedding"_a, "final_norm"_a, "head"_a, "embedding_scale"_a = 1.0f, "residual_scale"_a = 1.0f,
           "logits_scale"_a = 1.0f, nb::keep_alive<0, 10>(),
           "embedding: address of bf16 [vocabulary, hidden]. Keys and values have `slots` slots of max_len.")
      .def("add_block", &add_block, nb::kw_only(), "attention_norm"_a, "ffn_norm"_a,
           "The next block; the other calls fill it. Norms are f32 [hidden].")
      .def("set_attention", &set_attention, nb::kw_only(), "q"_a, "k"_a, "v"_a, "o"_a, "heads"_a, "kv_heads"_a,
           "head_dim"_a, "q_norm"_a = nb::none(), "k_norm"_a = nb::none(), "sinks"_a = nb::none(), "scale"_a,
           "softcap"_a = 0.0f, "window"_a = 0, "rotary"_a, "pairs"_a = "halves", nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(),
           "q_norm and k_norm: f32 [head_dim], or of the whole row. window: keys that a token sees, 0 = all. pairs: "
           "what is turned together, halves, neighbours, or neighbours that are gathered into halves.")
      .def("set_latent_attention", &set_latent_attention, nb::kw_only(), "q_a"_a.none() = nb::none(), "q"_a, "kv_a"_a,
           "k_up"_a, "v_up"_a, "o"_a, "heads"_a, "rank"_a, "nope"_a, "value_dim"_a, "q_norm"_a = nb::none(),
           "kv_norm"_a, "eps"_a, "scale"_a, "rotary"_a, "pairs"_a = "halves", nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(),
           nb::keep_alive<1, 7>(),
           "Instead of set_attention: one latent of `rank` elements and `rotary` turned ones are kept of a token. "
           "k_up [heads * rank, nope] and v_up [heads * value_dim, rank], in bf16, hold the matrices of all heads.")
      .def("set_memory", &set_memory, nb::kw_only(), "cos"_a, "sin"_a, "keys"_a, "values"_a, "slot_pitch"_a,
           "head_pitch"_a, "position_pitch"_a,
           "Addresses of f32 [max_len, rotary / 2] and bf16 [slots, kv_heads, max_len, head_dim]; pitches in elements. "
           "Latents are keys [slots, 1, max_len, rank + rotary] without values, 0.")
      .def("set_mlp", &set_mlp, nb::kw_only(), "gate"_a, "up"_a, "down"_a, "scalar"_a.none() = nb::none(),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(),
           "The MLP of the block, or what is beside its experts; scalar: its output is times sigmoid(scalar x).")
      .def("set_experts", &set_experts, nb::kw_only(), "experts"_a, "router"_a, "kind"_a, "renormalise"_a,
           "scale"_a = 1.0f, "groups"_a = 1, "top_groups"_a = 1, "group_best"_a = 2, "correction"_a = nb::none(),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
           "kind: softmax or sigmoid. group_best: a group is as good as so many of its experts, 1 or 2.");

  nb::class_<kt::Decoder>(m, "Decoder", "All layers of a model for one token of each live request, in one call.")
      .def(nb::new_(&make_decoder), "pool"_a, "spec"_a, "variant"_a = nb::none(), nb::keep_alive<0, 2>(),
           nb::keep_alive<0, 3>())
      .def("decode", &decode, "count"_a, "slots"_a, "tokens"_a, "positions"_a, "logits"_a,
           "Addresses of int64 [count] each and of f32 [count, vocabulary]. Writes keys and values of the tokens at "
           "their positions, and logits. A row's logits do not depend on the other rows.");
}
