// Weights that are or become codes: what files hold.
#include "bindings/codes.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <climits>
#include <memory>
#include <optional>
#include <vector>

#include "bindings/status.h"
#include "formats/codes.h"
#include "formats/int4g.h"
#include "kernels/dispatch.h"
#include "moe/quantise.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Array = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Part = std::vector<Array>;  // codes, scales and, for int4g, steps
using dtype_code = nb::dlpack::dtype_code;

bool holds(const Array& array, dtype_code code, int bits) {
  return array.dtype().code == static_cast<uint8_t>(code) && array.dtype().bits == bits;
}

std::string shape_of(const Array& array) {
  std::string shape;
  for (size_t i = 0; i < array.ndim(); ++i) shape += (i ? ", " : "") + std::to_string(array.shape(i));
  return "[" + shape + "]";
}

void check(const std::string& name, const Array& array, dtype_code code, int bits, const char* type, size_t elements,
           const std::string& shape) {
  if (!holds(array, code, bits)) throw nb::type_error((name + " must hold " + type).c_str());
  if (array.size() != elements) {
    throw nb::value_error((name + " has shape " + shape_of(array) + "; this layer needs " + shape).c_str());
  }
}

std::string dimensions(size_t rows, size_t columns) {
  return "[" + std::to_string(rows) + ", " + std::to_string(columns) + "]";
}

// Rows and columns of each part.
std::vector<kt::CodedPart> parts_of(const std::string& name, const std::vector<Part>& arrays, kt::Format format,
                                    const kt::CodeLayout& layout, int rows, int columns) {
  std::vector<kt::CodedPart> parts;
  const size_t per_part = kt::has_steps(format) ? 3 : 2;
  for (const Part& part : arrays) {
    if (part.size() != per_part) {
      throw nb::value_error((name + " must be a list of (codes, scales" + (per_part == 3 ? ", steps)" : ")")).c_str());
    }
    const bool is_signed = layout.code_bits == 8 || layout.unit > 1;
    const size_t bytes = layout.bytes(rows, columns);
    check("codes of " + name, part[0], is_signed ? dtype_code::Int : dtype_code::UInt, 8,
          is_signed ? "int8" : "uint8 (two codes each)", bytes,
          layout.unit > 1 ? "[" + std::to_string(bytes) + "]" : dimensions(rows, bytes / rows));
    check("scales of " + name, part[1], dtype_code::Float, 32, "f32", rows, "[" + std::to_string(rows) + "]");
    const uint8_t* steps = nullptr;
    if (per_part == 3) {
      const size_t groups = kt::div_up(columns, kt::Int4g::kGroup);
      check("steps of " + name, part[2], dtype_code::UInt, 8, "uint8", rows * groups, dimensions(rows, groups));
      steps = static_cast<const uint8_t*>(part[2].data());
    }
    parts.push_back({static_cast<const uint8_t*>(part[0].data()), static_cast<const uint8_t*>(part[1].data()), steps});
  }
  return parts;
}

void load_codes(kt::Layer& layer, int expert, const std::vector<Part>& gate, const std::vector<Part>& up,
                const std::vector<Part>& down, const std::string& layout_name) {
  const kt::LayerConfig& config = layer.config();
  const kt::CodeLayout* layout = kt::code_layout(layout_name, kt::code_bits(config.format()));
  if (!layout) {
    throw nb::value_error(("a layer of " + std::string(kt::format_name(config.format())) +
                           " takes no codes of a layout '" + layout_name + "'; layouts are rows and blocks")
                              .c_str());
  }
  const int H = config.hidden, I = config.intermediate;
  kt::CodedExpert coded{layout, {}, {}, {}};
  // The size of a part is known only once its cut is known to be right.
  coded.gate.resize(gate.size());
  coded.up.resize(up.size());
  coded.down.resize(down.size());
  raise(layer.check_cut(coded));
  const int part_size = I / static_cast<int>(gate.size());
  coded.gate = parts_of("gate", gate, config.format(), *layout, part_size, H);
  coded.up = parts_of("up", up, config.format(), *layout, part_size, H);
  coded.down = parts_of("down", down, config.format(), *layout, H, part_size);
  raise_of([&] { return layer.load_codes(expert, coded); });
}

