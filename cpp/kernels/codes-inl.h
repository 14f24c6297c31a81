// Codes to operands: integers as bytes, e4m3 as pairs of consecutive k in the 16-bit words of a lane, f16 or bf16, all
// of them exact; and what a group makes of their values.
#pragma once

#include <bit>

#include "formats/grouped.h"
#include "kernels/unroll.h"

namespace kt {
namespace {

// A format of formats/grouped.h as the kernels know it. Types of GGUF have one size of groups each, which is then a
// constant of their kernels.
template <GroupedKind kOf, bool kOneGroup = false>
struct Grouped : GroupedLayout {
  static constexpr GroupedKind kKind = kOf;
  // Lines of 32 k, and how many groups begin in them at most.
  static constexpr size_t kStepBytes = static_cast<size_t>(grouped_code_bits(kOf.codes)) * 2 * 32;
  static constexpr int kHalves = kOf.least_group == 16 ? 2 : 1;
  // Whether it is known that a group ends where 32 k do.
  static constexpr bool kStepEnds = kOneGroup && kOf.least_group <= 32;
  // Whether lines are read in another order than they lie in: the high bits of a step come with the first low ones.
  static constexpr bool kJumps =
      grouped_code_bits(kOf.codes) == 3 || grouped_code_bits(kOf.codes) == 5 || grouped_code_bits(kOf.codes) == 6;
  KT_LAYOUT_INLINE explicit constexpr Grouped(int size) : GroupedLayout(kOf, kOneGroup ? kOf.least_group : size) {}
};

constexpr int kStepDepth = 32;

// Vector v of a line when panels of 16 rows are cut into vectors of V::kLanes.
template <class V>
KT_INLINE const uint8_t* vector_at(const uint8_t* line, size_t panel_stride, int v) {
  constexpr int kVectors = kPanelRows / V::kLanes;
  return line + v / kVectors * panel_stride + v % kVectors * V::kBytes;
}

template <class V, int kBy>
KT_INLINE typename V::Int shift_words(typename V::Int x) {
  if constexpr (kBy > 0) {
    return V::template shift_left_16<kBy>(x);
  } else if constexpr (kBy < 0) {
    return V::template shift_right_16<-kBy>(x);
  } else {
    return x;
  }
}

// Codes as unsigned bytes, a quad of each lane: value = kUnit * (byte - kOffset).
template <class V, GroupedKind kKind>
struct CodeBytes {
  using Int = typename V::Int;
  static constexpr Codes kCodes = kKind.codes;
  static constexpr bool kTable = kCodes == Codes::e2m1 || kCodes == Codes::iq4;
  static constexpr int kOffset = kCodes == Codes::e2m1 ? 12 : kCodes == Codes::iq4 ? 128 : kKind.offset;
  static constexpr float kUnit = kCodes == Codes::e2m1 ? 0.5f : 1.0f;
  static constexpr int kBits = grouped_code_bits(kCodes);
  static constexpr int kMost = kCodes == Codes::e2m1 ? 24 : kCodes == Codes::iq4 ? 241 : (1 << kBits) - 1;

  struct Bytes {
    alignas(16) uint8_t of[16];
    constexpr Bytes() : of() {
      constexpr uint8_t kE2m1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
      for (int i = 0; i < 16; ++i)
        of[i] = kCodes == Codes::e2m1 ? kE2m1[i] : static_cast<uint8_t>(kIq4Values[i] + kOffset);
    }
  };
  static constexpr Bytes kBytes{};
  static KT_INLINE Int table() { return V::table16(kBytes.of); }

  // Bits kFrom.. of each byte moved to kTo.., `kCount` of them.
  template <int kCount, int kFrom, int kTo>
  static KT_INLINE Int field(Int bits) {
    return V::bit_and(shift_words<V, kTo - kFrom>(bits), V::set1_32((((1 << kCount) - 1) << kTo) * 0x01010101));
  }
  // Quad Q of the 32 k whose lines begin at `lines`.
  template <int Q>
  static KT_INLINE Int quad(Int table, const uint8_t* lines) {
    if constexpr (kBits == 8) return V::load(lines + Q * kLineBytes);
    constexpr int kLow = kBits >= 4 ? 4 : 2, kHigh = kBits - kLow;
    Int bytes;
    if constexpr (kLow == 4) {
      bytes = field<4, Q / 4 * 4, 0>(V::load(lines + Q % 4 * kLineBytes));
    } else {
      bytes = field<2, Q % 4 * 2, 0>(V::load(lines + Q / 4 * kLineBytes));
    }
    if constexpr (kTable) return V::look_up(table, bytes);
    const uint8_t* high = lines + kLow * kLineBytes;
    if constexpr (kHigh == 1) return V::bit_or(bytes, field<1, Q, kLow>(V::load(high)));
    if constexpr (kHigh == 2) return V::bit_or(bytes, field<2, Q % 4 * 2, kLow>(V::load(high + Q / 4 * kLineBytes)));
    return bytes;
  }
};

// e4m3 as f16. visit(p, words) for the pairs p of 32 k, k = 2p and 2p + 1; words[v] holds those of the v-th vector of
// rows.
//
// The code moved into the fields of an f16 is the value / 256, subnormals too.
template <class V>
struct E4m3Words {
  static constexpr float kUnit = 256.0f;

