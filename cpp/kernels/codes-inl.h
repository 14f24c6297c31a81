// Checkpoint codes to operands: pairs of consecutive k in the 16-bit words of a lane, as f16 or bf16, which are exact
// for every code, and whole chunks of a panel as lines of f32 or bf16 with their scales.
#pragma once

#include "formats/grouped.h"
#include "kernels/unroll.h"

namespace kt {
namespace {

// A checkpoint format as the kernels know it.
template <GroupedKind kOf>
struct Grouped : GroupedLayout {
  static constexpr GroupedKind kKind = kOf;
  // Lines of 32 k, and how many groups begin in them at most.
  static constexpr size_t kStepBytes = static_cast<size_t>(grouped_code_bits(kOf.codes)) * 2 * 32;
  static constexpr int kHalves = 32 / kOf.least_group;
  explicit constexpr Grouped(int size) : GroupedLayout(kOf, size) {}
};

constexpr int kStepDepth = 32;

// Vector v of a line when panels of 16 rows are cut into vectors of V::kLanes.
template <class V>
KT_INLINE const uint8_t* vector_at(const uint8_t* line, size_t panel_stride, int v) {
  constexpr int kVectors = kPanelRows / V::kLanes;
  return line + v / kVectors * panel_stride + v % kVectors * V::kBytes;
}

// visit(p, words) for the pairs p of 32 k, k = 2p and 2p + 1; words[v] holds those of the v-th vector of rows, as f16.
template <class V, Codes kCodes>
struct CodeWords {
  // The high byte of an f16 with three significant bits; the low byte of the word is 0.
  alignas(16) static constexpr uint8_t kHalfs[2][16] = {
      {0xc8, 0xc7, 0xc6, 0xc5, 0xc4, 0xc2, 0xc0, 0xbc, 0x00, 0x3c, 0x40, 0x42, 0x44, 0x45, 0x46, 0x47},
      {0x00, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, 0x80, 0xb8, 0xbc, 0xbe, 0xc0, 0xc2, 0xc4, 0xc6}};
  static constexpr float kUnit = 1.0f;

  static KT_INLINE typename V::Int table() { return V::table16(kHalfs[kCodes == Codes::e2m1]); }

  template <int N, class Visit>
  static KT_INLINE void pairs(typename V::Int table, const uint8_t* lines, size_t stride, Visit visit) {
    const auto low = V::set1_32(0x0f0f0f0f), high_byte = V::set1_32(static_cast<int32_t>(0xff00ff00));
    KT_UNROLL
    for (int i = 0; i < 4; ++i) {
      KT_UNROLL
      for (int half = 0; half < 2; ++half) {
        typename V::Int even[N], odd[N];
        KT_UNROLL
        for (int v = 0; v < N; ++v) {
          const auto bits = V::load(vector_at<V>(lines, stride, v) + i * kLineBytes);
          const auto bytes = V::look_up(table, V::bit_and(half ? V::template shift_right_16<4>(bits) : bits, low));
          even[v] = V::template shift_left_16<8>(bytes);
          odd[v] = V::bit_and(bytes, high_byte);
        }
        visit(8 * half + 2 * i, even);
        visit(8 * half + 2 * i + 1, odd);
      }
    }
  }
};

// e4m3 moved into the fields of an f16 is the value / 256, subnormals too.
template <class V>
struct CodeWords<V, Codes::e4m3> {
  static constexpr float kUnit = 256.0f;
  struct NoTable {};
  static KT_INLINE NoTable table() { return {}; }

  template <int N, class Visit>
  static KT_INLINE void pairs(NoTable, const uint8_t* lines, size_t stride, Visit visit) {
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

  static KT_INLINE Tables table() { return {V::table128(kBytes.low), V::table128(kBytes.high)}; }

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
  } else {
    return V::set1_f32(1.0f);
  }
}

// Zero points of one vector of rows, as what is taken from code - 8.
template <class V>
KT_INLINE typename V::F32 load_zeros(const uint8_t* of_panel, int v) {
  return V::sub(V::to_f32(V::load_u8(of_panel + v * V::kLanes)), V::set1_f32(8.0f));
}

// What a group makes of its codes: scale * code + offset.
template <class V, class Format>
struct GroupTerms {
  typename V::F32 scale, offset;

