// Blocks with codebooks: points of a grid, signs apart from them, and scales of 16 or 32 weights.
//
// A row of 256 becomes bytes value + 128 and a float scale per 16.
#include <emmintrin.h>

#include <cstring>

#include "formats/gguf.h"
#include "formats/gguf_grids.h"

namespace kt {
namespace {

uint16_t load_u16(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return bits;
}
uint32_t load_u32(const uint8_t* at) {
  uint32_t bits;
  std::memcpy(&bits, at, 4);
  return bits;
}

// Points as eight, or four, bytes: magnitudes, or 128 + 8 times a ternary value. Signs: a byte of 0xff where the bit is
// set.
struct Tables {
  uint64_t iq2_xxs[256], iq2_xs[512], iq2_s[1024], iq1[2048];
  uint32_t iq3_xxs[256], iq3_s[512];
  uint64_t signs[256];
  uint8_t even[128];  // seven signs, and the eighth that makes their number even

  template <class Point, int kCount>
  static void widen(const uint16_t (&packed)[kCount], const uint8_t* levels, Point* to) {
    constexpr int kBits = sizeof(Point) == 4 ? 3 : 2;
    for (int i = 0; i < kCount; ++i) {
      to[i] = 0;
      for (unsigned j = 0; j < sizeof(Point); ++j)
        to[i] |= static_cast<Point>(levels[packed[i] >> kBits * j & ((1 << kBits) - 1)]) << 8 * j;
    }
  }

