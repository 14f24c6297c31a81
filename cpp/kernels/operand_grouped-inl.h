// Formats of formats/grouped.h times a few rows: codes are decoded in registers and each group's sum is scaled once, so
// that nothing but the packed bytes is read and no weight is rounded.
#pragma once

#include "kernels/codes-inl.h"
#include "kernels/elementwise-inl.h"
#include "kernels/isa/row.h"
#include "kernels/operand_float-inl.h"

namespace kt {
namespace {

// What the cores below have in common. They take two panels at a time, or one vector of rows where registers are few.
template <class V, class Format>
struct GroupedCore {
  static constexpr int kRows = 4;
  static constexpr int kPanels = V::kManyRegisters ? 2 : 1;
  static constexpr int kVectors = kPanelRows / V::kLanes;
  static constexpr int kDecodedBytes = 0;
  static constexpr int kChunk = 512;
  // Vectors of a full tile. Chains of float sums are counted for it, also where a call has an odd panel: the order of
  // additions must not depend on how panels are shared out.
  static constexpr int kFull = kPanels * kVectors;
  static constexpr GroupedKind kKind = Format::kKind;
  template <class>
  using Lines = void;

  // Of the v-th vector of rows, counted over the panels.
  static KT_INLINE typename V::F32 scales(const TileArgs& t, const uint8_t* block, int group, int v) {
    const uint8_t* of_panel = block + v / kVectors * t.panel_stride;
    return load_scales<V, kKind.scales>(scales_at<Format>(of_panel, group), v % kVectors);
  }
  static KT_INLINE typename V::F32 rows(const TileArgs& t, int v, float unit) {
    return row_unit<V, Format>(reinterpret_cast<const uint8_t*>(t.scales[v / kVectors]), v % kVectors, unit);
  }
  // c (+)= part * scale for the vectors from v0 on.
  template <int R, int N, class Scale>
  static KT_INLINE void add_to_c(const TileArgs& t, int v0, bool first, const typename V::F32 (&part)[R][N],
                                 Scale scale) {
    KT_UNROLL
    for (int v = 0; v < N; ++v) {
      KT_UNROLL
      for (int r = 0; r < R; ++r) {
        float* c = c_vector<V>(t, r, v0 + v);
        const auto s = scale(r, v);
        V::store_f32(c, first ? V::mul(part[r][v], s) : V::fma(part[r][v], s, V::load_f32(c)));
      }
    }
  }
};

// Decoding leaves the loads of a thread too few to cover the memory's latency; a prefetch does what they cannot. With 8
// threads on Emerald Rapids, of 81 GB/s: fp8 61 -> 71, mxfp4 60 -> 71, rawint4 61 -> 73, nvfp4 57 -> 68. Not on Zen 4,
// where it costs more than it brings (rawint4 48 -> 41); but the prefetcher of Zen 4 wants lines in their order, so the
// next step is fetched where this one jumps (one core, AVX2: Q6_K 17 -> 25 GB/s; two steps ahead 19).
template <class Format, int kPanels>
KT_INLINE void fetch_ahead(const uint8_t* lines, size_t panel_stride) {
  constexpr size_t kAhead = kFetchAhead > 0 ? kFetchAhead : Format::kJumps ? Format::kStepBytes : 0;
  if constexpr (kAhead > 0) {
    KT_UNROLL
    for (int p = 0; p < kPanels; ++p) {
      KT_UNROLL
      for (size_t b = 0; b < Format::kStepBytes; b += kLineBytes)
        __builtin_prefetch(lines + p * panel_stride + b + kAhead, 0, 3);
    }
  }
}

template <class V, int R, int N>
KT_INLINE void clear(typename V::F32 (&x)[R][N]) {
  KT_UNROLL
  for (int r = 0; r < R; ++r) {
    KT_UNROLL
    for (int v = 0; v < N; ++v) x[r][v] = V::zero_f32();
  }
}

// e4m3 as f16 words to f32, times f32 activations. A lane holds one k of a pair, so a group's sums are folded in pairs.
template <class V, class Format>
struct GroupedF32Core : GroupedCore<V, Format> {
  using Base = GroupedCore<V, Format>;
  using Words = E4m3Words<V>;
  static constexpr int kChunk = Base::kChunk;
  static constexpr int kElementBytes = 4;
  static constexpr int kInits = 0;
  template <int R>
  static constexpr bool kWhole = R <= 2 || V::kManyRegisters;