  KT_INLINE GroupTerms(const Format& layout, const uint8_t* block, int group, int v, typename V::F32 unit) {
    constexpr GroupedKind kKind = Format::kKind;
    scale = V::mul(unit, load_scales<V, kKind.scales>(block + group * kPanelRows * scale_bytes(kKind.scales), v));
    if constexpr (kKind.zeros) {
      offset = V::sub(V::zero_f32(), V::mul(scale, load_zeros<V>(block + layout.zeros_at + group * kPanelRows, v)));
    } else {
      offset = V::zero_f32();
    }
  }
};

template <class V, bool kOffset>
KT_INLINE typename V::F32 scaled(typename V::F32 w, typename V::F32 scale, typename V::F32 offset) {
  return kOffset ? V::fma(w, scale, offset) : V::mul(w, scale);
}

template <class V, class Format>
KT_INLINE typename V::F32 row_unit(const uint8_t* rows, int v, float unit) {
  const auto u = V::set1_f32(unit);
  if constexpr (!Format::kKind.row) return u;
  return V::mul(u, V::load_f32(reinterpret_cast<const float*>(rows) + v * V::kLanes));
}

// put(k, v, low, high, terms) for all pairs of kc k of a panel: low and high are the pair of the lower and the upper
// half of the v-th vector of rows, as floats without scales.
template <class V, class Format, class Put>
KT_INLINE void decode_pairs(const Format& layout, const uint8_t* rows, const uint8_t* block, int kc, Put put) {
  using Words = CodeWords<V, Format::kKind.codes>;
  const auto table = Words::table();
  for (int kb = 0; kb < kc; kb += GroupedLayout::kBlock, block += layout.block_bytes()) {
    const int depth = kc - kb < GroupedLayout::kBlock ? kc - kb : GroupedLayout::kBlock;
    for (int v = 0; v < kPanelRows / V::kLanes; ++v) {
      const auto unit = row_unit<V, Format>(rows, v, Words::kUnit);
      const uint8_t* lines = block + layout.head + v * V::kBytes;
      for (int k = 0; k < depth; k += kStepDepth, lines += Format::kStepBytes) {
        const GroupTerms<V, Format> first(layout, block, k / layout.group, v, unit);
        const GroupTerms<V, Format> last(layout, block, k / layout.group + (Format::kHalves - 1), v, unit);
        Words::template pairs<1>(table, lines, 0, [&](int pair, const typename V::Int(&words)[1]) KT_INLINE_BODY {
          put(kb + k + 2 * pair, v, V::f16_low(words[0]), V::f16_high(words[0]),
              Format::kHalves == 2 && pair >= 8 ? last : first);
        });
      }
    }
  }
}

// Lines of 16 floats, one for each k.
template <class V, class Format>
void decode_f32(const Format& layout, const uint8_t* rows, const uint8_t* blocks, int kc, float* out) {
  constexpr bool kOffset = Format::kKind.zeros;
  decode_pairs<V>(layout, rows, blocks, kc, [&](int k, int v, auto low, auto high, const auto& terms) KT_INLINE_BODY {
    float* to = out + static_cast<size_t>(k) * kPanelRows + v * V::kLanes;
    V::store_f32(to, scaled<V, kOffset>(V::even_lanes(low, high), terms.scale, terms.offset));
    V::store_f32(to + kPanelRows, scaled<V, kOffset>(V::odd_lanes(low, high), terms.scale, terms.offset));
  });
}

// Lines of bf16 pairs, as in formats/bf16.h. Only for vectors of 16 lanes.
template <class V, class Format>
void decode_bf16(const Format& layout, const uint8_t* rows, const uint8_t* blocks, int kc, uint8_t* out) {
  constexpr bool kOffset = Format::kKind.zeros;
  decode_pairs<V>(layout, rows, blocks, kc, [&](int k, int, auto low, auto high, const auto& t) KT_INLINE_BODY {
    const auto a = scaled<V, kOffset>(low, V::twice_low(t.scale), V::twice_low(t.offset));
    const auto b = scaled<V, kOffset>(high, V::twice_high(t.scale), V::twice_high(t.offset));
    V::store(out + static_cast<size_t>(k) / 2 * kLineBytes, V::narrow_bf16(a, b));
  });
}

}  // namespace
}  // namespace kt
