// Codes to operands: integers as bytes, e4m3 as pairs of consecutive k in the 16-bit words of a lane, f16 or bf16, all
// of them exact; and whole chunks of a panel as lines of f32 or bf16 with their scales.
#pragma once

#include <bit>
#include <type_traits>

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

// put(k, v, low, high, scale) for all pairs of kc k of a panel of e4m3: low and high are the pair of the lower and the
// upper half of the v-th vector of rows, as floats without the scale.
template <class V, class Format, class Put>
KT_INLINE void decode_e4m3_pairs(const Format& layout, const uint8_t* rows, const uint8_t* block, int kc, Put put) {
  using Words = E4m3Words<V>;
  for (int kb = 0; kb < kc; kb += GroupedLayout::kBlock, block += layout.block_bytes()) {
    const int depth = kc - kb < GroupedLayout::kBlock ? kc - kb : GroupedLayout::kBlock;
    for (int v = 0; v < kPanelRows / V::kLanes; ++v) {
      const auto unit = row_unit<V, Format>(rows, v, Words::kUnit);
      const uint8_t* lines = block + layout.head + v * V::kBytes;
      for (int k = 0; k < depth; k += kStepDepth, lines += Format::kStepBytes) {
        const auto scale = GroupTerms<V, Format>(layout, block, k / layout.group, v, unit).scale;
        Words::template pairs<1>(lines, 0, [&](int pair, const typename V::Int(&words)[1]) KT_INLINE_BODY {
          put(kb + k + 2 * pair, v, V::f16_low(words[0]), V::f16_high(words[0]), scale);
        });
      }
    }
  }
}

// put(k, v, w) for all quads of kc k of a panel of integers: w[j] is the v-th vector of rows at depth k + j.
template <class V, class Format, class Put>
KT_INLINE void decode_int_quads(const Format& layout, const uint8_t* rows, const uint8_t* block, int kc, Put put) {
  using Bytes = CodeBytes<V, Format::kKind>;
  const auto table = Bytes::table(), byte = V::set1_32(0xff);
  for (int kb = 0; kb < kc; kb += GroupedLayout::kBlock, block += layout.block_bytes()) {
    const int depth = kc - kb < GroupedLayout::kBlock ? kc - kb : GroupedLayout::kBlock;
    for (int v = 0; v < kPanelRows / V::kLanes; ++v) {
      const auto unit = row_unit<V, Format>(rows, v, Bytes::kUnit);
      const uint8_t* lines = block + layout.head + v * V::kBytes;
      for (int k = 0; k < depth; k += kStepDepth, lines += Format::kStepBytes) {
        const GroupTerms<V, Format> first(layout, block, k / layout.group, v, unit);
        const GroupTerms<V, Format> last(layout, block, k / layout.group + (Format::kHalves - 1), v, unit);
        const auto code_offset = V::set1_f32(Bytes::kOffset);
        const typename V::F32 offsets[2] = {V::sub(first.min, V::mul(first.scale, code_offset)),
                                            V::sub(last.min, V::mul(last.scale, code_offset))};
        unrolled<8>([&](auto index) KT_INLINE_BODY {
          constexpr int Q = decltype(index)::kValue;
          constexpr bool kLast = Format::kHalves == 2 && Q >= 4;
          const auto scale = kLast ? last.scale : first.scale, offset = offsets[kLast];
          const auto quad = Bytes::template quad<Q>(table, lines);
          // The bytes of a lane are k0 k2 k1 k3.
          const typename V::F32 w[4] = {
              V::fma(V::to_f32(V::bit_and(quad, byte)), scale, offset),
              V::fma(V::to_f32(V::bit_and(V::template shift_right_32<16>(quad), byte)), scale, offset),
              V::fma(V::to_f32(V::bit_and(V::template shift_right_32<8>(quad), byte)), scale, offset),
              V::fma(V::to_f32(V::template shift_right_32<24>(quad)), scale, offset)};
          put(kb + k + 4 * Q, v, w);
        });
      }
    }
  }
}

