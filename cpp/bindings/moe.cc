// Pools and MoE layers. In the hot path only integers cross: addresses are the caller's business.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/codes.h"
#include "bindings/packed.h"
#include "bindings/status.h"
#include "kernels/dispatch.h"
#include "moe/layer.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

std::unique_ptr<kt::Pool> make_pool(const std::vector<int>& threads, const std::optional<std::vector<int>>& numa_ids,
                                    const std::optional<std::vector<std::vector<int>>>& cpus, int spin_us) {
  if ((numa_ids && numa_ids->size() != threads.size()) || (cpus && cpus->size() != threads.size())) {
    throw nb::value_error("threads_per_node, numa_ids and cpus must have one entry per node");
  }
  kt::PoolConfig config;
  config.spin_us = spin_us;
  for (size_t i = 0; i < threads.size(); ++i) {
    kt::PoolNode node;
    node.threads = threads[i];
    if (numa_ids) node.numa_id = (*numa_ids)[i];
    if (cpus) node.cpus = (*cpus)[i];
    config.nodes.push_back(node);
  }
  std::unique_ptr<kt::Pool> pool;
  raise(kt::Pool::create(config, &pool));
  return pool;
}

// Unless it is named, a slope tells it, as in kt-kernel 0.4 to 0.7.
kt::ActivationKind activation_of(const std::optional<std::string>& name, float alpha) {
  using Kind = kt::ActivationKind;
  if (!name) return alpha > 0 ? Kind::swiglu_alpha : Kind::silu;
  if (*name == "silu") return Kind::silu;
  if (*name == "swiglu_alpha") return Kind::swiglu_alpha;
  if (*name == "swigluoai") return Kind::swigluoai;
  if (*name == "gelu_tanh") return Kind::gelu_tanh;
  if (*name == "relu2") return Kind::relu2;
  throw nb::value_error(
      ("activation '" + *name + "' is unknown; the activations are: silu, swiglu_alpha, swigluoai, gelu_tanh, relu2")
          .c_str());
}

