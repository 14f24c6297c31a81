#include "formats/grouped_panel.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/bf16.h"
#include "formats/nibbles.h"

namespace kt {
namespace {

constexpr int kStep = 32;  // k that lie together
constexpr int kQuads = kStep / 4;

// Four codes k0 k1 k2 k3 in the order of a lane, k0 k2 k1 k3; its own inverse.
uint32_t swap_middle(uint32_t quad) {
  return (quad & 0xff0000ffu) | (quad & 0x0000ff00u) << 8 | (quad & 0x00ff0000u) >> 8;
}

// Integers take up to two planes of bits; the first holds the lowest ones.
struct Plane {
  int bits, from;
};
struct Planes {
  Plane low, high;
};
Planes planes_of(Codes codes) {
  const int bits = grouped_code_bits(codes), low = bits >= 8 ? 8 : bits >= 4 ? 4 : 2;
  return {{low, 0}, {bits - low, low}};
}

// Where quad q of a step has its bits in a plane.
struct QuadPlace {
  int line, shift;
};
QuadPlace place_of(int bits, int q) {
  switch (bits) {
    case 8:
      return {q, 0};
    case 4:
      return {q % 4, q / 4 * 4};
    case 2:
      return {q / 4, q % 4 * 2};
    default:
      return {0, q};
  }
}
size_t plane_bytes(int bits) { return static_cast<size_t>(bits) * kLineBytes; }  // of a step

// Where the lines that hold depth k start, k a multiple of 32.
size_t step_offset(const GroupedLayout& layout, int k) {
  const int in_block = k % GroupedLayout::kBlock;
  return layout.offset(k - in_block) + layout.head + in_block * layout.line_bytes / GroupedLayout::kBlock;
}

void add_to_lane(uint8_t* lane, uint32_t bits) {
  bits |= load_u32(lane);
  std::memcpy(lane, &bits, 4);
}

// Lines are 0 before.
void put_step(Codes codes, const uint8_t* row, int n, uint8_t* lines) {
  for (const Plane plane : {planes_of(codes).low, planes_of(codes).high}) {
    const uint32_t mask = (1u << plane.bits) - 1u, every = mask * 0x01010101u;
    for (int q = 0; plane.bits && q < kQuads; ++q) {
      const QuadPlace place = place_of(plane.bits, q);
      const uint32_t quad = swap_middle(load_u32(row + 4 * q)) >> plane.from & every;
      add_to_lane(lines + place.line * kLineBytes + 4 * n, quad << place.shift);
    }
    lines += plane_bytes(plane.bits);
  }
}

void get_step(Codes codes, const uint8_t* lines, int n, uint8_t* row) {
  std::memset(row, 0, kStep);
  for (const Plane plane : {planes_of(codes).low, planes_of(codes).high}) {
    const uint32_t mask = (1u << plane.bits) - 1u, every = mask * 0x01010101u;
    for (int q = 0; plane.bits && q < kQuads; ++q) {
      const QuadPlace place = place_of(plane.bits, q);
      const uint32_t lane = load_u32(lines + place.line * kLineBytes + 4 * n);
      add_to_lane(row + 4 * q, swap_middle(lane >> place.shift & every) << plane.from);
    }
    lines += plane_bytes(plane.bits);
  }
}

bool is_float(Codes codes) { return codes == Codes::f16 || codes == Codes::f32; }

// A float of row n at depth k of a panel.
uint8_t* float_at(const GroupedLayout& layout, uint8_t* panel, int width, int n, int k) {
  return panel + layout.offset(0) + (static_cast<size_t>(k) * kPanelRows + n) * width;
}

// Scale and min of group g of row n: where they lie in the panel.
struct GroupPlace {
  size_t scale, min;
};
GroupPlace place_of_group(const GroupedLayout& layout, const GroupedPanel& panel, int g, int n) {
  const size_t block = layout.offset(g / layout.groups * GroupedLayout::kBlock);
  const size_t at = static_cast<size_t>(g % layout.groups) * kPanelRows + n;
  return {block + at * panel.width, block + layout.mins_at + at * panel.min_width};
}
size_t place_of_super(const GroupedLayout& layout, int block, int which, int n) {
  return layout.offset(block * GroupedLayout::kBlock) + layout.supers_at +
         static_cast<size_t>(which * kPanelRows + n) * 2;
}

int supers_of(const GroupedKind& kind) { return (has_super(kind.scales) ? 1 : 0) + (has_super_min(kind.mins) ? 1 : 0); }

}  // namespace

void GroupedPanel::reset(const GroupedKind& kind, int depth, int group) {
  k = depth;
  pitch = padded_depth(depth);
  code_bytes = is_float(kind.codes) ? grouped_code_bits(kind.codes) / 8 : 1;
  groups = div_up(pitch, group);
  blocks = div_up(pitch, GroupedLayout::kBlock);
  width = scale_bytes(kind.scales);
  min_width = min_bytes(kind.mins);
  const bool zeros = kind.mins == Mins::zeros;
  codes.assign(static_cast<size_t>(kPanelRows) * pitch * code_bytes, static_cast<uint8_t>(zeros ? 8 : kind.offset));
  scales.assign(static_cast<size_t>(kPanelRows) * groups * width, 0);
  mins.assign(static_cast<size_t>(kPanelRows) * groups * min_width, zeros ? 8 : 0);
  supers.assign(supers_of(kind) ? static_cast<size_t>(kPanelRows) * blocks * 2 : 0, 0);
  std::fill_n(rows, kPanelRows, kind.row ? 0.0f : 1.0f);
}

void put_grouped(const GroupedKind& kind, int group, const GroupedPanel& from, uint8_t* panel) {
  const GroupedLayout layout(kind, group);
  if (kind.row) std::memcpy(panel, from.rows, sizeof(from.rows));
  if (is_float(kind.codes)) {
    for (int n = 0; n < kPanelRows; ++n) {
      for (int k = 0; k < from.pitch; ++k) {
        std::memcpy(float_at(layout, panel, from.code_bytes, n, k), from.row(n) + k * from.code_bytes, from.code_bytes);
      }
    }
    return;
  }
  std::memset(panel + layout.first, 0, layout.offset(from.pitch) - layout.first);
  for (int n = 0; n < kPanelRows; ++n) {
    for (int k = 0; k < from.pitch; k += kStep)
      put_step(kind.codes, from.row(n) + k, n, panel + step_offset(layout, k));
    for (int g = 0; g < from.groups; ++g) {
      const GroupPlace place = place_of_group(layout, from, g, n);
      const size_t at = static_cast<size_t>(g);
      if (from.width) std::memcpy(panel + place.scale, from.row_scales(n) + at * from.width, from.width);
      if (from.min_width) std::memcpy(panel + place.min, from.row_mins(n) + at * from.min_width, from.min_width);
    }
    for (int b = 0; b < from.blocks; ++b) {
      for (int which = 0; which < supers_of(kind); ++which)
        std::memcpy(panel + place_of_super(layout, b, which, n), from.row_supers(n) + 2 * b + which, 2);
    }
  }
}

void get_grouped(const GroupedKind& kind, int group, const uint8_t* panel, int k_packed, GroupedPanel* to) {
  const GroupedLayout layout(kind, group);
  to->reset(kind, k_packed, group);
  if (kind.row) std::memcpy(to->rows, panel, sizeof(to->rows));
  for (int n = 0; n < kPanelRows; ++n) {
    if (is_float(kind.codes)) {
      for (int k = 0; k < to->pitch; ++k) {
        std::memcpy(to->row(n) + k * to->code_bytes,
                    float_at(layout, const_cast<uint8_t*>(panel), to->code_bytes, n, k), to->code_bytes);
      }
      continue;
    }
    for (int k = 0; k < to->pitch; k += kStep) get_step(kind.codes, panel + step_offset(layout, k), n, to->row(n) + k);
    for (int g = 0; g < to->groups; ++g) {
      const GroupPlace place = place_of_group(layout, *to, g, n);
      const size_t at = static_cast<size_t>(g);
      if (to->width) std::memcpy(to->row_scales(n) + at * to->width, panel + place.scale, to->width);
      if (to->min_width) std::memcpy(to->row_mins(n) + at * to->min_width, panel + place.min, to->min_width);
    }
    for (int b = 0; b < to->blocks; ++b) {
      for (int which = 0; which < supers_of(kind); ++which)
        std::memcpy(to->row_supers(n) + 2 * b + which, panel + place_of_super(layout, b, which, n), 2);
    }
  }
}

float decode_weight(const GroupedKind& kind, int group, const GroupedPanel& panel, int n, int k) {
  const size_t g = static_cast<size_t>(k / group);
  const float value = decode_code(kind, panel.row(n) + k * panel.code_bytes);
  const uint8_t* at = panel.row_scales(n) + g * panel.width;
  const uint8_t* min = panel.row_mins(n) + g * panel.min_width;
  if (!has_super(kind.scales)) {
    const float scale = panel.rows[n] * decode_scale(kind.scales, at);
    if (kind.mins == Mins::zeros) return scale * (value - static_cast<float>(*min));
    if (kind.mins == Mins::none) return scale * value;
    return scale * value + decode_scale(kind.mins == Mins::f16 ? Scales::f16 : Scales::f32, min);
  }
  const uint16_t* supers = panel.row_supers(n) + k / GroupedLayout::kBlock * 2;
  const float scaled = decode_f16(supers[0]) * decode_scale(kind.scales, at) * value;
  if (kind.mins == Mins::none) return scaled;
  return scaled - decode_f16(supers[1]) * static_cast<float>(kind.mins == Mins::u4 ? *at >> 4 : *min);
}

float decode_e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return std::nanf("");
  const float magnitude = exponent ? std::ldexp(static_cast<float>(8 + mantissa), exponent - 10)
                                   : std::ldexp(static_cast<float>(mantissa), -9);
  return code & 0x80 ? -magnitude : magnitude;
}