  static void gather(const Acts& acts, int row, int k0, int kc, int k, uint8_t* dst, float* s, int32_t* inits) {
    F32Core<V>::gather(acts, row, k0, kc, k, dst, s, inits);
  }

  template <class, int R, int P>
  static void tile(const TileArgs& t, Chunk<GroupedF32Core> chunk) {
    constexpr int kAll = P * kPanelRows / V::kLanes;
    constexpr int N = kWhole<R> ? kAll : 1;
    KT_UNROLL
    for (int v = 0; v < kAll; v += N) columns<R, N>(t, chunk, v);
  }

  template <int R, int N>
  static KT_INLINE void columns(const TileArgs& t, Chunk<GroupedF32Core> chunk, int v0) {
    constexpr int S = chains(R * 2 * (kWhole<R> ? Base::kFull : 1));
    constexpr size_t kPitch = Chunk<GroupedF32Core>::kPitch / 4;
    const Format layout(t.group);
    const float* a = reinterpret_cast<const float*>(chunk.base);
    typename V::F32 total[R][N];
    clear<V>(total);
    const uint8_t* block = t.lines;
    for (int kb = 0; kb < t.kc; kb += kActGroup, block += layout.block_bytes()) {
      const int depth = t.kc - kb < kActGroup ? t.kc - kb : kActGroup;
      const uint8_t* lines = block + layout.head + v0 * V::kBytes;
      for (int k = 0; k < depth;) {
        typename V::F32 acc[S * 2][R][N];
        KT_UNROLL
        for (int s = 0; s < S * 2; ++s) clear<V>(acc[s]);
        const int group = k / layout.group;
        for (const int end = k + layout.group < depth ? k + layout.group : depth; k < end;
             k += kStepDepth, a += kStepDepth, lines += Format::kStepBytes) {
          fetch_ahead<Format, div_up(N, Base::kVectors)>(lines, t.panel_stride);
          Words::template pairs<N>(lines, t.panel_stride,
                                   [&](int pair, const typename V::Int(&words)[N]) KT_INLINE_BODY {
                                     typename V::F32 w[2][N];
                                     KT_UNROLL
                                     for (int v = 0; v < N; ++v) {
                                       w[0][v] = V::f16_low(words[v]);
                                       w[1][v] = V::f16_high(words[v]);
                                     }
                                     KT_UNROLL
                                     for (int r = 0; r < R; ++r) {
                                       const auto x = V::broadcast_pair(a + r * kPitch + 2 * pair);
                                       KT_UNROLL
                                       for (int v = 0; v < N; ++v) {
                                         KT_UNROLL
                                         for (int half = 0; half < 2; ++half) {
                                           auto& sum = acc[pair % S * 2 + half][r][v];
                                           sum = V::fma(w[half][v], x, sum);
                                         }
                                       }
                                     }
                                   });
        }
        KT_UNROLL
        for (int v = 0; v < N; ++v) {
          const auto scale = Base::scales(t, block, group, v0 + v);
          KT_UNROLL
          for (int r = 0; r < R; ++r) {
            auto low = acc[0][r][v], high = acc[1][r][v];
            KT_UNROLL
            for (int s = 1; s < S; ++s) {
              low = V::add(low, acc[2 * s][r][v]);
              high = V::add(high, acc[2 * s + 1][r][v]);
            }
            total[r][v] = V::fma(V::sum_of_pairs(low, high), scale, total[r][v]);
          }
        }
      }
    }
    Base::template add_to_c<R, N>(t, v0, t.first, total,
                                  [&](int, int v) KT_INLINE_BODY { return Base::rows(t, v0 + v, Words::kUnit); });
  }
};

// e4m3 as bf16 pairs, times bf16 activations.
template <class V, class Format>
struct GroupedBf16Core : GroupedCore<V, Format> {
  using Base = GroupedCore<V, Format>;
  using Words = E4m3Bf16Words<V>;
  static constexpr int kChunk = Base::kChunk;
  static constexpr int kElementBytes = 2;
  static constexpr int kInits = 0;

  static void gather(const Acts& acts, int row, int k0, int kc, int k, uint8_t* dst, float* s, int32_t* inits) {
    Bf16Core<V>::gather(acts, row, k0, kc, k, dst, s, inits);
  }

