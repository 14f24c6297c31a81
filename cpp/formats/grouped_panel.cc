#include "formats/grouped_panel.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/bf16.h"
#include "formats/nibbles.h"

namespace kt {
namespace {

constexpr int kNibbleGroup = 32;  // k of four lines

// Four codes k0 k1 k2 k3 in the order of a lane, k0 k2 k1 k3; its own inverse.
uint32_t swap_middle(uint32_t quad) {
  return (quad & 0xff0000ffu) | (quad & 0x0000ff00u) << 8 | (quad & 0x00ff0000u) >> 8;
}

uint8_t no_weight(Codes codes) { return codes == Codes::int4 ? 8 : 0; }

// Where the lines that hold depth k start, k a multiple of 32.
size_t step_offset(const GroupedLayout& layout, int k) {
  const int in_block = k % GroupedLayout::kBlock;
  return layout.offset(k - in_block) + layout.head + static_cast<size_t>(in_block) * layout.lines_per_k;
}

void put_lines(Codes codes, const uint8_t* row, int n, uint8_t* lines) {
  if (grouped_code_bits(codes) == 8) {
    for (int i = 0; i < 8; ++i) {
      const uint32_t quad = swap_middle(load_u32(row + 4 * i));
      std::memcpy(lines + i * kLineBytes + 4 * n, &quad, 4);
    }
    return;
  }
  for (int i = 0; i < 4; ++i) {
    const uint32_t quad = swap_middle(load_u32(row + 4 * i) | load_u32(row + 16 + 4 * i) << 4);
    std::memcpy(lines + i * kLineBytes + 4 * n, &quad, 4);
  }
}

void get_lines(Codes codes, const uint8_t* lines, int n, uint8_t* row) {
  for (int i = 0; i < (grouped_code_bits(codes) == 8 ? 8 : 4); ++i) {
    const uint32_t quad = swap_middle(load_u32(lines + i * kLineBytes + 4 * n));
    if (grouped_code_bits(codes) == 8) {
      std::memcpy(row + 4 * i, &quad, 4);
      continue;
    }
    const uint32_t low = quad & 0x0f0f0f0fu, high = quad >> 4 & 0x0f0f0f0fu;
    std::memcpy(row + 4 * i, &low, 4);
    std::memcpy(row + 16 + 4 * i, &high, 4);
  }
}

// Scales and zeros of group g of row n: where they lie in the panel.
struct GroupPlace {
  size_t scale, zero;
};
GroupPlace place_of(const GroupedLayout& layout, int width, int g, int n) {
  const size_t block = layout.offset(g / layout.groups * GroupedLayout::kBlock);
  const size_t at = static_cast<size_t>(g % layout.groups) * kPanelRows + n;
  return {block + at * width, block + layout.zeros_at + at};
}

}  // namespace

void GroupedPanel::reset(const GroupedKind& kind, int depth, int group) {
  k = depth;
  pitch = padded_depth(depth);
  groups = div_up(pitch, group);
  width = scale_bytes(kind.scales);
  codes.assign(static_cast<size_t>(kPanelRows) * pitch, no_weight(kind.codes));
  scales.assign(static_cast<size_t>(kPanelRows) * groups * width, 0);
  zeros.assign(kind.zeros ? static_cast<size_t>(kPanelRows) * groups : 0, 8);
  std::fill_n(rows, kPanelRows, kind.row ? 0.0f : 1.0f);
}

void put_grouped(const GroupedKind& kind, int group, const GroupedPanel& from, uint8_t* panel) {
  const GroupedLayout layout(kind, group);
  std::memcpy(panel, from.rows, sizeof(from.rows));
  for (int kb = 0; kb < from.pitch; kb += GroupedLayout::kBlock) std::memset(panel + layout.offset(kb), 0, layout.head);
  for (int n = 0; n < kPanelRows; ++n) {
    for (int k = 0; k < from.pitch; k += kNibbleGroup)
      put_lines(kind.codes, from.row(n) + k, n, panel + step_offset(layout, k));
    for (int g = 0; from.width && g < from.groups; ++g) {
      const GroupPlace place = place_of(layout, from.width, g, n);
      std::memcpy(panel + place.scale, from.row_scales(n) + static_cast<size_t>(g) * from.width, from.width);
      if (kind.zeros) panel[place.zero] = from.row_zeros(n)[g];
    }
  }
}

void get_grouped(const GroupedKind& kind, int group, const uint8_t* panel, int k_packed, GroupedPanel* to) {
  const GroupedLayout layout(kind, group);
  to->reset(kind, k_packed, group);
  std::memcpy(to->rows, panel, sizeof(to->rows));
  for (int n = 0; n < kPanelRows; ++n) {
    for (int k = 0; k < to->pitch; k += kNibbleGroup)
      get_lines(kind.codes, panel + step_offset(layout, k), n, to->row(n) + k);
    for (int g = 0; to->width && g < to->groups; ++g) {
      const GroupPlace place = place_of(layout, to->width, g, n);
      std::memcpy(to->row_scales(n) + static_cast<size_t>(g) * to->width, panel + place.scale, to->width);
      if (kind.zeros) to->row_zeros(n)[g] = panel[place.zero];
    }
  }
}

float decode_code(Codes codes, uint8_t code) {
  static constexpr float kE2m1[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  switch (codes) {
    case Codes::e4m3: {
      const int exponent = code >> 3 & 15, mantissa = code & 7;
      if (exponent == 15 && mantissa == 7) return std::nanf("");
      const float magnitude = exponent ? std::ldexp(static_cast<float>(8 + mantissa), exponent - 10)
                                       : std::ldexp(static_cast<float>(mantissa), -9);
      return code & 0x80 ? -magnitude : magnitude;
    }
    case Codes::e2m1:
      return code & 8 ? -kE2m1[code & 7] : kE2m1[code & 7];
    case Codes::int4:
      return static_cast<float>(static_cast<int>(code & 15) - 8);
  }
  return 0;
}

float decode_scale(Scales scales, const uint8_t* at) {
  uint16_t half;
  switch (scales) {
    case Scales::none:
      return 1;
    case Scales::f32: {
      float f;
      std::memcpy(&f, at, 4);
      return f;
    }
    case Scales::bf16:
      std::memcpy(&half, at, 2);
      return bf16_to_f32(half);
    case Scales::f16: {
      std::memcpy(&half, at, 2);
      const int exponent = half >> 10 & 31, mantissa = half & 1023;
      if (exponent == 31) return std::nanf("");
      const float magnitude = exponent ? std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25)
                                       : std::ldexp(static_cast<float>(mantissa), -24);
      return half & 0x8000 ? -magnitude : magnitude;
    }
    case Scales::e8m0:
      return *at == 255 ? std::nanf("") : std::ldexp(1.0f, *at - 127);
    case Scales::e4m3:
      return decode_code(Codes::e4m3, *at);
  }
  return 0;
}

}  // namespace kt