// Integers of a block of `depth` k to bytes, with the offset that kTo has.
template <class V, GroupedKind kKind, GroupedKind kTo>
void expand_block(const uint8_t* block, int depth, uint8_t* out) {
  using Format = Grouped<kKind>;
  using Bytes = CodeBytes<V, kKind>;
  constexpr GroupedLayout kLayout(kTo, kTo.least_group);
  constexpr bool kKeep = kTo.offset == 0;  // bytes as they are: their offset becomes a part of min
  const Format layout(kKind.least_group);
  const auto table = Bytes::table();
  const auto shift = V::set1_32(static_cast<int32_t>((kTo.offset - Bytes::kOffset) * 0x01010101u));
  float *scales = reinterpret_cast<float*>(out), *mins = reinterpret_cast<float*>(out + kLayout.mins_at);
  for (int v = 0; v < kPanelRows / V::kLanes; ++v) {
    for (int g = 0; g < depth / kTo.least_group; ++g) {
      const GroupTerms<V, Format> t(layout, block, g * kTo.least_group / layout.group, v, V::set1_f32(Bytes::kUnit));
      const auto offset = V::mul(t.scale, V::set1_f32(Bytes::kOffset));
      V::store_f32(scales + g * kPanelRows + v * V::kLanes, t.scale);
      if constexpr (kTo.mins != Mins::none)
        V::store_f32(mins + g * kPanelRows + v * V::kLanes, kKeep ? V::sub(t.min, offset) : t.min);
    }
    const uint8_t* lines = block + layout.head + v * V::kBytes;
    uint8_t* to = out + kLayout.head + v * V::kBytes;
    for (int k = 0; k < depth; k += kStepDepth, lines += Format::kStepBytes, to += kStepDepth / 4 * kLineBytes) {
      unrolled<8>([&](auto index) KT_INLINE_BODY {
        constexpr int Q = decltype(index)::kValue;
        const auto bytes = Bytes::template quad<Q>(table, lines);
        V::store(to + Q * kLineBytes, kKeep ? bytes : V::add_8(bytes, shift));
      });
    }
  }
}

// A type of GGUF whose blocks are expanded before use, known at run time: one kernel serves all of them.
struct Expandable : GroupedLayout {
  static constexpr GroupedKind kKind = kExpanded;
  using Expand = void (*)(const uint8_t* block, int depth, uint8_t* out);
  Expand expand;  // of raw blocks: to kExpanded
  // What many rows share.
  Expand to_bytes;
  Expand to_bf16;  // lines of pairs, for tiles; null where there are none
};
constexpr GroupedLayout kExpandedLayout(kExpanded, kExpanded.least_group);

// Floats of a file, the v-th vector of rows at depth k.
template <class V, class Format>
KT_INLINE typename V::F32 load_float(const uint8_t* lines, int k, int v) {
  constexpr int kBytes = grouped_code_bits(Format::kKind.codes) / 8;
  const uint8_t* at = lines + (static_cast<size_t>(k) * kPanelRows + v * V::kLanes) * kBytes;
  if constexpr (kBytes == 2) return V::load_f16(reinterpret_cast<const uint16_t*>(at));
  return V::load_f32(reinterpret_cast<const float*>(at));
}

template <class Format>
constexpr bool kIsFloat = Format::kKind.codes == Codes::f16 || Format::kKind.codes == Codes::f32;
template <class Format>
constexpr bool kIsE4m3 = Format::kKind.codes == Codes::e4m3;

