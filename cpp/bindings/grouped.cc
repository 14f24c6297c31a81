// Experts in the formats of checkpoints: views of files, whatever their strides, become panels.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/codes.h"
#include "bindings/status.h"
#include "moe/layer.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using View = nb::ndarray<nb::ro, nb::device::cpu>;

// A matrix [N, K] as Python sees it; its arrays stay alive with it.
struct EncodedMatrix {
  View codes;
  std::optional<View> scales, zeros, rows;
  int block_rows;
  kt::CodeOrder order;
};

kt::CodeOrder order_of(const std::string& name) {
  if (name == "rows") return kt::CodeOrder::rows;
  if (name == "gptq") return kt::CodeOrder::gptq;
  if (name == "awq") return kt::CodeOrder::awq;
  throw nb::value_error(("order '" + name + "' is unknown; orders are rows, gptq and awq").c_str());
}

std::string shape_of(const View& array) {
  std::string shape;
  for (size_t i = 0; i < array.ndim(); ++i) shape += (i ? ", " : "") + std::to_string(array.shape(i));
  return "[" + shape + "]";
}

// An array of `ndim` <= 2 dimensions with elements of `bytes`.
void check(const std::string& name, const View& array, size_t bytes, size_t rows, std::optional<size_t> columns) {
  const bool shape = columns ? array.ndim() == 2 && array.shape(0) == rows && array.shape(1) == *columns
                             : array.ndim() == 1 && array.shape(0) == rows;
  if (shape && array.itemsize() == bytes) return;
  const std::string wanted = "[" + std::to_string(rows) + (columns ? ", " + std::to_string(*columns) : "") + "]";
  throw nb::value_error((name + " have shape " + shape_of(array) + " and " + std::to_string(array.itemsize()) +
                         " bytes each; needed are " + wanted + " and " + std::to_string(bytes))
                            .c_str());
}

size_t stride(const View& array, size_t dimension) {
  const int64_t bytes = array.stride(dimension) * static_cast<int64_t>(array.itemsize());
  if (bytes < 0) throw nb::value_error("arrays with negative strides are not supported");
  return static_cast<size_t>(bytes);
}

const uint8_t* bytes_of(const View& array) { return static_cast<const uint8_t*>(array.data()); }

kt::GroupedMatrix matrix_of(const std::string& name, const EncodedMatrix& in, const kt::LayerConfig& config, size_t n,
                            size_t k) {
  const kt::GroupedKind& kind = *kt::grouped_kind(config.format());
  kt::GroupedMatrix m;
  m.order = in.order;
  m.block_rows = in.block_rows;
  const std::string codes = "codes of " + name, scales = "scales of " + name;
  if (in.order == kt::CodeOrder::rows) {
    check(codes, in.codes, 1, n, kt::grouped_code_bits(kind.codes) == 8 ? k : (k + 1) / 2);
  } else {
    const bool gptq = in.order == kt::CodeOrder::gptq;
    if (kind.codes != kt::Codes::u4) throw nb::value_error("the orders gptq and awq are for int4 codes");
    check(codes, in.codes, 4, gptq ? (k + 7) / 8 : k, gptq ? n : (n + 7) / 8);
  }
  if (in.codes.stride(1) != 1 && in.codes.shape(1) > 1) {
    throw nb::value_error((codes + " must lie side by side in a row").c_str());
  }
  m.codes = bytes_of(in.codes);
  m.code_pitch = stride(in.codes, 0);
  if (kt::scale_bytes(kind.scales)) {
    if (!in.scales) throw nb::value_error((scales + " are missing").c_str());
    if (in.block_rows < 1) throw nb::value_error("block_rows must be at least 1");
    const size_t group = static_cast<size_t>(config.group), block = static_cast<size_t>(in.block_rows);
    check(scales, *in.scales, kt::scale_bytes(kind.scales), (n + block - 1) / block, (k + group - 1) / group);
    m.scales = bytes_of(*in.scales);
    m.scale_row = stride(*in.scales, 0);
    m.scale_group = stride(*in.scales, 1);
    if (in.zeros) {
      check("zeros of " + name, *in.zeros, 1, n, (k + group - 1) / group);
      m.zeros = bytes_of(*in.zeros);
      m.zero_row = stride(*in.zeros, 0);
      m.zero_group = stride(*in.zeros, 1);
    }
  }
  if (kind.row) {
    if (!in.rows) throw nb::value_error(("factors of the rows of " + name + " are missing").c_str());
    check("factors of the rows of " + name, *in.rows, 4, in.rows->ndim() && in.rows->shape(0) == 1 ? 1 : n,
          std::nullopt);
    m.rows = static_cast<const float*>(in.rows->data());
    m.row_step = in.rows->shape(0) == 1 ? 0 : static_cast<int>(in.rows->stride(0));
  }
  return m;
}

using Columns = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

const int32_t* columns_of(const Columns& columns, int hidden) {
  std::vector<uint8_t> seen(static_cast<size_t>(hidden));
  bool once = columns.shape(0) == seen.size();
  for (size_t i = 0; once && i < seen.size(); ++i) {
    const int32_t column = columns.data()[i];
    once = column >= 0 && column < hidden && !seen[static_cast<size_t>(column)]++;
  }
  if (!once) throw nb::value_error(("columns must hold each of 0.." + std::to_string(hidden - 1) + " once").c_str());
  return columns.data();
}

void load_encoded(kt::Layer& layer, int expert, const EncodedMatrix& gate, const EncodedMatrix& up,
                  const EncodedMatrix& down, const std::optional<Columns>& columns) {
  const kt::LayerConfig& config = layer.config();
  if (!config.one_format() || !kt::is_checkpoint(config.format())) {
    throw nb::value_error(("a layer of " + formats_name(config) + " cannot take the codes of a checkpoint").c_str());
  }
  const size_t H = config.hidden, I = config.intermediate;
  const kt::GroupedExpert weights{matrix_of("gate", gate, config, I, H), matrix_of("up", up, config, I, H),
                                  matrix_of("down", down, config, H, I),
                                  columns ? columns_of(*columns, config.hidden) : nullptr};
  raise_of([&] { return layer.load_grouped(expert, weights); });
}

}  // namespace

void bind_grouped(nb::module_& m, nb::class_<kt::Layer>& layer) {
  nb::class_<EncodedMatrix>(
      m, "EncodedMatrix",
      "A matrix [N, K] of a checkpoint: codes, and scales [ceil(N / block_rows), ceil(K / group)], "
      "zeros [N, ceil(K / group)] and rows [N] or [1] where the format has them. Views are fine.")
      .def(
          "__init__",
          [](EncodedMatrix* self, View codes, std::optional<View> scales, std::optional<View> zeros,
             std::optional<View> rows, int block_rows, const std::string& order) {
            new (self) EncodedMatrix{std::move(codes), std::move(scales), std::move(zeros),
                                     std::move(rows),  block_rows,        order_of(order)};
          },
          "codes"_a, "scales"_a = nb::none(), "zeros"_a = nb::none(), "rows"_a = nb::none(), nb::kw_only(),
          "block_rows"_a = 1, "order"_a = "rows");
  layer
      .def("load_encoded", &load_encoded, "expert"_a, "gate"_a, "up"_a, "down"_a, "columns"_a = nb::none(),
           "Packs one expert from the codes and scales of a checkpoint, which are kept as they are. Column j of gate "
           "and "
           "up is for column columns[j] of the input.")
      .def_prop_ro("has_columns", &kt::Layer::has_columns)
      .def_prop_ro("group_size", [](const kt::Layer& l) { return l.config().group; });
}
