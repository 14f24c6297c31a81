// Packing: bf16 rows to panels. Plain loops, compiled with each ISA's flags; the result does not depend on them
// (-ffp-contract=off).
#pragma once

#include <cmath>
#include <cstring>

#include "base/bf16.h"
#include "formats/bf16.h"
#include "formats/int4.h"
#include "formats/int4g.h"
#include "formats/int8.h"

namespace kt {
namespace {

// x + 1.5 * 2^23 leaves round-to-nearest-even(x) in the low mantissa bits; |x| < 2^22. Vectorises, unlike lrintf.
inline int32_t round_even(float x) {
  const float shifted = x + 12582912.0f;
  int32_t bits;
  std::memcpy(&bits, &shifted, 4);
  return bits - 0x4b400000;
}

inline float row_max(const uint16_t* row, int k) {
  uint32_t largest = 0;
  for (int i = 0; i < k; ++i) {
    const uint32_t magnitude = row[i] & 0x7fffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return bf16_to_f32(static_cast<uint16_t>(largest));
}

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

// Not 1/d: with a subnormal or zero row maximum it would be infinite.
inline float safe_inverse(float d) { return d >= 1e-37f ? 1.0f / d : 0.0f; }

inline void pack_int8(const uint16_t* source, size_t row_pitch, int rows, int k, uint8_t* panel) {
  uint8_t* lines = panel + Int8::offset(0);
  std::memset(panel, 0, kLineBytes);
  std::memset(lines, Int8::kOffset, Int8::panel_bytes(k) - kLineBytes);
  uint8_t q[kActGroup];
  for (int n = 0; n < rows; ++n) {
    const uint16_t* row = source + n * row_pitch;
    const float d = row_max(row, k) / 127.0f;
    const float inverse = safe_inverse(d);
    set_row_scale(panel, n, d);
    for (int k0 = 0; k0 < k; k0 += kActGroup) {
      const int count = k - k0 < kActGroup ? k - k0 : kActGroup;
      std::memset(q, Int8::kOffset, sizeof(q));
      for (int i = 0; i < count; ++i)
        q[i] = static_cast<uint8_t>(round_even(bf16_to_f32(row[k0 + i]) * inverse) + Int8::kOffset);
      for (int i = 0; i < count; i += 4) std::memcpy(lines + (k0 + i) / 4 * kLineBytes + 4 * n, q + i, 4);
    }
  }
}

// Writes the 32 nibbles of one group of row n; lines points at the group's first line.
inline void put_group(const uint8_t* q, int n, uint8_t* lines) {
  for (int i = 0; i < 4; ++i) {
    for (int b = 0; b < 4; ++b)
      lines[i * kLineBytes + 4 * n + b] = static_cast<uint8_t>(q[4 * i + b] | q[16 + 4 * i + b] << 4);
  }
}

inline void pack_int4(const uint16_t* source, size_t row_pitch, int rows, int k, uint8_t* panel) {
  uint8_t* lines = panel + Int4::offset(0);
  std::memset(panel, 0, kLineBytes);
  std::memset(lines, Int4::kOffset * 0x11, Int4::panel_bytes(k) - kLineBytes);
  for (int n = 0; n < rows; ++n) {
    const uint16_t* row = source + n * row_pitch;
    // 112 = 7 * 16: the int8 value of a row maximum, whose high nibble then rounds to 7.
    const float d = row_max(row, k) / 112.0f;
    const float inverse = safe_inverse(d);
    set_row_scale(panel, n, d);
    for (int k0 = 0; k0 < k; k0 += 32) {
      uint8_t q[32];
      for (int i = 0; i < 32; ++i) {
        const int x = k0 + i < k ? round_even(bf16_to_f32(row[k0 + i]) * inverse) : 0;
        const int magnitude = ((x < 0 ? -x : x) + 8) >> 4;
        q[i] = static_cast<uint8_t>((x < 0 ? -magnitude : magnitude) + Int4::kOffset);
      }
      put_group(q, n, lines + k0 / 8 * kLineBytes);
    }
  }
}

// Squared error of a group quantised with scale s.
inline float group_error(const float* w, float s) {
  const float inverse = 1.0f / s;
  float error = 0;
  for (int i = 0; i < Int4g::kGroup; ++i) {
    float q = static_cast<float>(round_even(w[i] * inverse));
    q = q > 7.0f ? 7.0f : q < -8.0f ? -8.0f : q;
    const float e = w[i] - q * s;
    error += e * e;
  }
  return error;
}

inline int best_step(const float* w, float d) {
  float amax = 0;
  for (int i = 0; i < Int4g::kGroup; ++i) amax = std::fabs(w[i]) > amax ? std::fabs(w[i]) : amax;
  // The best scale lies between amax / 8 (the extreme is negative) and a little below amax / 7: one step to either side
  // of the middle covers it.
  int middle = round_even(amax / (7.6f * d));
  middle = middle < 1 ? 1 : middle > 16 ? 16 : middle;
  int best = middle;
  float least = group_error(w, d * static_cast<float>(middle));
  for (int s = middle - 1; s <= middle + 1; s += 2) {
    if (s < 1 || s > 16) continue;
    const float error = group_error(w, d * static_cast<float>(s));
    if (error < least) {
      least = error;
      best = s;
    }
  }
  return best;
}

inline void pack_int4g(const uint16_t* source, size_t row_pitch, int rows, int k, uint8_t* panel) {
  const int depth = padded_depth(k);
  std::memset(panel, 0, Int4g::panel_bytes(k));
  for (int n = 0; n < kPanelRows; ++n) {
    const uint16_t* row = source + n * row_pitch;
    // The largest group gets step 16 and spans 16 * 7.5 * d.
    const float d = n < rows ? row_max(row, k) / 120.0f : 0.0f;
    set_row_scale(panel, n, d);
    const bool empty = safe_inverse(d) == 0.0f;
    for (int k0 = 0; k0 < depth; k0 += Int4g::kGroup) {
      uint8_t* block = panel + kLineBytes + k0 / Int4g::kBlock * Int4g::kBlockBytes;
      const int group = k0 % Int4g::kBlock / Int4g::kGroup;
      float w[Int4g::kGroup];
      for (int i = 0; i < Int4g::kGroup; ++i) w[i] = !empty && k0 + i < k ? bf16_to_f32(row[k0 + i]) : 0.0f;
      const int step = empty ? 1 : best_step(w, d);
      const float inverse = empty ? 0.0f : 1.0f / (d * static_cast<float>(step));
      uint8_t q[Int4g::kGroup];
      for (int i = 0; i < Int4g::kGroup; ++i) {
        const int x = round_even(w[i] * inverse);
        q[i] = static_cast<uint8_t>((x > 7 ? 7 : x < -8 ? -8 : x) + Int4g::kOffset);
      }
      uint32_t steps;
      std::memcpy(&steps, block + 4 * n, 4);
      steps |= static_cast<uint32_t>(step - 1) << (4 * group);
      std::memcpy(block + 4 * n, &steps, 4);
      put_group(q, n, block + kLineBytes + group * 4 * kLineBytes);
    }
  }
}

}  // namespace
}  // namespace kt
