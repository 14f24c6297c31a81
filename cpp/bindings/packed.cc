// Packed experts in files: what is around the body of such a file is Python's.
#include "bindings/packed.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <vector>

#include "bindings/status.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Pairs = std::vector<std::tuple<int, int>>;  // position in the file, expert of the layer

std::vector<kt::PackedExpert> experts_of(const Pairs& pairs) {
  std::vector<kt::PackedExpert> experts;
  for (const auto& [position, expert] : pairs) experts.push_back({position, expert});
  return experts;
}

std::vector<uint64_t> write_packed(kt::Layer& layer, int fd, const std::string& path, uint64_t begin, int count,
                                   const Pairs& pairs) {
  std::vector<uint64_t> checksums;
  const std::vector<kt::PackedExpert> experts = experts_of(pairs);
  raise_of([&] { return layer.write_packed({fd, path, begin, count}, experts, &checksums); });
  return checksums;
}

void read_packed(kt::Layer& layer, int fd, const std::string& path, uint64_t begin, int count, const Pairs& pairs,
                 const std::vector<uint64_t>& checksums) {
  const std::vector<kt::PackedExpert> experts = experts_of(pairs);
  raise_of([&] { return layer.read_packed({fd, path, begin, count}, experts, checksums); });
}

std::tuple<int, int, int> scale_rows(const kt::Layer& layer, int expert) {
  kt::ScaleRows rows;
  raise_of([&] { return layer.scale_rows(expert, &rows); });
  return {rows.gate, rows.up, rows.down};
}

void set_scale_rows(kt::Layer& layer, int expert, int gate, int up, int down) {
  raise_of([&] { return layer.set_scale_rows(expert, {gate, up, down}); });
}

std::vector<std::tuple<int, int, int, size_t>> parts(const kt::Layer& layer) {
  std::vector<std::tuple<int, int, int, size_t>> parts;
  for (const kt::PackedPart& p : layer.packed_parts()) parts.emplace_back(p.node, p.begin, p.size, p.bytes);
  return parts;
}

}  // namespace

void bind_packed(nb::class_<kt::Layer>& layer) {
  layer
      .def("write_packed", &write_packed, "fd"_a, "path"_a, "begin"_a, "count"_a, "experts"_a,
           "Writes packed experts, a list of (position in the file, expert), into the body of a file that begins at "
           "`begin` and holds `count` of them; returns the checksums of each expert, part by part.")
      .def("read_packed", &read_packed, "fd"_a, "path"_a, "begin"_a, "count"_a, "experts"_a, "checksums"_a,
           "Reads what write_packed wrote. ValueError: the file is cut short or damaged; the experts then count as not "
           "loaded.")
      .def("scale_rows", &scale_rows, "expert"_a, "How many rows of gate, up and down share a scale.")
      .def("set_scale_rows", &set_scale_rows, "expert"_a, "gate"_a, "up"_a, "down"_a,
           "The same, of an expert that read_packed filled: packed weights do not tell.")
      .def("packed_bytes", &kt::Layer::packed_bytes, "count"_a, "Bytes of a body that holds so many experts.")
      .def_prop_ro("packed_parts", &parts,
                   "(node, begin, size, bytes) of every part in which an expert is packed: whose it is, its columns of "
                   "the intermediate dimension, and its bytes.");
  layer.attr("packed_alignment") = kt::kPackedAlignment;
}
