// Panels of checkpoint formats for tests: codes that follow from bf16 weights (0 stays 0), and scales of every size
// that keeps sums in range.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/bf16.h"
#include "formats/grouped_panel.h"
#include "variants.h"

namespace kt_test {

inline std::vector<int> legal_groups(kt::Format format) {
  const kt::GroupedKind* kind = kt::grouped_kind(format);
  if (!kind) return {0};
  if (kind->least_group == 16) return {16};
  if (kind->scales == kt::Scales::none) return {256};
  return {128, 32, 256, 64};
}

// No NaN; every other code occurs.
inline uint8_t code_of(kt::Codes codes, uint16_t weight) {
  if ((weight & 0x7fff) == 0) return codes == kt::Codes::int4 ? 8 : 0;
  const uint8_t mixed = static_cast<uint8_t>((weight * 40503u) >> 9);
  if (codes != kt::Codes::e4m3) return mixed & 15;
  return (mixed & 0x7f) == 0x7f ? mixed ^ 1 : mixed;
}

inline void random_scale(kt::Scales scales, Random& random, uint8_t* at) {
  const float value = std::ldexp(1.0f + static_cast<float>(random.below(256)) / 256, random.below(7) - 3);
  switch (scales) {
    case kt::Scales::none:
      return;
    case kt::Scales::f32:
      std::memcpy(at, &value, 4);
      return;
    case kt::Scales::bf16: {
      const uint16_t bits = kt::f32_to_bf16(value);
      std::memcpy(at, &bits, 2);
      return;
    }
    case kt::Scales::f16: {
      const uint16_t bits = static_cast<uint16_t>(0x3000 + random.below(0x1400));
      std::memcpy(at, &bits, 2);
      return;
    }
    case kt::Scales::e8m0:
      *at = static_cast<uint8_t>(124 + random.below(7));
      return;
    case kt::Scales::e4m3:
      *at = static_cast<uint8_t>(random.below(0x7f));
      return;
  }
}

inline kt::GroupedPanel random_panel(const kt::GroupedKind& kind, int group, const uint16_t* weights, int rows, int k,
                                     Random& random) {
  kt::GroupedPanel panel;
  panel.reset(kind, k, group);
  for (int n = 0; n < rows; ++n) {
    for (int i = 0; i < k; ++i) panel.row(n)[i] = code_of(kind.codes, weights[static_cast<size_t>(n) * k + i]);
    for (int g = 0; g < kt::div_up(k, group); ++g) {
      random_scale(kind.scales, random, panel.row_scales(n) + static_cast<size_t>(g) * panel.width);
      const bool empty = std::all_of(weights + static_cast<size_t>(n) * k, weights + static_cast<size_t>(n + 1) * k,
                                     [](uint16_t w) { return (w & 0x7fff) == 0; });
      if (kind.zeros) panel.row_zeros(n)[g] = static_cast<uint8_t>(empty ? 8 : random.below(17));
    }
    if (kind.row) panel.rows[n] = 0.25f * static_cast<float>(1 + random.below(8));
  }
  return panel;
}

}  // namespace kt_test
