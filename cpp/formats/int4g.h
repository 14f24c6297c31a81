// int4g: w = d[n] * s[n,k/32] * (u4 - 8), s an integer in 1..16, u4 in 0..15: group scales that cost nothing to apply.
//
// s * (u4 - 8) lies in -128..112, an int8: a panel decodes exactly to int8 lines, runs through int8 tiles or dot
// products over the whole depth and needs one float scale per row at the end. On AVX2 s is the second operand of the
// pmaddwd that widens the sums anyway.
//
// Panel = [16 f32 row scales d] then per 256 k: [16 u32: nibble g of word n = s[n,g] - 1][up to 32 lines as in int4].
// 0.516 bytes per weight against 0.5 for int4.
#pragma once

#include "formats/panel.h"

namespace kt {

struct Int4g {
  static constexpr int kOffset = 8;
  static constexpr int kGroup = 32;
  static constexpr int kBlock = 256;
  static constexpr size_t kBlockBytes = kLineBytes + kBlock * 8;
  // k is a multiple of kBlock, or the padded depth.
  static constexpr size_t offset(int k) {
    return kLineBytes + static_cast<size_t>(div_up(k, kBlock)) * kLineBytes + static_cast<size_t>(k) * 8;
  }
  static constexpr size_t panel_bytes(int k) { return offset(padded_depth(k)); }
};
static_assert(Int4g::kBlock == kActGroup);

}  // namespace kt
