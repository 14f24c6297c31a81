#include "formats/codes.h"

#include <algorithm>
#include <cstring>

#include "formats/format.h"
#include "formats/int4.h"
#include "formats/int4g.h"
#include "formats/int8.h"
#include "formats/nibbles.h"

namespace kt {
namespace {

constexpr int kNibbleGroup = 32;  // k of the four lines that int4 and int4g share nibbles in

void put_int8(const PanelCodes& from, uint8_t* panel) {
  uint8_t* lines = panel + Int8::offset(0);
  for (int n = 0; n < kPanelRows; ++n) {
    const int8_t* row = from.row(n);
    for (int k = 0; k < from.pitch; k += 4) {
      uint32_t quad;
      std::memcpy(&quad, row + k, 4);
      quad ^= 0x80808080u;  // + Int8::kOffset in each byte
      std::memcpy(lines + k / 4 * kLineBytes + 4 * n, &quad, 4);
    }
  }
}

void get_int8(const uint8_t* panel, PanelCodes* to) {
  const uint8_t* lines = panel + Int8::offset(0);
  for (int n = 0; n < kPanelRows; ++n) {
    for (int k = 0; k < to->pitch; k += 4) {
      uint32_t quad;
      std::memcpy(&quad, lines + k / 4 * kLineBytes + 4 * n, 4);
      quad ^= 0x80808080u;
      std::memcpy(to->row(n) + k, &quad, 4);
    }
  }
}

// The 32 nibbles of row n whose four lines start at `lines`; the layout is told in formats/int4.h.
void put_nibbles(const int8_t* codes, int n, uint8_t* lines) {
  for (int i = 0; i < 4; ++i) {
    const uint64_t low = codes_to_offset(load_u32(codes + 4 * i));
    const uint64_t high = codes_to_offset(load_u32(codes + 16 + 4 * i));
    const uint32_t quad = static_cast<uint32_t>(low | high << 4);
    std::memcpy(lines + i * kLineBytes + 4 * n, &quad, 4);
  }
}

void get_nibbles(const uint8_t* lines, int n, int8_t* codes) {
  for (int i = 0; i < 4; ++i) {
    const uint32_t quad = load_u32(lines + i * kLineBytes + 4 * n);
    const uint64_t low = offset_to_codes(quad & each_byte(15)), high = offset_to_codes(quad >> 4 & each_byte(15));
    std::memcpy(codes + 4 * i, &low, 4);
    std::memcpy(codes + 16 + 4 * i, &high, 4);
  }
}

// Where the lines of the group at depth k start.
size_t group_offset(Format format, int k) {
  if (format == Format::int4) return Int4::offset(k);
  return Int4g::lines_offset(k);
}

void put_steps(const PanelCodes& from, int n, uint8_t* panel) {
  for (int k0 = 0; k0 < from.pitch; k0 += Int4g::kBlock) {
    uint32_t word = 0;
    for (int k = k0; k < std::min(k0 + Int4g::kBlock, from.pitch); k += Int4g::kGroup) {
      word |= static_cast<uint32_t>(from.row_steps(n)[k / Int4g::kGroup] - 1) << Int4g::steps_shift(k);
    }
    std::memcpy(panel + Int4g::steps_offset(k0, n), &word, 4);
  }
}

void get_steps(const uint8_t* panel, int n, PanelCodes* to) {
  for (int k = 0; k < to->pitch; k += Int4g::kGroup) {
    uint32_t word;
    std::memcpy(&word, panel + Int4g::steps_offset(k, n), 4);
    to->row_steps(n)[k / Int4g::kGroup] = static_cast<uint8_t>((word >> Int4g::steps_shift(k) & 15) + 1);
  }
}

}  // namespace

int code_bits(Format format) {
  switch (format) {
    case Format::bf16:
      return 0;
    case Format::int8:
      return 8;
    case Format::int4:
    case Format::int4g:
      return 4;
    default:
      return 0;
  }
}

bool has_steps(Format format) { return format == Format::int4g; }

void PanelCodes::reset(int depth) {
  k = depth;
  pitch = padded_depth(depth);
  step_pitch = pitch / Int4g::kGroup;
  codes.assign(static_cast<size_t>(kPanelRows) * pitch, 0);
  steps.assign(static_cast<size_t>(kPanelRows) * step_pitch, 1);
  std::fill_n(scales, kPanelRows, 0.0f);
}

void put_codes(Format format, const PanelCodes& from, uint8_t* panel) {
  std::memcpy(panel, from.scales, sizeof(from.scales));
  if (format == Format::int8) return put_int8(from, panel);
  for (int n = 0; n < kPanelRows; ++n) {
    for (int k = 0; k < from.pitch; k += kNibbleGroup) put_nibbles(from.row(n) + k, n, panel + group_offset(format, k));
    if (has_steps(format)) put_steps(from, n, panel);
  }
}

void get_codes(Format format, const uint8_t* panel, int k_packed, PanelCodes* to) {
  to->reset(k_packed);
  std::memcpy(to->scales, panel, sizeof(to->scales));
  if (format == Format::int8) return get_int8(panel, to);
  for (int n = 0; n < kPanelRows; ++n) {
    for (int k = 0; k < to->pitch; k += kNibbleGroup) get_nibbles(panel + group_offset(format, k), n, to->row(n) + k);
    if (has_steps(format)) get_steps(panel, n, to);
  }
}

}  // namespace kt