  template <class, int R, int N>
  static void tile(const TileArgs& t, Chunk<GroupedBf16Core> chunk) {
    static_assert(V::kLanes == kPanelRows);
    constexpr int S = chains(R * Base::kFull);
    constexpr size_t kPitch = Chunk<GroupedBf16Core>::kPitch;
    const Format layout(t.group);
    const auto table = Words::table();
    const uint8_t* a = chunk.base;
    typename V::F32 total[R][N];
    clear<V>(total);
    const uint8_t* block = t.lines;
    for (int kb = 0; kb < t.kc; kb += kActGroup, block += layout.block_bytes()) {
      const int depth = t.kc - kb < kActGroup ? t.kc - kb : kActGroup;
      const uint8_t* lines = block + layout.head;
      for (int k = 0; k < depth;) {
        typename V::F32 acc[S][R][N];
        KT_UNROLL
        for (int s = 0; s < S; ++s) clear<V>(acc[s]);
        const int group = k / layout.group;
        for (const int end = k + layout.group < depth ? k + layout.group : depth; k < end;
             k += kStepDepth, a += 2 * kStepDepth, lines += Format::kStepBytes) {
          fetch_ahead<Format, N>(lines, t.panel_stride);
          Words::template pairs<N>(table, lines, t.panel_stride,
                                   [&](int pair, const typename V::Int(&words)[N]) KT_INLINE_BODY {
                                     KT_UNROLL
                                     for (int r = 0; r < R; ++r) {
                                       const auto x = V::broadcast32(a + r * kPitch + 4 * pair);
                                       KT_UNROLL
                                       for (int v = 0; v < N; ++v)
                                         acc[pair % S][r][v] = V::dot_bf16(acc[pair % S][r][v], words[v], x);
                                     }
                                   });
        }
        KT_UNROLL
        for (int v = 0; v < N; ++v) {
          const auto scale = Base::scales(t, block, group, v);
          KT_UNROLL
          for (int r = 0; r < R; ++r) {
            auto sum = acc[0][r][v];
            KT_UNROLL
            for (int s = 1; s < S; ++s) sum = V::add(sum, acc[s][r][v]);
            total[r][v] = V::fma(sum, scale, total[r][v]);
          }
        }
      }
    }
    Base::template add_to_c<R, N>(t, 0, t.first, total,
                                  [&](int, int v) KT_INLINE_BODY { return Base::rows(t, v, Words::kUnit); });
  }
};

// Activations as integers, and how products with codes are summed up. Two kinds of activations:
//   planes  128 high + low with |high| <= 64 and -64 <= low < 64: u8 x s8 twice over, four products per lane and
//           operation, half of the operations that floats would take; they err by 2^-14 of the largest of 256
//   words   16 bits, for codes so large that int16 could not hold sums of their products
template <class V>
struct Planes {
  using Int = typename V::Int;
  static constexpr bool kWords = false;
  static constexpr float kMost = 8191;
  static constexpr int kParts = 2;
  struct Acts {
    Int high, low;
  };
  using Codes = Int;
  template <int kChunk>
  static KT_INLINE Acts load(const uint8_t* a, int quad) {
    return {V::broadcast32(a + 4 * quad), V::broadcast32(a + kChunk + 4 * quad)};
  }
  static KT_INLINE Int prepare(Int bytes) { return bytes; }
};
template <class V>
struct BytePairs : Planes<V> {
  using Int = typename V::Int;
  // int16 holds 16 k, or 32, of the largest code.
  static constexpr bool holds(int code, int k) { return code * 64 * (k / 2) < 32768; }
  static KT_INLINE void dot(Int (&sum)[2], Int w, const typename Planes<V>::Acts& x) {
    sum[0] = V::add_16(sum[0], V::madd_u8s8(w, x.high));
    sum[1] = V::add_16(sum[1], V::madd_u8s8(w, x.low));
  }
  static KT_INLINE Int join(const Int (&sum)[2]) {
    return V::add_32(V::madd_s16(sum[0], V::set1_32(0x00800080)), V::madd_s16(sum[1], V::set1_32(0x00010001)));
  }
};
template <class V>
struct ByteQuads : Planes<V> {
  using Int = typename V::Int;
  static constexpr bool holds(int, int) { return true; }
  static KT_INLINE void dot(Int (&sum)[2], Int w, const typename Planes<V>::Acts& x) {
    sum[0] = V::dot_u8s8(sum[0], w, x.high);
    sum[1] = V::dot_u8s8(sum[1], w, x.low);
  }
  static KT_INLINE Int join(const Int (&sum)[2]) { return V::add_32(V::template shift_left_32<7>(sum[0]), sum[1]); }
};
template <class V>
struct WordPairs {
  using Int = typename V::Int;
  static constexpr bool kWords = true;
  static constexpr float kMost = 32767;
  static constexpr int kParts = 1;
  static constexpr bool holds(int, int) { return true; }  // int32: 255 * 32767 * 256 < 2^31
  struct Acts {
    Int even, odd;
  };
  struct Codes {
    Int even, odd;
  };
  template <int>
  static KT_INLINE Acts load(const uint8_t* a, int quad) {
    return {V::broadcast32(a + 8 * quad), V::broadcast32(a + 8 * quad + 4)};
  }
  // The bytes of a lane are k0 k2 k1 k3.
  static KT_INLINE Codes prepare(Int bytes) {
    return {V::bit_and(bytes, V::set1_32(0x00ff00ff)), V::template shift_right_16<8>(bytes)};
  }
  static KT_INLINE void dot(Int (&sum)[1], const Codes& w, const Acts& x) {
    sum[0] = V::add_32(sum[0], V::madd_s16(w.even, x.even));
    sum[0] = V::add_32(sum[0], V::madd_s16(w.odd, x.odd));
  }
  static KT_INLINE Int join(const Int (&sum)[1]) { return sum[0]; }
};

// Four k as they lie in a lane of codes: k0 k2 k1 k3.
KT_INLINE void put_swapped(const int8_t* from, int count, uint8_t* to) {
  for (int i = 0; i < count; i += 4) {
    uint32_t quad;
    std::memcpy(&quad, from + i, 4);
    quad = (quad & 0xff0000ffu) | (quad & 0x0000ff00u) << 8 | (quad & 0x00ff0000u) >> 8;
    std::memcpy(to + i, &quad, 4);
  }
}

// Codes as unsigned bytes, times integers; one scale of activations per 256.
template <class V, class Format, class Sums>
struct GroupedIntCore : GroupedCore<V, Format> {
  using Base = GroupedCore<V, Format>;
  using Bytes = CodeBytes<V, Format::kKind>;
  using Int = typename V::Int;
  static constexpr int kRows = 2;  // four at once gain nothing (AVX2: lose a fifth), and cost as much code again
  static constexpr int kChunk = Base::kChunk;
  static constexpr int kElementBytes = 2;  // planes: the high parts of a chunk, then the low ones
  static constexpr int kHalves = Format::kHalves;
  static constexpr int kSumDepth = kStepDepth / kHalves;
  static constexpr int kInits = kChunk / kSumDepth;
  static constexpr Mins kMins = Base::kKind.mins;
  static_assert(Sums::holds(Bytes::kMost, kSumDepth));