// Lines of 16 floats, one for each k.
template <class V, class Format>
void decode_f32(const Format& layout, const uint8_t* rows, const uint8_t* blocks, int kc, float* out) {
  const auto at = [out](int k, int v) { return out + static_cast<size_t>(k) * kPanelRows + v * V::kLanes; };
  if constexpr (kIsFloat<Format>) {
    for (int k = 0; k < kc; ++k) {
      for (int v = 0; v < kPanelRows / V::kLanes; ++v) V::store_f32(at(k, v), load_float<V, Format>(blocks, k, v));
    }
  } else if constexpr (kIsE4m3<Format>) {
    decode_e4m3_pairs<V>(layout, rows, blocks, kc, [&](int k, int v, auto low, auto high, auto scale) KT_INLINE_BODY {
      V::store_f32(at(k, v), V::mul(V::even_lanes(low, high), scale));
      V::store_f32(at(k + 1, v), V::mul(V::odd_lanes(low, high), scale));
    });
  } else {
    decode_int_quads<V>(layout, rows, blocks, kc, [&](int k, int v, const auto& w) KT_INLINE_BODY {
      for (int j = 0; j < 4; ++j) V::store_f32(at(k + j, v), w[j]);
    });
  }
}

// A block of fp8 to lines of bf16 pairs if its rows share their scales, as 128 x 128 of a checkpoint do: by a table of
// all values with the scale in them (16 rows an expert, qwen3-30b on 2 cores of Zen 4: a layer in 76 ms instead of 82).
template <class V>
KT_INLINE bool decode_fp8_by_tables(const Grouped<kFp8>& layout, const uint8_t* block, int depth, uint8_t* out) {
  using Words = E4m3Bf16Words<V>;
  const float* scales = reinterpret_cast<const float*>(block);
  for (int g = 0; g * layout.group < depth; ++g) {
    const float* of_rows = scales + g * kPanelRows;
    bool same = of_rows[0] >= 0;  // the sign of a value is not in the table
    for (int r = 1; r < kPanelRows; ++r) same &= of_rows[r] == of_rows[0];
    if (!same) return false;
  }
  const uint8_t* lines = block + layout.head;
  for (int from = 0; from < depth; from += layout.group) {
    const auto tables = Words::table(scales[from / layout.group * kPanelRows]);
    const int to = from + layout.group < depth ? from + layout.group : depth;
    for (int k = from; k < to;
         k += kStepDepth, lines += Grouped<kFp8>::kStepBytes, out += kStepDepth / 2 * kLineBytes) {
      Words::template pairs<1>(tables, lines, 0, [&](int pair, const typename V::Int(&words)[1]) KT_INLINE_BODY {
        V::store(out + pair * kLineBytes, words[0]);
      });
    }
  }
  return true;
}

