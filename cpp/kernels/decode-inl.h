// Chunks and blocks of a panel as lines that many rows share: f32 or bf16 with their scales, or bytes.
#pragma once

#include <bit>
#include <type_traits>

#include "kernels/codes-inl.h"

namespace kt {
namespace {

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