  template <int N, class Visit>
  static KT_INLINE void pairs(const uint8_t* lines, size_t stride, Visit visit) {
    // Sign, four bits of exponent, three of mantissa; the shift doubles the sign.
    const auto fields = V::set1_32(static_cast<int32_t>(0xbf80bf80));
    KT_UNROLL
    for (int i = 0; i < 8; ++i) {
      KT_UNROLL
      for (int odd = 0; odd < 2; ++odd) {
        typename V::Int words[N];
        KT_UNROLL
        for (int v = 0; v < N; ++v) {
          const auto bits = V::load(vector_at<V>(lines, stride, v) + i * kLineBytes);
          words[v] =
              V::bit_and(V::template shift_right_s16<1>(odd ? bits : V::template shift_left_16<8>(bits)), fields);
        }
        visit(2 * i + odd, words);
      }
    }
  }
};

// e4m3 as bf16, by looking up both bytes of the magnitude: for vectors that can.
template <class V>
struct E4m3Bf16Words {
  struct Tables {
    typename V::Table128 low, high;
  };
  struct Bytes {
    alignas(64) uint8_t low[128], high[128];
    constexpr Bytes() : low(), high() {
      for (int code = 0; code < 128; ++code) {
        int exponent = code >> 3, mantissa = code & 7;
        if (exponent == 0 && mantissa != 0) {
          // m 2^-9 with a leading one: shifted up until it has the weight of 8.
          exponent = 1;
          while (mantissa < 8) mantissa *= 2, --exponent;
        }
        const int word = code == 0 ? 0 : (exponent + 120) * 128 + (mantissa & 7) * 16;
        low[code] = static_cast<uint8_t>(word & 255);
        high[code] = static_cast<uint8_t>(word >> 8);
      }
    }
  };
  static constexpr Bytes kBytes{};
  static constexpr float kUnit = 1.0f;
  struct Magnitudes {
    alignas(64) float of[128];
    constexpr Magnitudes() : of() {
      for (int code = 0; code < 128; ++code)
        of[code] = std::bit_cast<float>((kBytes.high[code] * 256u + kBytes.low[code]) << 16);
    }
  };
  static constexpr Magnitudes kMagnitudes{};
  struct EveryOther {
    alignas(64) uint8_t even[64], odd[64];
    constexpr EveryOther() : even(), odd() {
      for (int i = 0; i < 64; ++i) even[i] = static_cast<uint8_t>(2 * i), odd[i] = static_cast<uint8_t>(2 * i + 1);
    }
  };
  static constexpr EveryOther kEveryOther{};

  static KT_INLINE Tables table() { return {V::table128(kBytes.low), V::table128(kBytes.high)}; }

  // The same of all values times a scale, rounded once: 40 instructions where the values of a group are 2048.
  static KT_INLINE Tables table(float scale) {
    constexpr int kWords = V::kBytes / 2;
    alignas(64) uint16_t words[128];
    alignas(64) uint8_t low[128], high[128];
    const auto factor = V::set1_f32(scale);
    for (int i = 0; i < 128; i += kWords) {
      const auto a = V::load_f32(kMagnitudes.of + i), b = V::load_f32(kMagnitudes.of + i + V::kLanes);
      V::store(words + i, V::narrow_bf16(V::mul(a, factor), V::mul(b, factor)));
    }
    const auto even = V::load(kEveryOther.even), odd = V::load(kEveryOther.odd);
    for (int i = 0; i < 128; i += 64) {
      const auto bytes = V::table128(words + i);
      V::store(low + i, V::look_up(bytes, even));
      V::store(high + i, V::look_up(bytes, odd));
    }
    return {V::table128(low), V::table128(high)};
  }

