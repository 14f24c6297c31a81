// Experts of GGUF files: rows of blocks, as the file has them, become panels.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>

#include "bindings/codes.h"
#include "bindings/status.h"
#include "formats/gguf.h"
#include "moe/layer.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Blocks = nb::ndarray<const uint8_t, nb::ndim<2>, nb::device::cpu>;

kt::GgufExpert::Rows rows_of(kt::Matrix matrix, const Blocks& array, const kt::LayerConfig& config) {
  const kt::Format format = config.formats[matrix];
  const kt::GgufBlock block = kt::gguf_block(format);
  const std::string name = kt::kMatrixNames[matrix];
  if (block.weights == 0) {
    throw nb::value_error(("a layer of " + formats_name(config) + " cannot take blocks of GGUF").c_str());
  }
  const bool down = matrix == kt::kDown;
  const size_t rows = static_cast<size_t>(down ? config.hidden : config.intermediate);
  const size_t bytes = static_cast<size_t>(down ? config.intermediate : config.hidden) / block.weights * block.bytes;
  if (array.shape(0) != rows || array.shape(1) != bytes) {
    throw nb::value_error((name + " has " + std::to_string(array.shape(0)) + " rows of " +
                           std::to_string(array.shape(1)) + " bytes; this layer needs " + std::to_string(rows) +
                           " of " + std::to_string(bytes) + ", in " + kt::format_name(format))
                              .c_str());
  }
  if ((array.stride(1) != 1 && bytes > 1) || array.stride(0) < 0) {
    throw nb::value_error((name + ": the bytes of a row must lie side by side").c_str());
  }
  const size_t pitch = static_cast<size_t>(array.stride(0));
  if (format == kt::Format::bf16 && (reinterpret_cast<uintptr_t>(array.data()) % 2 || pitch % 2)) {
    throw nb::value_error((name + ": bf16 must lie at even addresses").c_str());
  }
  return {array.data(), pitch};
}

void load_gguf(kt::Layer& layer, int expert, const Blocks& gate, const Blocks& up, const Blocks& down) {
  const kt::LayerConfig& config = layer.config();
  const kt::GgufExpert weights{
      {rows_of(kt::kGate, gate, config), rows_of(kt::kUp, up, config), rows_of(kt::kDown, down, config)}};
  raise_of([&] { return layer.load_gguf(expert, weights); });
}

}  // namespace

void bind_gguf(nb::class_<kt::Layer>& layer) {
  layer.def("load_gguf", &load_gguf, "expert"_a, "gate"_a, "up"_a, "down"_a,
            "Packs one expert from rows of blocks of a GGUF file, uint8 [N, bytes of a row], of the types that are the "
            "formats of this layer. Views are fine.");
}
