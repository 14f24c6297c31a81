// bf16: panel = [K/2 lines], line = 16 n x 2 k of bf16. No scales.
#pragma once

#include "formats/panel.h"

namespace kt {

struct Bf16 {
  // Bytes from the start of a panel to depth k; k is a multiple of kActGroup, or the padded depth.
  static constexpr size_t offset(int k) { return static_cast<size_t>(k) * 32; }
  static constexpr size_t panel_bytes(int k) { return offset(padded_depth(k)); }
};

}  // namespace kt