  static void gather(const Acts& acts, int row, int k0, int kc, int k, uint8_t* dst, float* scales, int32_t* sums) {
    const uint16_t* src = reinterpret_cast<const uint16_t*>(acts.data + row * acts.pitch) + k0;
    for (int g = 0; g < kc; g += kActGroup) {
      const int left = kc - g < kActGroup ? kc - g : kActGroup, valid = k - k0 - g < left ? k - k0 - g : left;
      alignas(64) float values[kActGroup];
      widen_row<V>(src + g, valid, left, values);
      const SpanScale common = scale_of_span<V>(values, left, Sums::kMost);
      scales[g / kActGroup] = common.scale;
      alignas(64) int16_t q[kActGroup];
      for (int i = 0; i < left; i += V::kLanes) {
        // An inverse of 0 stands for values that are 0, or NaN and carried by the scale.
        const auto x = V::mul(V::load_f32(values + i), V::set1_f32(common.inverse));
        V::store_low_16(q + i, common.inverse != 0.0f ? V::round_to_32(x) : V::set1_32(0));
      }
      for (int i = 0; i < left; i += kSumDepth) {
        int32_t sum = 0;
        for (int j = i; j < i + kSumDepth; ++j) sum += q[j];
        sums[(g + i) / kSumDepth] = sum;
      }
      if constexpr (Sums::kWords) {
        std::memcpy(dst + 2 * g, q, 2 * static_cast<size_t>(left));
      } else {
        put_planes(q, left, dst + g, dst + kChunk + g);
      }
    }
  }