// e2m1 as bf16 words, 2^125 times the value: what is subtracted from them to apply a scale of 2^(e - 127) is 252 - e in
// the field of the exponent. A zero stays one, as the difference saturates; so both zeros are 0 here. Twice, since five
// bits of an index count, and of these a code has four.
struct E2m1Words {
  alignas(64) uint16_t of[32];
  constexpr E2m1Words() : of() {
    constexpr float kValues[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    for (int i = 0; i < 32; ++i) {
      const float value = kValues[i % 8] * 0x1p125f;
      of[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16 | (i & 8 && i % 8 ? 0x8000 : 0));
    }
  }
};
inline constexpr E2m1Words kE2m1Words;

// A block of mxfp4 to lines of bf16 pairs, exactly: 16 instructions for 128 weights, where decode_nibbles takes 43
// (qwen3-30b, 16 threads: 256 tokens 9.1 -> 6.0 ms, 2048 22 -> 19). False if a scale is not in 2^-125 .. 2^125, so that
// exponents might leave their field.
template <class V>
KT_INLINE bool decode_mxfp4_words(const Grouped<kMxfp4>& layout, const uint8_t* block, int depth, uint8_t* out) {
  const auto table = V::load(kE2m1Words.of), least = V::set1_32(2), most = V::set1_32(252);
  auto outside = V::set1_32(0);  // negative where a scale is
  const uint8_t* lines = block + layout.head;
  for (int k = 0; k < depth; k += kStepDepth, lines += Grouped<kMxfp4>::kStepBytes) {
    const auto scale = V::load_u8(scales_at<Grouped<kMxfp4>>(block, k / layout.group));
    const auto less = V::sub_32(most, scale);
    outside = V::bit_or(outside, V::bit_or(less, V::sub_32(scale, least)));
    const auto fields = V::bit_or(V::template shift_left_32<7>(less), V::template shift_left_32<23>(less));
    uint8_t* to = out + static_cast<size_t>(k) * (kLineBytes / 2);
    unrolled<4>([&](auto index) KT_INLINE_BODY {
      constexpr int Q = decltype(index)::kValue;
      const auto codes = V::load(lines + Q * kLineBytes);
      const auto put = [&](int pair, typename V::Int words) KT_INLINE_BODY {
        V::store(to + pair * kLineBytes, V::sub_sat_u16(V::look_up_words(table, words), fields));
      };
      put(2 * Q, codes);
      put(2 * Q + 1, V::template shift_right_16<8>(codes));
      put(8 + 2 * Q, V::template shift_right_16<4>(codes));
      put(8 + 2 * Q + 1, V::template shift_right_16<12>(codes));
    });
  }
  alignas(64) int32_t of_rows[kPanelRows];
  V::store(of_rows, outside);
  int32_t any = 0;
  for (const int32_t row : of_rows) any |= row;
  return any >= 0;
}

// Values of codes of 4 bits.
template <GroupedKind kKind>
struct NibbleValues {
  alignas(64) float of[16];
  constexpr NibbleValues() : of() {
    constexpr float kE2m1[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, 0, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    for (int i = 0; i < 16; ++i) {
      of[i] = static_cast<float>(i - kKind.offset);
      if (kKind.codes == Codes::e2m1) of[i] = kE2m1[i];
      if (kKind.codes == Codes::iq4) of[i] = kIq4Values[i];
    }
  }
};
template <GroupedKind kKind>
constexpr NibbleValues<kKind> kNibbleValues;

// What brings a pair of k to the low bits of two lanes that hold the same row.
struct PairShifts {
  alignas(64) int32_t of[4][16];
  constexpr PairShifts() : of() {
    constexpr int kEven[4] = {0, 8, 4, 12};
    for (int pair = 0; pair < 4; ++pair) {
      for (int lane = 0; lane < 16; ++lane) of[pair][lane] = kEven[pair] + lane % 2 * 16;
    }
  }
};
inline constexpr PairShifts kPairShifts;

// A block of codes of 4 bits to lines of bf16 pairs. Each lane is taken twice, so that a pair lies side by side before
// it is narrowed; decode_int_quads would take a permutation after that, and as many instructions again for its
// integers (RAWINT4 of qwen3-30b, 16 threads: 256 tokens 8.4 -> 7.8 ms, 2048 21.0 -> 20.6).
template <class V, class Format>
KT_INLINE void decode_nibbles(const Format& layout, const uint8_t* rows, const uint8_t* block, int depth,
                              uint8_t* out) {
  using F32 = typename V::F32;
  const F32 values = V::load_f32(kNibbleValues<Format::kKind>.of), unit = row_unit<V, Format>(rows, 0, 1.0f);
  const uint8_t* lines = block + layout.head;
  for (int k = 0; k < depth; k += kStepDepth, lines += Format::kStepBytes) {
    F32 scales[2][2], mins[2][2];  // of 16 k, of half of the rows
    unrolled<2>([&](auto index) KT_INLINE_BODY {
      constexpr int H = decltype(index)::kValue;
      const GroupTerms<V, Format> t(layout, block, k / layout.group + H * (Format::kHalves - 1), 0, unit);
      scales[H][0] = V::twice_low(t.scale), scales[H][1] = V::twice_high(t.scale);
      mins[H][0] = V::twice_low(t.min), mins[H][1] = V::twice_high(t.min);
    });
    const auto value = [&](typename V::Int codes, typename V::Int shifts, F32 scale, F32 min) KT_INLINE_BODY {
      const F32 of_code = V::look_up_f32(values, V::shift_right_lanes(codes, shifts));
      return Format::kKind.mins == Mins::none ? V::mul(of_code, scale) : V::fma(of_code, scale, min);
    };
    uint8_t* to = out + static_cast<size_t>(k) * (kLineBytes / 2);
    unrolled<4>([&](auto line) KT_INLINE_BODY {
      constexpr int Q = decltype(line)::kValue;
      const F32 codes = V::bits_to_f32(V::load(lines + Q * kLineBytes));
      const auto low = V::bits_of(V::twice_low(codes)), high = V::bits_of(V::twice_high(codes));
      unrolled<4>([&](auto index) KT_INLINE_BODY {
        constexpr int P = decltype(index)::kValue, H = P / 2;
        const auto shifts = V::load(kPairShifts.of[P]);
        V::store(to + (8 * H + 2 * Q + P % 2) * kLineBytes,
                 V::narrow_bf16(value(low, shifts, scales[H][0], mins[H][0]),
                                value(high, shifts, scales[H][1], mins[H][1])));
      });
    });
  }
}

// Lines of bf16 pairs, as in formats/bf16.h. Only for vectors of 16 lanes.
template <class V, class Format>
void decode_bf16(const Format& layout, const uint8_t* rows, const uint8_t* blocks, int kc, uint8_t* out) {
  const auto at = [out](int k) { return out + static_cast<size_t>(k) * (kLineBytes / 2); };
  if constexpr (kIsFloat<Format>) {
    for (int k = 0; k < kc; k += 2)
      V::store(at(k), V::narrow_pairs(load_float<V, Format>(blocks, k, 0), load_float<V, Format>(blocks, k + 1, 0)));
  } else {
    for (int k0 = 0; k0 < kc; k0 += GroupedLayout::kBlock, blocks += layout.block_bytes()) {
      const int depth = kc - k0 < GroupedLayout::kBlock ? kc - k0 : GroupedLayout::kBlock;
      if constexpr (std::is_same_v<Format, Grouped<kFp8>>) {
        if (decode_fp8_by_tables<V>(layout, blocks, depth, at(k0))) continue;
      }
      if constexpr (std::is_same_v<Format, Grouped<kMxfp4>>) {
        if (decode_mxfp4_words<V>(layout, blocks, depth, at(k0))) continue;
      }
      if constexpr (kIsE4m3<Format>) {
        decode_e4m3_pairs<V>(
            layout, rows, blocks, depth, [&](int k, int, auto low, auto high, auto scale) KT_INLINE_BODY {
              const auto first = V::mul(low, V::twice_low(scale)), last = V::mul(high, V::twice_high(scale));
              V::store(at(k0 + k), V::narrow_bf16(first, last));
            });
      } else if constexpr (grouped_code_bits(Format::kKind.codes) == 4) {
        decode_nibbles<V>(layout, rows, blocks, depth, at(k0));
      } else {
        decode_int_quads<V>(layout, rows, blocks, depth, [&](int k, int, const auto& w) KT_INLINE_BODY {
          V::store(at(k0 + k), V::narrow_pairs(w[0], w[1]));
          V::store(at(k0 + k + 2), V::narrow_pairs(w[2], w[3]));
        });
      }
    }
  }
}

template <class V>
void decode_bf16(const Expandable& layout, const uint8_t*, const uint8_t* blocks, int kc, uint8_t* out) {
  for (int k = 0; k < kc; k += GroupedLayout::kBlock, blocks += layout.block_bytes()) {
    const int depth = kc - k < GroupedLayout::kBlock ? kc - k : GroupedLayout::kBlock;
    layout.to_bf16(blocks, depth, out + static_cast<size_t>(k) / 2 * kLineBytes);
  }
}

}  // namespace
}  // namespace kt