  template <int N, class Visit>
  static KT_INLINE void pairs(const Tables& tables, const uint8_t* lines, size_t stride, Visit visit) {
    const auto sign = V::set1_32(static_cast<int32_t>(0x80808080));
    const auto low_byte = V::set1_32(0x00ff00ff), high_byte = V::set1_32(static_cast<int32_t>(0xff00ff00));
    KT_UNROLL
    for (int i = 0; i < 8; ++i) {
      typename V::Int even[N], odd[N];
      KT_UNROLL
      for (int v = 0; v < N; ++v) {
        const auto codes = V::load(vector_at<V>(lines, stride, v) + i * kLineBytes);
        const auto low = V::look_up(tables.low, codes);
        const auto high = V::bit_or(V::look_up(tables.high, codes), V::bit_and(codes, sign));
        even[v] = V::bit_or(V::bit_and(low, low_byte), V::template shift_left_16<8>(high));
        odd[v] = V::bit_or(V::template shift_right_16<8>(low), V::bit_and(high, high_byte));
      }
      visit(2 * i, even);
      visit(2 * i + 1, odd);
    }
  }
};

// Group scales of one vector of rows, from 16 in their own width.
template <class V, Scales kScales>
KT_INLINE typename V::F32 load_scales(const uint8_t* of_panel, int v) {
  const uint8_t* p = of_panel + v * V::kLanes * scale_bytes(kScales);
  if constexpr (kScales == Scales::f32) {
    return V::load_f32(reinterpret_cast<const float*>(p));
  } else if constexpr (kScales == Scales::bf16) {
    return V::load_bf16(reinterpret_cast<const uint16_t*>(p));
  } else if constexpr (kScales == Scales::f16) {
    return V::load_f16(reinterpret_cast<const uint16_t*>(p));
  } else if constexpr (kScales == Scales::e8m0) {
    // 2^(code - 127); code 0 is 2^-127, which has no exponent field of its own.
    return V::max(V::bits_to_f32(V::template shift_left_32<23>(V::load_u8(p))), V::set1_f32(0x1p-127f));
  } else if constexpr (kScales == Scales::e4m3) {
    // Codes 0..126. The fields of an f32, less what a subnormal has too much: the smaller of (1 + m) 2^-7 2^e and
    // (1 + m) 2^-6 2^e - 2^-6 is the second exactly where e = 0.
    const auto fields = V::template shift_left_32<20>(V::load_u8(p));
    const auto normal = V::bits_to_f32(V::add_32(fields, V::set1_32(120 << 23)));
    const auto doubled = V::bits_to_f32(V::add_32(fields, V::set1_32(121 << 23)));
    return V::min(normal, V::sub(doubled, V::set1_f32(0x1p-6f)));
  } else if constexpr (kScales == Scales::u8) {
    return V::to_f32(V::load_u8(p));
  } else if constexpr (kScales == Scales::s8) {
    return V::to_f32(V::load_s8(p));
  } else if constexpr (kScales == Scales::u4) {
    return V::to_f32(V::bit_and(V::load_u8(p), V::set1_32(15)));
  } else {
    return V::set1_f32(1.0f);
  }
}

// Zeros or mins of one vector of rows, from 16 in their own width; of Mins::u4 from the 16 scales.
template <class V, Mins kMins>
KT_INLINE typename V::F32 load_mins(const uint8_t* of_panel, int v) {
  const uint8_t* p = of_panel + v * V::kLanes * (kMins == Mins::u4 ? 1 : min_bytes(kMins));
  if constexpr (kMins == Mins::f32) {
    return V::load_f32(reinterpret_cast<const float*>(p));
  } else if constexpr (kMins == Mins::f16) {
    return V::load_f16(reinterpret_cast<const uint16_t*>(p));
  } else if constexpr (kMins == Mins::u4) {
    return V::to_f32(V::template shift_right_32<4>(V::load_u8(p)));
  } else {
    return V::to_f32(V::load_u8(p));
  }
}

// Where group g of a block has its 16 scales and its 16 mins.
template <class Format>
KT_INLINE const uint8_t* scales_at(const uint8_t* block, int g) {
  return block + g * kPanelRows * scale_bytes(Format::kKind.scales);
}
template <class Format>
KT_INLINE const uint8_t* mins_at(const Format& layout, const uint8_t* block, int g) {
  if constexpr (Format::kKind.mins == Mins::u4) return scales_at<Format>(block, g);
  return block + layout.mins_at + g * kPanelRows * min_bytes(Format::kKind.mins);
}

// Super (0) or super_min (1) of a block.
template <class V, class Format>
KT_INLINE typename V::F32 load_super(const Format& layout, const uint8_t* block, int which, int v) {
  const uint8_t* at = block + layout.supers_at + (which * kPanelRows + v * V::kLanes) * 2;
  return V::load_f16(reinterpret_cast<const uint16_t*>(at));
}

// What a group makes of the values of its codes: scale * value + min.
template <class V, class Format>
struct GroupTerms {
  typename V::F32 scale, min;

  KT_INLINE GroupTerms(const Format& layout, const uint8_t* block, int group, int v, typename V::F32 unit) {
    constexpr GroupedKind kKind = Format::kKind;
    scale = V::mul(unit, load_scales<V, kKind.scales>(scales_at<Format>(block, group), v));
    if constexpr (has_super(kKind.scales)) scale = V::mul(scale, load_super<V>(layout, block, 0, v));
    min = V::zero_f32();
    if constexpr (kKind.mins != Mins::none) {
      min = load_mins<V, kKind.mins>(mins_at(layout, block, group), v);
      if constexpr (has_super_min(kKind.mins)) min = V::mul(min, load_super<V>(layout, block, 1, v));
      if constexpr (kKind.mins == Mins::zeros) min = V::mul(min, scale);
      if constexpr (kKind.mins == Mins::zeros || has_super_min(kKind.mins)) min = V::sub(V::zero_f32(), min);
    }
  }
};

template <class V, class Format>
KT_INLINE typename V::F32 row_unit(const uint8_t* rows, int v, float unit) {
  const auto u = V::set1_f32(unit);
  if constexpr (!Format::kKind.row) return u;
  return V::mul(u, V::load_f32(reinterpret_cast<const float*>(rows) + v * V::kLanes));
}

}  // namespace
}  // namespace kt