template <class T>
nb::ndarray<nb::numpy, T> new_array(std::initializer_list<size_t> shape, T** data) {
  size_t count = 1;
  for (const size_t n : shape) count *= n;
  *data = new T[count];
  nb::capsule owner(*data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::ndarray<nb::numpy, T>(*data, shape, owner);
}

// The layout of the codes of a bf16 matrix.
const kt::CodeLayout& check_matrix(const Array& matrix, kt::Format format) {
  const bool bits = holds(matrix, dtype_code::UInt, 16), bfloat = holds(matrix, dtype_code::Bfloat, 16);
  if (!bits && !bfloat) throw nb::type_error("the matrix must hold bf16 (or its bits as uint16)");
  if (matrix.ndim() != 2 || matrix.size() == 0 || matrix.shape(0) > INT_MAX / 2 || matrix.shape(1) > INT_MAX / 2) {
    throw nb::value_error(("quantise needs a matrix; this array has shape " + shape_of(matrix)).c_str());
  }
  const kt::CodeLayout* layout = kt::code_layout("rows", kt::code_bits(format));
  if (!layout)
    throw nb::value_error((std::string("weights of ") + kt::format_name(format) + " are not quantised").c_str());
  return *layout;
}

nb::tuple quantise(kt::Pool* pool, const std::string& format_name, const Array& matrix, bool search) {
  const kt::Format format = format_of(format_name);
  const kt::CodeLayout* layout = &check_matrix(matrix, format);
  const size_t rows = matrix.shape(0), k = matrix.shape(1), row_bytes = layout->bytes(1, static_cast<int>(k));
  kt::QuantisedRows out{};
  nb::object codes;
  if (layout->code_bits == 8) {
    int8_t* data;
    codes = nb::cast(new_array<int8_t>({rows, k}, &data));
    out.codes = reinterpret_cast<uint8_t*>(data);
  } else {
    codes = nb::cast(new_array<uint8_t>({rows, row_bytes}, &out.codes));
  }
  const auto scales = new_array<float>({rows}, &out.scales);
  const size_t groups = kt::div_up(static_cast<int>(k), kt::Int4g::kGroup);
  const auto steps = new_array<uint8_t>({kt::has_steps(format) ? rows : 0, groups}, &out.steps);
  raise_of([&] {
    return kt::quantise(pool, *kt::active(), format, search, static_cast<const uint16_t*>(matrix.data()),
                        static_cast<int>(rows), static_cast<int>(k), out);
  });
  if (kt::has_steps(format)) return nb::make_tuple(codes, scales, steps);
  return nb::make_tuple(codes, scales);
}

nb::tuple squared_error(const std::string& format_name, const Array& matrix, const Part& coded) {
  const kt::Format format = format_of(format_name);
  const kt::CodeLayout& layout = check_matrix(matrix, format);
  const int rows = static_cast<int>(matrix.shape(0)), k = static_cast<int>(matrix.shape(1));
  const kt::CodedPart part = parts_of("the matrix", {coded}, format, layout, rows, k).front();
  kt::SquaredError sum{};
  {
    nb::gil_scoped_release released;
    sum = kt::squared_error(format, static_cast<const uint16_t*>(matrix.data()), rows, k, part);
  }
  return nb::make_tuple(sum.error, sum.weight);
}

}  // namespace

std::string formats_name(const kt::LayerConfig& config) {
  std::string name = kt::format_name(config.format());
  for (int i = 1; i < 3 && !config.one_format(); ++i) name += std::string("/") + kt::format_name(config.formats[i]);
  return name;
}

kt::Format format_of(const std::string& name) {
  if (const std::optional<kt::Format> format = kt::format_by_name(name)) return *format;
  std::string known;
  for (int i = 0; i < kt::kFormatCount; ++i)
    known += std::string(i ? ", " : "") + kt::format_name(static_cast<kt::Format>(i));
  throw nb::value_error(("format '" + name + "' is unknown; the formats are: " + known).c_str());
}

void bind_codes(nb::module_& m, nb::class_<kt::Layer>& layer) {
  layer
      .def(
          "load_codes", &load_codes, "expert"_a, "gate"_a, "up"_a, "down"_a, nb::kw_only(), "layout"_a = "rows",
          "Packs one expert from codes, which are kept as they are. Each projection is a list of parts (codes, scales) "
          "or, for int4g, (codes, scales, steps); gate and up are cut by rows, down by columns.")
      .def_prop_ro("format", [](const kt::Layer& l) { return formats_name(l.config()); })
      .def_prop_ro("num_experts", [](const kt::Layer& l) { return l.config().num_experts; })
      .def_prop_ro("hidden_size", [](const kt::Layer& l) { return l.config().hidden; })
      .def_prop_ro("intermediate_size", [](const kt::Layer& l) { return l.config().intermediate; })
      .def_prop_ro("group_size", [](const kt::Layer& l) { return l.config().group; })
      .def_prop_ro("biases", [](const kt::Layer& l) { return l.config().biases; })
      .def_prop_ro("pool", [](const kt::Layer& l) -> kt::Pool& { return l.pool(); }, nb::rv_policy::reference);
  m.def("quantise", &quantise, "pool"_a.none(), "format"_a, "matrix"_a, nb::kw_only(), "search"_a = false,
        "(codes, scales) of a bf16 matrix [N, K], or (codes, scales, steps) for int4g: what load_expert would pack on "
        "one node; with search, with scales of least error. Codes are int8 [N, K], or uint8 [N, ceil(K / "
        "2)] with code + 8 of even k in the low nibble; scales are f32 [N], steps uint8 [N, ceil(K / 64)]. Without a "
        "pool the calling thread does it.");
  m.def("squared_error", &squared_error, "format"_a, "matrix"_a, "coded"_a,
        "(sum of (w - decoded)^2, sum of w^2) of a bf16 matrix and what quantise made of it.");
}