  static KT_INLINE void put_planes(const int16_t* q, int count, uint8_t* high, uint8_t* low) {
    alignas(64) int8_t parts[2][kActGroup];
    for (int i = 0; i < count; ++i) {
      const int16_t h = static_cast<int16_t>((q[i] + 64) >> 7);
      parts[0][i] = static_cast<int8_t>(h);
      parts[1][i] = static_cast<int8_t>(q[i] - 128 * h);
    }
    put_swapped(parts[0], count, high);
    put_swapped(parts[1], count, low);
  }
  template <class, int R, int P>
  static void tile(const TileArgs& t, Chunk<GroupedIntCore> chunk) {
    constexpr int kAll = P * kPanelRows / V::kLanes;
    // Registers for fifth bits too are too few for two vectors: Q5_K on AVX2 17.6 -> 20.2 GB/s.
    constexpr bool kFits = R == 1 && Base::kKind.codes != Codes::u5;
    constexpr int N = kFits || V::kManyRegisters ? kAll : 1;
    KT_UNROLL
    for (int v = 0; v < kAll; v += N) columns<R, N>(t, chunk, v);
  }

  template <int R, int N>
  static KT_INLINE void columns(const TileArgs& t, Chunk<GroupedIntCore> chunk, int v0) {
    const Format layout(t.group);
    const uint8_t* block = t.lines;
    for (int kb = 0, index = 0; kb < t.kc; kb += kActGroup, block += layout.block_bytes(), ++index) {
      const int depth = t.kc - kb < kActGroup ? t.kc - kb : kActGroup;
      const uint8_t* lines = block + layout.head + v0 * V::kBytes;
      const uint8_t* a = chunk.base + kb * (Sums::kWords ? 2 : 1);
      const int32_t* sums = chunk.inits(0) + kb / kSumDepth;
      typename V::F32 part[R][N], lows[R][N];
      clear<V>(part);
      clear<V>(lows);
      for (int k = 0; k < depth;) {
        Int acc[kHalves][R][N];
        int32_t of_acts[kHalves][R];
        KT_UNROLL
        for (int h = 0; h < kHalves; ++h) {
          KT_UNROLL
          for (int r = 0; r < R; ++r) {
            of_acts[h][r] = 0;
            KT_UNROLL
            for (int v = 0; v < N; ++v) acc[h][r][v] = V::set1_32(0);
          }
        }
        const int group = k / layout.group;
        for (const int end = Format::kStepEnds ? k + kStepDepth : end_of_group(k, layout.group, depth); k < end;
             k += kStepDepth, a += kStepDepth * (Sums::kWords ? 2 : 1), lines += Format::kStepBytes, sums += kHalves) {
          fetch_ahead<Format, div_up(N, Base::kVectors)>(lines, t.panel_stride);
          step<R, N>(lines, t.panel_stride, a, acc);
          KT_UNROLL
          for (int h = 0; h < kHalves; ++h) {
            KT_UNROLL
            for (int r = 0; r < R; ++r) of_acts[h][r] += sums[r * kInits + h];
          }
        }
        KT_UNROLL
        for (int h = 0; h < kHalves; ++h)
          add_group<R, N>(t, layout, block, group + h, v0, acc[h], of_acts[h], part, lows);
      }
      apply_supers<R, N>(t, layout, block, v0, part, lows);
      Base::template add_to_c<R, N>(t, v0, t.first && kb == 0, part, [&](int r, int v) KT_INLINE_BODY {
        return V::mul(Base::rows(t, v0 + v, Bytes::kUnit), V::set1_f32(chunk.scales(r)[index]));
      });
    }
  }

  static KT_INLINE int end_of_group(int k, int group, int depth) {
    const int end = k + (group < kStepDepth ? kStepDepth : group);
    return end < depth ? end : depth;
  }

  static KT_INLINE const uint8_t* of_panel(const TileArgs& t, const uint8_t* block, int v) {
    return block + v / Base::kVectors * t.panel_stride;
  }

