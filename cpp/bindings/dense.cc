// Linears: one packed matrix each. In the hot path only integers cross: addresses are the caller's business.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <memory>
#include <optional>
#include <string>

#include "bindings/arrays.h"
#include "bindings/codes.h"
#include "bindings/status.h"
#include "dense/linear.h"
#include "kernels/dispatch.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

std::unique_ptr<kt::Linear> make_linear(kt::Pool& pool, const std::string& format, int rows, int columns, bool bias,
                                        const std::optional<std::string>& variant) {
  const kt::IsaTable* isa = kt::active();
  if (variant) raise(kt::select(variant->c_str(), &isa));
  std::unique_ptr<kt::Linear> linear;
  raise(kt::Linear::create(shared_workspace(&pool), isa, {format_of(format), rows, columns, bias}, &linear));
  return linear;
}

void load(kt::Linear& linear, const WeightArray& weights) {
  const uint16_t* data = weights_of("weights", weights, linear.config().rows, linear.config().columns);
  raise_of([&] { return linear.load(data); });
}

void load_bias(kt::Linear& linear, const WeightArray& bias) {
  const float* data = bias_of("a linear", bias, linear.config().rows);
  raise_of([&] { return linear.load_bias(data); });
}

nb::ndarray<nb::numpy, float> decode(const kt::Linear& linear) {
  float* data;
  auto array = matrix(linear.config().rows, linear.config().columns, &data);
  linear.decode(data);
  return array;
}

void forward(kt::Linear& linear, int count, uintptr_t input, size_t input_pitch, uintptr_t output, size_t output_pitch,
             bool f32, uintptr_t addend, size_t addend_pitch, uintptr_t row_scales, int groups, size_t input_step,
             size_t output_step) {
  kt::LinearArgs args;
  args.count = count;
  args.input = reinterpret_cast<const uint16_t*>(input);
  args.input_pitch = input_pitch;
  if (f32) {
    args.f32 = reinterpret_cast<float*>(output);
  } else {
    args.bf16 = reinterpret_cast<uint16_t*>(output);
  }
  args.output_pitch = output_pitch;
  args.addend = reinterpret_cast<const uint16_t*>(addend);
  args.addend_pitch = addend_pitch;
  args.row_scales = reinterpret_cast<const float*>(row_scales);
  args.groups = groups;
  args.input_step = input_step;
  args.output_step = output_step;
  raise_of([&] { return linear.forward(args); });
}

}  // namespace

void bind_dense(nb::module_& m) {
  nb::class_<kt::Linear>(m, "Linear", "One matrix [rows, columns], packed for this CPU.")
      .def(nb::new_(&make_linear), "pool"_a, nb::kw_only(), "format"_a, "rows"_a, "columns"_a, "bias"_a = false,
           "variant"_a = nb::none(), nb::keep_alive<0, 2>())  // 1 is the class: new_ makes a __new__
      .def("load", &load, "weights"_a, "Packs bf16 [rows, columns].")
      .def("load_bias", &load_bias, "bias"_a, "Of a linear with bias=True: f32 [rows].")
      .def("decode", &decode, "The weights as the kernels see them, f32 [rows, columns].")
      .def("forward", &forward, "count"_a, "input"_a, "input_pitch"_a, "output"_a, "output_pitch"_a, "f32"_a = false,
           nb::kw_only(), "addend"_a = 0, "addend_pitch"_a = 0, "row_scales"_a = 0, "groups"_a = 1, "input_step"_a = 0,
           "output_step"_a = 0,
           "out[t] = row_scales[t] * (W x[t] + bias) + addend[t], rounded once; addresses of bf16 rows, of f32 or bf16 "
           "output rows and of f32 row_scales [count], pitches in elements. Of up to 32 rows each gets the bits that "
           "it would get alone. With groups, rows of W are so many blocks of a multiple of 16 rows, in bf16: block g "
           "reads and writes g steps behind the first.")
      .def_prop_ro("rows", [](const kt::Linear& linear) { return linear.config().rows; })
      .def_prop_ro("columns", [](const kt::Linear& linear) { return linear.config().columns; })
      .def_prop_ro("bias", [](const kt::Linear& linear) { return linear.config().bias; })
      .def_prop_ro("format", [](const kt::Linear& linear) { return kt::format_name(linear.config().format); })
      .def_prop_ro("packed_bytes", &kt::Linear::packed_bytes);
}