// A format, or those of gate, up and down with slashes between them.
void parse_formats(const std::string& names, kt::Format (&formats)[3]) {
  std::vector<std::string> parts(1);
  for (const char c : names) {
    if (c == '/') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  if (parts.size() != 1 && parts.size() != 3) {
    throw nb::value_error(("format '" + names + "' must be one format, or three as in 'q4_k/q4_k/q6_k'").c_str());
  }
  for (size_t i = 0; i < 3; ++i) formats[i] = format_of(parts[parts.size() == 3 ? i : 0]);
}

std::unique_ptr<kt::Layer> make_layer(kt::Pool& pool, const std::string& format, int num_experts, int top_k, int hidden,
                                      int intermediate, int max_tokens, const std::optional<std::string>& variant,
                                      float swiglu_limit, float swiglu_alpha,
                                      const std::optional<std::string>& activation, bool biases, int group_size) {
  kt::LayerConfig config{{},
                         num_experts,
                         top_k,
                         hidden,
                         intermediate,
                         max_tokens,
                         {activation_of(activation, swiglu_alpha), swiglu_limit, swiglu_alpha},
                         biases,
                         group_size};
  parse_formats(format, config.formats);
  const kt::IsaTable* isa = kt::active();
  if (variant) raise(kt::select(variant->c_str(), &isa));
  std::unique_ptr<kt::Layer> layer;
  raise(kt::Layer::create(shared_workspace(&pool), isa, config, &layer));
  return layer;
}

void load_expert(kt::Layer& layer, int expert, const std::optional<WeightArray>& gate, const WeightArray& up,
                 const WeightArray& down) {
  const int H = layer.config().hidden, I = layer.config().intermediate;
  if (gate.has_value() != layer.config().activation.gated()) {
    throw nb::value_error(gate ? "experts of this activation have no gates; pass None" : "gate is missing");
  }
  const kt::ExpertWeights weights{gate ? weights_of("gate", *gate, I, H) : nullptr, weights_of("up", up, I, H),
                                  weights_of("down", down, H, I)};
  raise_of([&] { return layer.load_expert(expert, weights); });
}

void load_biases(kt::Layer& layer, int expert, const WeightArray& gate, const WeightArray& up,
                 const WeightArray& down) {
  const int H = layer.config().hidden, I = layer.config().intermediate;
  const kt::ExpertBiases biases{bias_of("gate", gate, I), bias_of("up", up, I), bias_of("down", down, H)};
  raise_of([&] { return layer.load_biases(expert, biases); });
}

void fill_random(kt::Layer& layer, uint64_t seed) {
  raise_of([&] { return layer.fill_random(seed); });
}

nb::tuple decode_expert(const kt::Layer& layer, int expert) {
  const int H = layer.config().hidden, I = layer.config().intermediate;
  float *gate = nullptr, *up, *down;
  nb::object gate_array = nb::none();
  if (layer.config().activation.gated()) gate_array = nb::cast(matrix(I, H, &gate));
  auto up_array = matrix(I, H, &up), down_array = matrix(H, I, &down);
  raise(layer.decode_expert(expert, gate, up, down));
  return nb::make_tuple(gate_array, up_array, down_array);
}

nb::list slice_bytes(const kt::Layer& layer, int ranks, int expert) {
  nb::list all;
  kt::SliceBytes bytes;
  raise(layer.check_slices(expert, ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    raise_of([&] { return layer.slice_bytes(expert, ranks, rank, &bytes); });
    all.append(nb::make_tuple(bytes.w13_weight, bytes.w13_scale, bytes.w2_weight, bytes.w2_scale));
  }
  return all;
}

void forward(kt::Layer& layer, int tokens, uintptr_t ids, uintptr_t weights, uintptr_t input, uintptr_t output,
             bool incremental, uintptr_t addend, int id_bytes, uintptr_t skip) {
  if (incremental && addend) {
    throw nb::value_error("incremental means that the output is the addend; pass one of the two");
  }
  kt::ForwardArgs args{{reinterpret_cast<const void*>(ids), reinterpret_cast<const float*>(weights), tokens,
                        layer.config().top_k, id_bytes},
                       reinterpret_cast<const uint16_t*>(input),
                       reinterpret_cast<uint16_t*>(output),
                       reinterpret_cast<const uint16_t*>(incremental ? output : addend),
                       reinterpret_cast<const uint8_t*>(skip)};
  raise_of([&] { return layer.forward(args); });
}

}  // namespace

void bind_moe(nb::module_& m) {
  nb::class_<kt::Pool>(m, "Pool", "Worker threads, one group per NUMA node.")
      .def(nb::new_(&make_pool), "threads_per_node"_a, "numa_ids"_a = nb::none(), "cpus"_a = nb::none(),
           "spin_us"_a = 500)
      .def_prop_ro("threads", &kt::Pool::total_threads)
      .def_prop_ro("nodes", &kt::Pool::node_count)
      .def_prop_ro("parked_threads", &kt::Pool::parked_threads);

  nb::class_<kt::Layer> layer(m, "MoELayer", "The routed experts of one layer, packed for this CPU.");
  layer
      .def(nb::new_(&make_layer), "pool"_a, nb::kw_only(), "format"_a, "num_experts"_a, "top_k"_a, "hidden_size"_a,
           "intermediate_size"_a, "max_tokens"_a, "variant"_a = nb::none(), "swiglu_limit"_a = 0.0f,
           "swiglu_alpha"_a = 0.0f, "activation"_a = nb::none(), "biases"_a = false, "group_size"_a = 0,
           nb::keep_alive<0, 2>())  // 1 is the class: new_ makes a __new__
      .def("load_expert", &load_expert, "expert"_a, "gate"_a.none(), "up"_a, "down"_a,
           "Packs one expert: bf16 gate and up [I, H], down [H, I]; gate is None where the activation has none.")
      .def("load_biases", &load_biases, "expert"_a, "gate"_a, "up"_a, "down"_a,
           "Of a layer with biases=True: f32 gate and up [I], down [H]. Each of its experts needs weights and biases.")
      .def("fill_random", &fill_random, "seed"_a, "Random weights in every expert, for measurements.")
      .def("decode_expert", &decode_expert, "expert"_a, "The weights as the kernels see them: f32 gate, up, down.")
      .def("forward", &forward, "n_tokens"_a, "ids"_a, "weights"_a, "input"_a, "output"_a, "incremental"_a = false,
           nb::kw_only(), "addend"_a = 0, "id_bytes"_a = 8, "skip"_a = 0,
           "out[t] = addend[t] + sum_j weights[t, j] * FFN_ids[t, j](x[t]), rounded once; addresses of contiguous ids "
           "[T, k] of id_bytes (8: int64, 4: int32), f32 [T, k], bf16 [T, H] in, out and addend; incremental: the "
           "output is the addend. skip: num_experts bytes; experts whose byte is not 0 are left out, as by the mask.")
      .def("slice_bytes", &slice_bytes, "ranks"_a, "expert"_a = 0,
           "For each rank the bytes of w13_weight, w13_scale, w2_weight and w2_scale that WriteSlicesTask writes.")
      .def_prop_ro("packed_bytes_per_expert", &kt::Layer::expert_bytes)
      .def_prop_ro("loaded_experts", &kt::Layer::loaded_experts,
                   "How many experts have weights; a forward that needs another is an error.")
      .def_prop_ro(
          "mask_address", [](kt::Layer& layer) { return reinterpret_cast<uintptr_t>(layer.mask()); },
          "Address of num_experts bytes; an expert whose byte is not 0 is skipped. Read at every forward.");
  bind_codes(m, layer);
  bind_grouped(m, layer);
  bind_gguf(layer);
  bind_packed(layer);
  m.def(
      "has_slices", [](const std::string& format) { return kt::has_slices(format_of(format)); }, "format"_a,
      "Whether layers of this format can write the slices of WriteSlicesTask.");
  m.def("formats", [] {
    std::vector<std::string> names;
    for (int i = 0; i < kt::kFormatCount; ++i) names.push_back(kt::format_name(static_cast<kt::Format>(i)));
    return names;
  });
}