  // part += scale * (acc - offset or zero * sum of activations) [+ min * sum]; lows += min * sum where super_min scales
  // it.
  template <int R, int N>
  static KT_INLINE void add_group(const TileArgs& t, const Format& layout, const uint8_t* block, int group, int v0,
                                  const Int (&acc)[R][N], const int32_t (&of_acts)[R], typename V::F32 (&part)[R][N],
                                  typename V::F32 (&lows)[R][N]) {
    KT_UNROLL
    for (int v = 0; v < N; ++v) {
      const auto scale = Base::scales(t, block, group, v0 + v);
      auto min = V::zero_f32();
      if constexpr (kMins != Mins::none)
        min = load_mins<V, kMins>(mins_at(layout, of_panel(t, block, v0 + v), group), (v0 + v) % Base::kVectors);
      KT_UNROLL
      for (int r = 0; r < R; ++r) {
        auto sum = acc[r][v];
        if constexpr (Bytes::kOffset) sum = V::sub_32(sum, V::set1_32(Bytes::kOffset * of_acts[r]));
        auto value = V::to_f32(sum);
        const auto acts = V::to_f32(V::set1_32(kMins == Mins::zeros ? -of_acts[r] : of_acts[r]));
        if constexpr (kMins == Mins::zeros) value = V::fma(min, acts, value);
        part[r][v] = V::fma(value, scale, part[r][v]);
        if constexpr (kMins == Mins::f16 || kMins == Mins::f32) part[r][v] = V::fma(min, acts, part[r][v]);
        if constexpr (has_super_min(kMins)) lows[r][v] = V::fma(min, acts, lows[r][v]);
      }
    }
  }

  template <int R, int N>
  static KT_INLINE void apply_supers(const TileArgs& t, const Format& layout, const uint8_t* block, int v0,
                                     typename V::F32 (&part)[R][N], const typename V::F32 (&lows)[R][N]) {
    if constexpr (has_super(Base::kKind.scales)) {
      KT_UNROLL
      for (int v = 0; v < N; ++v) {
        const uint8_t* at = of_panel(t, block, v0 + v);
        const auto super = load_super<V>(layout, at, 0, (v0 + v) % Base::kVectors);
        KT_UNROLL
        for (int r = 0; r < R; ++r) part[r][v] = V::mul(part[r][v], super);
        if constexpr (has_super_min(kMins)) {
          const auto super_min = load_super<V>(layout, at, 1, (v0 + v) % Base::kVectors);
          KT_UNROLL
          for (int r = 0; r < R; ++r) part[r][v] = V::sub(part[r][v], V::mul(lows[r][v], super_min));
        }
      }
    }
  }

  // 32 k; with half groups the first four quads are one and the others the next.
  template <int R, int N>
  static KT_INLINE void step(const uint8_t* lines, size_t stride, const uint8_t* a, Int (&acc)[kHalves][R][N]) {
    constexpr int kQuads = 8 / kHalves;
    constexpr size_t kPitch = Chunk<GroupedIntCore>::kPitch;
    const Int table = Bytes::table();
    unrolled<kHalves>([&](auto half) KT_INLINE_BODY {
      constexpr int H = decltype(half)::kValue;
      Int sum[R][N][Sums::kParts];
      KT_UNROLL
      for (int r = 0; r < R; ++r) {
        KT_UNROLL
        for (int v = 0; v < N; ++v) {
          KT_UNROLL
          for (int p = 0; p < Sums::kParts; ++p) sum[r][v][p] = V::set1_32(0);
        }
      }
      unrolled<kQuads>([&](auto index) KT_INLINE_BODY {
        // A line of nibbles holds the quads i and i + 4: one after the other.
        constexpr int I = decltype(index)::kValue, Q = kHalves == 2 ? H * kQuads + I : I % 2 * 4 + I / 2;
        typename Sums::Codes w[N];
        KT_UNROLL
        for (int v = 0; v < N; ++v) {
          // gcc 12 holds on to lines until both nibbles are used, and spills: mxfp4 on AVX2 14.8 -> 21.1 GB/s.
          const uint8_t* at = vector_at<V>(Bytes::kTable && !Sums::kWords ? fresh(lines) : lines, stride, v);
          w[v] = Sums::prepare(Bytes::template quad<Q>(table, at));
        }
        KT_UNROLL
        for (int r = 0; r < R; ++r) {
          const auto x = Sums::template load<kChunk>(a + r * kPitch, Q);
          KT_UNROLL
          for (int v = 0; v < N; ++v) Sums::dot(sum[r][v], w[v], x);
        }
      });
      KT_UNROLL
      for (int r = 0; r < R; ++r) {
        KT_UNROLL
        for (int v = 0; v < N; ++v) acc[H][r][v] = V::add_32(acc[H][r][v], Sums::join(sum[r][v]));
      }
    });
  }
};

}  // namespace
}  // namespace kt