  Tables() {
    static constexpr uint8_t kTwo[] = {8, 25, 43, 0}, kOne[] = {120, 128, 136, 0};
    static constexpr uint8_t kThree[] = {4, 12, 20, 28, 36, 44, 52, 62}, kOdd[] = {1, 3, 5, 7, 9, 11, 13, 15};
    widen(kIq2Xxs, kTwo, iq2_xxs);
    widen(kIq2Xs, kTwo, iq2_xs);
    widen(kIq2S, kTwo, iq2_s);
    widen(kIq1, kOne, iq1);
    widen(kIq3Xxs, kThree, iq3_xxs);
    widen(kIq3S, kOdd, iq3_s);
    for (int i = 0; i < 256; ++i) {
      signs[i] = 0;
      for (int j = 0; j < 8; ++j) signs[i] |= i >> j & 1 ? uint64_t{0xff} << 8 * j : 0;
    }
    for (int i = 0; i < 128; ++i) even[i] = static_cast<uint8_t>(i | __builtin_parity(static_cast<unsigned>(i)) << 7);
  }
};

const Tables& tables() {
  static const Tables made;
  return made;
}

// Finite ones. A subnormal is the difference of two floats that have the same exponent.
float f16_to_f32(uint16_t half) {
  const uint32_t magnitude = half & 0x7fffu;
  uint32_t bits = (magnitude << 13) + (112u << 23);
  float f, bias;
  if (magnitude < 0x400u) {
    const uint32_t one = 113u << 23;
    bits = (magnitude << 13) + one;
    std::memcpy(&f, &bits, 4);
    std::memcpy(&bias, &one, 4);
    f -= bias;
  } else {
    std::memcpy(&f, &bits, 4);
  }
  return half & 0x8000u ? -f : f;
}

constexpr uint64_t kEvery = 0x0101010101010101u;

// Bytes x of 1..62, negated where a sign is set, plus 128. None is 0, so no byte carries into the next.
uint64_t signed_bytes(uint64_t x, uint64_t signs) { return ((x ^ signs) + (signs & kEvery)) ^ 0x80 * kEvery; }

struct Row {
  alignas(16) uint64_t points[32];  // eight k each
  float scales[16];
};

// 7 bits of signs each.
void put_iq2_xxs(const Tables& t, const uint8_t* block, Row* row) {
  const float d = f16_to_f32(load_u16(block));
  for (int i = 0; i < 8; ++i) {
    const uint8_t* at = block + 2 + 8 * i;
    const uint32_t rest = load_u32(at + 4);
    row->scales[2 * i] = row->scales[2 * i + 1] = d * (0.5f + static_cast<float>(rest >> 28)) * 0.25f;
    for (int j = 0; j < 4; ++j)
      row->points[4 * i + j] = signed_bytes(t.iq2_xxs[at[j]], t.signs[t.even[rest >> 7 * j & 127]]);
  }
}

void put_pairs_of_scales(float d, const uint8_t* nibbles, Row* row) {
  for (int i = 0; i < 16; ++i)
    row->scales[i] = d * (0.5f + static_cast<float>(nibbles[i / 2] >> i % 2 * 4 & 15)) * 0.25f;
}

void put_iq2_xs(const Tables& t, const uint8_t* block, Row* row) {
  put_pairs_of_scales(f16_to_f32(load_u16(block)), block + 66, row);
  for (int i = 0; i < 32; ++i) {
    const int word = load_u16(block + 2 + 2 * i);
    row->points[i] = signed_bytes(t.iq2_xs[word & 511], t.signs[t.even[word >> 9]]);
  }
}

void put_iq2_s(const Tables& t, const uint8_t* block, Row* row) {
  put_pairs_of_scales(f16_to_f32(load_u16(block)), block + 74, row);
  for (int i = 0; i < 32; ++i) {
    const int high = block[66 + i / 4] >> i % 4 * 2 & 3;
    row->points[i] = signed_bytes(t.iq2_s[block[2 + i] | high << 8], t.signs[block[34 + i]]);
  }
}

uint64_t two_points(uint32_t first, uint32_t second) { return first | static_cast<uint64_t>(second) << 32; }

void put_iq3_xxs(const Tables& t, const uint8_t* block, Row* row) {
  const float d = f16_to_f32(load_u16(block));
  for (int i = 0; i < 8; ++i) {
    const uint8_t* at = block + 2 + 8 * i;
    const uint32_t rest = load_u32(block + 66 + 4 * i);
    row->scales[2 * i] = row->scales[2 * i + 1] = d * (0.5f + static_cast<float>(rest >> 28)) * 0.5f;
    for (int j = 0; j < 4; ++j) {
      row->points[4 * i + j] = signed_bytes(two_points(t.iq3_xxs[at[2 * j]], t.iq3_xxs[at[2 * j + 1]]),
                                            t.signs[t.even[rest >> 7 * j & 127]]);
    }
  }
}

void put_iq3_s(const Tables& t, const uint8_t* block, Row* row) {
  const float d = f16_to_f32(load_u16(block));
  for (int i = 0; i < 32; ++i) {
    const uint8_t* at = block + 2 + 2 * i;
    const int high = block[66 + i / 4] >> i % 4 * 2;
    const uint32_t first = t.iq3_s[at[0] | (high & 1) << 8], second = t.iq3_s[at[1] | (high & 2) << 7];
    row->points[i] = signed_bytes(two_points(first, second), t.signs[block[74 + i]]);
  }
  for (int i = 0; i < 16; ++i)
    row->scales[i] = d * static_cast<float>(1 + 2 * (block[106 + i / 4] >> i / 2 % 2 * 4 & 15));
}

// Ternary points and a shift of an eighth: bytes hold 128 + 8 times the value.
uint64_t shifted_point(uint64_t point, bool down) { return down ? point - kEvery : point + kEvery; }

void put_iq1_s(const Tables& t, const uint8_t* block, Row* row) {
  const float d = f16_to_f32(load_u16(block));
  for (int i = 0; i < 8; ++i) {
    const int high = load_u16(block + 34 + 2 * i);
    row->scales[2 * i] = row->scales[2 * i + 1] = d * static_cast<float>(2 * (high >> 12 & 7) + 1) * 0.125f;
    for (int j = 0; j < 4; ++j)
      row->points[4 * i + j] = shifted_point(t.iq1[block[2 + 4 * i + j] | (high >> 3 * j & 7) << 8], high & 0x8000);
  }
}

void put_iq1_m(const Tables& t, const uint8_t* block, Row* row) {
  int bits = 0;
  for (int i = 0; i < 4; ++i) bits |= (load_u16(block + 48 + 2 * i) >> 12) << 4 * i;
  const float d = f16_to_f32(static_cast<uint16_t>(bits));
  for (int i = 0; i < 16; ++i) {
    const int scale = load_u16(block + 48 + i / 4 * 2) >> i % 4 * 3 & 7;
    row->scales[i] = d * static_cast<float>(2 * scale + 1) * 0.125f;
  }
  for (int i = 0; i < 32; ++i) {
    const int high = block[32 + i / 2] >> i % 2 * 4;
    row->points[i] = shifted_point(t.iq1[block[i] | (high & 7) << 8], high & 8);
  }
}

// Five ternary digits in a byte, the first one highest: times 3^i, the digit is what three times the byte carries.
void put_tq1_0(const uint8_t* block, Row* row) {
  static constexpr uint8_t kPowers[] = {1, 3, 9, 27, 81};
  uint8_t bytes[256];
  uint8_t* to = bytes;
  const auto put = [&to](const uint8_t* from, int count, int digits) {
    for (int digit = 0; digit < digits; ++digit) {
      for (int i = 0; i < count; ++i) {
        const uint8_t moved = static_cast<uint8_t>(from[i] * kPowers[digit]);
        *to++ = static_cast<uint8_t>((moved * 3 >> 8) + 127);
      }
    }
  };
  put(block, 32, 5);
  put(block + 32, 16, 5);
  put(block + 48, 4, 4);
  std::memcpy(row->points, bytes, sizeof(bytes));
  const float d = f16_to_f32(load_u16(block + 52));
  for (float& scale : row->scales) scale = d;
}

void put_row(const Tables& t, Format format, const uint8_t* block, Row* row) {
  switch (format) {
    case Format::iq2_xxs:
      return put_iq2_xxs(t, block, row);
    case Format::iq2_xs:
      return put_iq2_xs(t, block, row);
    case Format::iq2_s:
      return put_iq2_s(t, block, row);
    case Format::iq3_xxs:
      return put_iq3_xxs(t, block, row);
    case Format::iq3_s:
      return put_iq3_s(t, block, row);
    case Format::iq1_s:
      return put_iq1_s(t, block, row);
    case Format::iq1_m:
      return put_iq1_m(t, block, row);
    default:
      return put_tq1_0(block, row);
  }
}

// 16 bytes: k0 k1 k2 k3 to k0 k2 k1 k3, four times.
__m128i swap_middles(__m128i x) {
  const __m128i outer = _mm_and_si128(x, _mm_set1_epi32(static_cast<int>(0xff0000ffu)));
  const __m128i up = _mm_slli_epi32(_mm_and_si128(x, _mm_set1_epi32(0x0000ff00)), 8);
  const __m128i down = _mm_srli_epi32(_mm_and_si128(x, _mm_set1_epi32(0x00ff0000)), 8);
  return _mm_or_si128(outer, _mm_or_si128(up, down));
}

// Four rows, 16 k of each, to the lanes of four lines.
void put_lanes(const Row* rows, int k, uint8_t* lines) {
  __m128i x[4];
  for (int n = 0; n < 4; ++n)
    x[n] = swap_middles(_mm_load_si128(reinterpret_cast<const __m128i*>(rows[n].points + k / 8)));
  const __m128i ab01 = _mm_unpacklo_epi32(x[0], x[1]), ab23 = _mm_unpackhi_epi32(x[0], x[1]);
  const __m128i cd01 = _mm_unpacklo_epi32(x[2], x[3]), cd23 = _mm_unpackhi_epi32(x[2], x[3]);
  const __m128i out[4] = {_mm_unpacklo_epi64(ab01, cd01), _mm_unpackhi_epi64(ab01, cd01),
                          _mm_unpacklo_epi64(ab23, cd23), _mm_unpackhi_epi64(ab23, cd23)};
  for (int i = 0; i < 4; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(lines + i * kLineBytes), out[i]);
}

}  // namespace

void expand_raw(Format format, const uint8_t* blocks, bool without_mins, uint8_t* out) {
  const Tables& t = tables();
  constexpr GroupedLayout kLayout(kExpanded, 16), kNoMins(kSigned16, 16);
  const size_t bytes = static_cast<size_t>(gguf_block(format).bytes);
  float* scales = reinterpret_cast<float*>(out);
  if (!without_mins) std::memset(out + kLayout.mins_at, 0, kLayout.head - kLayout.mins_at);
  uint8_t* lines = out + (without_mins ? kNoMins.head : kLayout.head);
  for (int n = 0; n < kPanelRows; n += 4) {
    Row rows[4];
    for (int i = 0; i < 4; ++i, blocks += bytes) {
      put_row(t, format, blocks, &rows[i]);
      for (int g = 0; g < 16; ++g) scales[g * kPanelRows + n + i] = rows[i].scales[g];
    }
    for (int k = 0; k < 256; k += 16) put_lanes(rows, k, lines + static_cast<size_t>(k) / 4 * kLineBytes + 4 * n);
  }
}

}  // namespace kt
