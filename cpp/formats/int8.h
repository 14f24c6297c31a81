// int8: w = d[n] * (u8 - 128), u8 in 1..255.
//
// Panel = [16 f32 row scales d][K/4 lines], line = 16 n x 4 k. Weights are stored unsigned because vpdpbusd and the
// AVX2 byte unpacking take unsigned weights; the kernels start their accumulators at -128 * sum(a), so no weight-side
// compensation is stored.
#pragma once

#include "formats/panel.h"

namespace kt {

struct Int8 {
  static constexpr int kOffset = 128;
  static constexpr size_t offset(int k) { return kLineBytes + static_cast<size_t>(k) * 16; }
  static constexpr size_t panel_bytes(int k) { return offset(padded_depth(k)); }
};

}  // namespace kt
