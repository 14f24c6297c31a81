// Blocks of GGUF files: how the types of ggml lay out the codes and scales that formats/grouped.h names.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats/gguf_raw.h"
#include "formats/grouped_panel.h"

namespace kt {

// A row of a matrix is blocks of so many weights and bytes; {0, 0} for formats that are not of GGUF.
struct GgufBlock {
  int weights;
  int bytes;
};
GgufBlock gguf_block(Format format);
constexpr bool is_raw(Format format) {
  const GroupedKind* kind = grouped_kind(format);
  return kind && kind->codes == Codes::raw;
}

// Rows of a file, `pitch` bytes apart, and columns k0..k1 of them, whole blocks, become a panel. False if a scale is
// not finite; the panel is then of no use. Not for bf16, which kernels pack. `panel` is scratch.
bool pack_gguf(Format format, const uint8_t* rows, size_t pitch, int count, int k0, int k1, GroupedPanel* scratch,
               uint8_t* panel);

// The f16 scale of a block of a raw format, for measurements.
void set_raw_scale(Format format, uint16_t f16, uint8_t* block);

}  // namespace kt
