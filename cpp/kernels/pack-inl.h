// Packing: bf16 rows to panels. Plain loops, compiled with each ISA's flags; the result does not depend on them
// (-ffp-contract=off).
#pragma once

#include <cstring>

#include "base/bf16.h"
#include "formats/bf16.h"
#include "formats/int4.h"
#include "formats/int4g.h"
#include "formats/int8.h"
#include "kernels/scales-inl.h"

namespace kt {
namespace {

inline void pack_bf16(const uint16_t* source, size_t row_pitch, int rows, int k, uint8_t* panel) {
  const int depth = padded_depth(k);
  std::memset(panel, 0, Bf16::panel_bytes(k));
  for (int n = 0; n < rows; ++n) {
    const uint16_t* row = source + n * row_pitch;
    uint8_t* out = panel + 4 * n;
    int i = 0;
    for (; i + 2 <= k; i += 2) std::memcpy(out + i / 2 * kLineBytes, row + i, 4);
    if (i < k && i < depth) std::memcpy(out + i / 2 * kLineBytes, row + i, 2);
  }
}

inline void set_row_scale(uint8_t* panel, int n, float d) { std::memcpy(panel + 4 * n, &d, 4); }

// Scales that a search tries, as parts of the one that clips nothing.
constexpr float kInt8Factors[] = {0.97f, 0.94f, 0.9f, 0.8f};
constexpr float kInt4Factors[] = {0.93f, 0.86f, 0.79f, 0.72f, 0.65f, 0.58f, 0.51f, 0.44f, 0.37f};

template <ScaleChoice kScales>
void pack_int8(const uint16_t* source, size_t row_pitch, int rows, int k, uint8_t* panel) {
  uint8_t* lines = panel + Int8::offset(0);
  std::memset(panel, 0, kLineBytes);
  std::memset(lines, Int8::kOffset, Int8::panel_bytes(k) - kLineBytes);
  uint8_t q[kActGroup];
  for (int n = 0; n < rows; ++n) {
    const uint16_t* row = source + n * row_pitch;
    float d = row_max(row, k) / 127.0f;
    if (kScales == ScaleChoice::searched) d = best_row_scale(row, k, d, kInt8Codes, kInt8Factors);
    const float inverse = safe_inverse(d);
    set_row_scale(panel, n, d);
    for (int k0 = 0; k0 < k; k0 += kActGroup) {
      const int count = k - k0 < kActGroup ? k - k0 : kActGroup;
      std::memset(q, Int8::kOffset, sizeof(q));
      for (int i = 0; i < count; ++i) {
        int x = round_even(bf16_to_f32(row[k0 + i]) * inverse);
        if (kScales == ScaleChoice::searched) x = x > 127 ? 127 : x < -127 ? -127 : x;
        q[i] = static_cast<uint8_t>(x + Int8::kOffset);
      }
      for (int i = 0; i < count; i += 4) std::memcpy(lines + (k0 + i) / 4 * kLineBytes + 4 * n, q + i, 4);
    }
  }
}

// Writes 32 nibbles of row n; lines points at the first of their four lines.
inline void put_group(const uint8_t* q, int n, uint8_t* lines) {
  for (int i = 0; i < 4; ++i) {
    for (int b = 0; b < 4; ++b)
      lines[i * kLineBytes + 4 * n + b] = static_cast<uint8_t>(q[4 * i + b] | q[16 + 4 * i + b] << 4);
  }
}

// 112 = 7 * 16 is the int8 value of a row maximum, whose high nibble then rounds to 7: int4 of the largest is rounded
// twice, as kt-kernel 0.4 to 0.7 did.
inline int nibble_of_int8(float x) {
  const int rounded = round_even(x);
  const int magnitude = ((rounded < 0 ? -rounded : rounded) + 8) >> 4;
  return rounded < 0 ? -magnitude : magnitude;
}

inline int nibble(float x) {
  const int rounded = round_even(x);
  return rounded > 7 ? 7 : rounded < -8 ? -8 : rounded;
}

template <ScaleChoice kScales>
void pack_int4(const uint16_t* source, size_t row_pitch, int rows, int k, uint8_t* panel) {
  uint8_t* lines = panel + Int4::offset(0);
  std::memset(panel, 0, kLineBytes);
  std::memset(lines, Int4::kOffset * 0x11, Int4::panel_bytes(k) - kLineBytes);
  for (int n = 0; n < rows; ++n) {
    const uint16_t* row = source + n * row_pitch;
    float d = row_max(row, k) / 112.0f;
    if (kScales == ScaleChoice::searched)
      d = best_row_scale(row, k, d * Int4::kStep, kNibbles, kInt4Factors) / Int4::kStep;
    const float inverse = kScales == ScaleChoice::searched ? safe_inverse(d * Int4::kStep) : safe_inverse(d);
    set_row_scale(panel, n, d);
    for (int k0 = 0; k0 < k; k0 += 32) {
      uint8_t q[32];
      for (int i = 0; i < 32; ++i) {
        const float x = k0 + i < k ? bf16_to_f32(row[k0 + i]) * inverse : 0.0f;
        q[i] = static_cast<uint8_t>((kScales == ScaleChoice::searched ? nibble(x) : nibble_of_int8(x)) + Int4::kOffset);
      }
      put_group(q, n, lines + k0 / 8 * kLineBytes);
    }
  }
}

template <ScaleChoice kScales>
void pack_int4g(const uint16_t* source, size_t row_pitch, int rows, int k, uint8_t* panel) {
  const int depth = padded_depth(k);
  std::memset(panel, 0, Int4g::panel_bytes(k));
  for (int n = 0; n < kPanelRows; ++n) {
    const uint16_t* row = source + n * row_pitch;
    // The largest group gets step 16 and spans 16 * 7.5 * d.
    float d = n < rows ? row_max(row, k) / 120.0f : 0.0f;
    const bool empty = safe_inverse(d) == 0.0f;
    if (kScales == ScaleChoice::searched && !empty) d = best_stepped_scale(row, k, d);
    set_row_scale(panel, n, d);
    for (int k0 = 0; k0 < depth; k0 += Int4g::kGroup) {
      float w[Int4g::kGroup];
      read_group(row, empty ? 0 : k, k0, w);
      constexpr bool kSearch = kScales == ScaleChoice::searched;
      const int step = empty ? 1 : best_step<kSearch ? Cost::root : Cost::one, kSearch>(w, d).step;
      const float inverse = empty ? 0.0f : 1.0f / (d * static_cast<float>(step));
      uint8_t q[Int4g::kGroup];
      for (int i = 0; i < Int4g::kGroup; ++i) q[i] = static_cast<uint8_t>(nibble(w[i] * inverse) + Int4g::kOffset);
      uint32_t steps;
      std::memcpy(&steps, panel + Int4g::steps_offset(k0, n), 4);
      steps |= static_cast<uint32_t>(step - 1) << Int4g::steps_shift(k0);
      std::memcpy(panel + Int4g::steps_offset(k0, n), &steps, 4);
      for (int i = 0; i < Int4g::kGroup; i += 32) put_group(q + i, n, panel + Int4g::lines_offset(k0 + i));
    }
  }
}

}  // namespace
}  // namespace kt
