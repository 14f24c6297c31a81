// int4: w = d[n] * 16 * (u4 - 8), u4 in 0..15 (1..15 with the scale of the largest weight): one scale per output row.
//
// Panel = [16 f32 row scales d][K/8 lines]. Four lines cover 32 k: line i holds, for each of 16 n, four bytes whose low
// nibbles are k = 4i..4i+3 and whose high nibbles are k = 16+4i..16+4i+3, so that one mask and one shift give two int8
// lines in order. The factor 16 makes the row scale that of an int8 row, so the int8 kernels serve both.
#pragma once

#include "formats/panel.h"

namespace kt {

struct Int4 {
  static constexpr int kOffset = 8;
  static constexpr int kStep = 16;
  static constexpr size_t offset(int k) { return kLineBytes + static_cast<size_t>(k) * 8; }
  static constexpr size_t panel_bytes(int k) { return offset(padded_depth(k)); }
};

}  // namespace kt