float decode_f16(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 31) return mantissa ? std::nanf("") : bits & 0x8000 ? -HUGE_VALF : HUGE_VALF;
  const float magnitude = exponent ? std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25)
                                   : std::ldexp(static_cast<float>(mantissa), -24);
  return bits & 0x8000 ? -magnitude : magnitude;
}

float decode_code(const GroupedKind& kind, const uint8_t* code) {
  static constexpr float kE2m1[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  switch (kind.codes) {
    case Codes::e4m3:
      return decode_e4m3(*code);
    case Codes::e2m1:
      return *code & 8 ? -kE2m1[*code & 7] : kE2m1[*code & 7];
    case Codes::iq4:
      return kIq4Values[*code & 15];
    case Codes::f16: {
      uint16_t half;
      std::memcpy(&half, code, 2);
      return decode_f16(half);
    }
    case Codes::f32: {
      float f;
      std::memcpy(&f, code, 4);
      return f;
    }
    default:
      return static_cast<float>(static_cast<int>(*code) - kind.offset);
  }
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
    case Scales::f16:
      std::memcpy(&half, at, 2);
      return decode_f16(half);
    case Scales::e8m0:
      return *at == 255 ? std::nanf("") : std::ldexp(1.0f, *at - 127);
    case Scales::e4m3:
      return decode_e4m3(*at);
    case Scales::u8:
      return *at;
    case Scales::s8:
      return static_cast<int8_t>(*at);
    case Scales::u4:
      return *at & 15;
  }
  return 0;
}

}  // namespace kt
