// int4g: w = d[n] * s[n,k/64] * (u4 - 8), s an integer in 1..16, u4 in 0..15: group scales that cost nothing to apply.
//
// s * (u4 - 8) lies in -128..112, an int8: a panel decodes exactly to int8 lines, runs through int8 tiles or dot
// products over the whole depth and needs one float scale per row at the end. On AVX2 s is the second operand of the
// pmaddwd that widens the sums anyway.
//
// Panel = [16 f32 row scales d] then per 512 k: [16 u32 of steps][up to 64 lines as in int4]. Byte g of word n holds s
// - 1 of its groups g (low nibble) and g + 4 (high nibble), so that one mask gives the steps of 256 k as bytes. 0.508
// bytes per weight against 0.5 for int4.
//
// Groups of 32 would cost SmolLM2 less perplexity (0.30 and 0.28 of what int4 costs, with the scales of the largest
// weights and searched ones, not 0.41 and 0.34), but 0.516 bytes and twice the steps: 3 to 5 % of a layer's speed.
#pragma once

#include "formats/panel.h"

namespace kt {

struct Int4g {
  static constexpr int kOffset = 8;
  static constexpr int kGroup = 64;
  static constexpr int kBlock = 512;
  static constexpr size_t kBlockBytes = kLineBytes + kBlock * 8;
  // k is a multiple of kBlock, as depths of passes are, or the padded depth.
  static constexpr size_t offset(int k) {
    return kLineBytes + static_cast<size_t>(div_up(k, kBlock)) * kLineBytes + static_cast<size_t>(k) * 8;
  }
  static constexpr size_t panel_bytes(int k) { return offset(padded_depth(k)); }

  // Of the group that holds depth k: where the word of row n lies, and the nibble in it.
  static constexpr size_t steps_offset(int k, int n) { return kLineBytes + k / kBlock * kBlockBytes + 4 * n; }
  static constexpr int steps_shift(int k) { return k % kActGroup / kGroup * 8 + k % kBlock / kActGroup * 4; }
  // Where the lines from depth k on start; k is a multiple of 32.
  static constexpr size_t lines_offset(int k) {
    return kLineBytes + k / kBlock * kBlockBytes + kLineBytes + static_cast<size_t>(k % kBlock) * 8;
  }
};
// A word has a byte for each group of kActGroup k.
static_assert(Int4g::kBlock == 2 * kActGroup && kActGroup == 4 * Int4g::kGroup);
// Depth is padded to whole groups, and nodes cut it between them.
static_assert(kDepthUnit % Int4g::kGroup == 0);

}  // namespace kt
