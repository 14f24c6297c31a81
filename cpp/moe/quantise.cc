#include "moe/quantise.h"

#include <algorithm>
#include <string>
#include <vector>

#include "formats/code_layouts.h"
#include "formats/codes.h"
#include "formats/format.h"
#include "formats/int4g.h"

namespace kt {
namespace {

struct Job {
  const IsaTable* isa;
  Format format;
  const uint16_t* matrix;
  int rows;
  int k;
  size_t row_bytes;
  QuantisedRows out;

  void store(const PanelCodes& codes, int row, int count) const {
    const int groups = div_up(k, Int4g::kGroup);
    for (int n = 0; n < count; ++n) {
      uint8_t* to = out.codes + (row + n) * row_bytes;
      if (code_bits(format) == 8) {
        std::copy_n(codes.row(n), k, reinterpret_cast<int8_t*>(to));
      } else {
        write_row_int4(codes.row(n), k, to);
      }
      out.scales[row + n] = codes.scales[n];
      if (has_steps(format)) std::copy_n(codes.row_steps(n), groups, out.steps + static_cast<size_t>(row + n) * groups);
    }
  }

  void run(const Worker& worker) const {
    std::vector<uint8_t> panel(panel_bytes(format, k));
    PanelCodes codes;
    for (int p = worker.global; p < panel_count(rows); p += worker.total_threads) {
      const int row = p * kPanelRows, count = std::min(kPanelRows, rows - row);
      isa->formats[static_cast<int>(format)].pack(matrix + static_cast<size_t>(row) * k, k, count, k, panel.data());
      get_codes(format, panel.data(), k, &codes);
      store(codes, row, count);
    }
  }
};

}  // namespace

Status quantise(Pool& pool, const IsaTable& isa, Format format, const uint16_t* matrix, int rows, int k,
                const QuantisedRows& out) {
  if (code_bits(format) == 0) {
    return Status::invalid(std::string("weights of ") + format_name(format) + " are not quantised");
  }
  Job job{&isa, format, matrix, rows, k, code_layout("rows", code_bits(format))->bytes(1, k), out};
  return pool.run([](void* c, const Worker& worker) { static_cast<const Job*>(c)->run(worker); }, &job);
}

}  // namespace kt
