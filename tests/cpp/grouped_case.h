// Panels that hold the codes of files, for tests: codes that follow from bf16 weights (0 stays 0), and scales of every
// size that keeps sums in range.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/bf16.h"
#include "formats/gguf.h"
#include "formats/grouped_panel.h"
#include "variants.h"

namespace kt_test {

inline std::vector<int> legal_groups(kt::Format format) {
  const kt::GroupedKind* kind = kt::grouped_kind(format);
  if (!kind) return {0};
  if (!kt::is_checkpoint(format) || kind->least_group == 16) return {kind->least_group};
  if (kind->scales == kt::Scales::none) return {256};
  return {128, 32, 256, 64};
}

// Rows of GGUF are whole blocks; those of 32 are tried at every depth, too.
inline int legal_depth(kt::Format format, int k) {
  const bool super = kt::gguf_block(format).weights == 256;
  return super ? kt::round_up(k, 256) : k;
}

// No NaN; every other code occurs. 0 where the weight is 0, if there is such a code.
inline uint8_t code_of(const kt::GroupedKind& kind, uint16_t weight) {
  if ((weight & 0x7fff) == 0) return static_cast<uint8_t>(kind.mins == kt::Mins::zeros ? 8 : kind.offset);
  const uint8_t mixed = static_cast<uint8_t>((weight * 40503u) >> 9);
  if (kind.codes == kt::Codes::e4m3) return (mixed & 0x7f) == 0x7f ? mixed ^ 1 : mixed;
  return mixed & static_cast<uint8_t>((1 << kt::grouped_code_bits(kind.codes)) - 1);
}
inline void put_code(const kt::GroupedKind& kind, uint16_t weight, uint8_t* at) {
  const float f32 = kt::bf16_to_f32(weight);
  // The highest bits of a bf16 of ordinary size, as an f16; every mantissa occurs.
  const uint16_t f16 = static_cast<uint16_t>((weight & 0x8000) | 0x3000 | ((weight * 40503u) >> 7 & 0xfff));
  if (kind.codes == kt::Codes::f32) {
    std::memcpy(at, &f32, 4);
  } else if (kind.codes == kt::Codes::f16) {
    const uint16_t zero = 0;
    std::memcpy(at, (weight & 0x7fff) == 0 ? &zero : &f16, 2);
  } else {
    *at = code_of(kind, weight);
  }
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
    case kt::Scales::u8:
      *at = static_cast<uint8_t>(random.below(64));
      return;
    case kt::Scales::s8:
    case kt::Scales::u4:
      *at = static_cast<uint8_t>(random.below(256));
      return;
  }
}

inline kt::GroupedPanel random_panel(const kt::GroupedKind& kind, int group, const uint16_t* weights, int rows, int k,
                                     Random& random) {
  kt::GroupedPanel panel;
  panel.reset(kind, k, group);
  // As blocks of a checkpoint do: kernels may take advantage of it.
  const bool rows_share_scales = random.below(2) != 0;
  for (int n = 0; n < rows; ++n) {
    const uint16_t* row = weights + static_cast<size_t>(n) * k;
    const bool empty = std::all_of(row, row + k, [](uint16_t w) { return (w & 0x7fff) == 0; });
    for (int i = 0; i < k; ++i) put_code(kind, row[i], panel.row(n) + i * panel.code_bytes);
    if (kind.row) panel.rows[n] = 0.25f * static_cast<float>(1 + random.below(8));
    if (empty && kind.codes == kt::Codes::iq4) continue;  // has no code of 0
    for (int g = 0; g < kt::div_up(k, group); ++g) {
      const size_t at = static_cast<size_t>(g);
      if (n > 0 && rows_share_scales) {
        std::copy_n(panel.row_scales(0) + at * panel.width, panel.width, panel.row_scales(n) + at * panel.width);
      } else {
        random_scale(kind.scales, random, panel.row_scales(n) + at * panel.width);
      }
      uint8_t* min = panel.row_mins(n) + at * panel.min_width;
      if (kind.mins == kt::Mins::zeros) *min = static_cast<uint8_t>(empty ? 8 : random.below(17));
      if (empty) continue;
      if (kind.mins == kt::Mins::f16) random_scale(kt::Scales::f16, random, min);
      if (kind.mins == kt::Mins::f32) random_scale(kt::Scales::f32, random, min);
      if (kind.mins == kt::Mins::u8) *min = static_cast<uint8_t>(random.below(64));
    }
    for (size_t b = 0; !panel.supers.empty() && b < static_cast<size_t>(panel.blocks); ++b) {
      random_scale(kt::Scales::f16, random, reinterpret_cast<uint8_t*>(panel.row_supers(n) + 2 * b));
      if (kt::has_super_min(kind.mins) && !empty)
        random_scale(kt::Scales::f16, random, reinterpret_cast<uint8_t*>(panel.row_supers(n) + 2 * b + 1));
    }
  }
  return panel;
}

// Raw blocks are bytes of any value, but for their scale.
inline void random_raw_panel(kt::Format format, int k, Random& random, uint8_t* panel) {
  const size_t bytes = static_cast<size_t>(kt::gguf_block(format).bytes);
  for (int b = 0; b < k / 256 * kt::kPanelRows; ++b, panel += bytes) {
    for (size_t i = 0; i < bytes; ++i) panel[i] = static_cast<uint8_t>(random.below(256));
    kt::set_raw_scale(format, static_cast<uint16_t>(0x3000 + random.below(0x1400)), panel);
  }
}

}  // namespace kt_test
