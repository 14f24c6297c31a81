// Codes of panels back in the rows of a checkpoint: 4 bits with even k in the low nibble, 8 bits, or bf16. Formats
// whose codes a checkpoint has; get_grouped, which also tells scales and zeros, is the slow twin.
#pragma once

#include "formats/format.h"
#include "formats/grouped.h"

namespace kt {

constexpr int kUnpackDepth = GroupedLayout::kBlock;
constexpr size_t kUnpackBytes = static_cast<size_t>(kPanelRows) * kUnpackDepth * 2;  // the most that one call writes

// Bits of a weight in a row; 0 for formats that no checkpoint has.
constexpr int row_bits(Format format) {
  if (format == Format::bf16) return 16;
  const GroupedKind* kind = grouped_kind(format);
  return kind ? grouped_code_bits(kind->codes) : 0;
}

// Depth kb..kb+256 (less at the end of the panel, which is packed with depth k) of all 16 rows: row r goes to
// out + r * pitch. kb is a multiple of 256. Whole units of 64 k are written, so that rows need up to 256 * bits / 8
// bytes; out and pitch are multiples of 16.
void unpack_block(WeightFormat format, const uint8_t* panel, int k, int kb, uint8_t* out, size_t pitch);

}  // namespace kt
