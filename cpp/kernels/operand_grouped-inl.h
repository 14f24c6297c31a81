// Checkpoint formats times a few rows: codes are decoded in registers and each group's sum is scaled once, so that
// nothing but the packed bytes is read and no weight is rounded.
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
    return load_scales<V, kKind.scales>(of_panel + group * kPanelRows * scale_bytes(kKind.scales), v % kVectors);
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
        float* c = t.c + r * t.c_pitch + (v0 + v) * V::kLanes;
        const auto s = scale(r, v);
        V::store_f32(c, first ? V::mul(part[r][v], s) : V::fma(part[r][v], s, V::load_f32(c)));
      }
    }
  }
};

// Decoding leaves the loads of a thread too few to cover the memory's latency; a prefetch does what they cannot. With 8
// threads on Emerald Rapids, of 81 GB/s: fp8 61 -> 71, mxfp4 60 -> 71, rawint4 61 -> 73, nvfp4 57 -> 68. Not on Zen 4,
// where it costs more than it brings (rawint4 48 -> 41).
template <size_t kBytes, int kPanels>
KT_INLINE void fetch_ahead(const uint8_t* lines, size_t panel_stride) {
  if constexpr (kFetchAhead > 0) {
    KT_UNROLL
    for (int p = 0; p < kPanels; ++p) {
      KT_UNROLL
      for (size_t b = 0; b < kBytes; b += kLineBytes)
        __builtin_prefetch(lines + p * panel_stride + b + kFetchAhead, 0, 3);
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
  using Words = CodeWords<V, Codes::e4m3>;
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
    const auto table = Words::table();
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
          fetch_ahead<Format::kStepBytes, div_up(N, Base::kVectors)>(lines, t.panel_stride);
          Words::template pairs<N>(table, lines, t.panel_stride,
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
          fetch_ahead<Format::kStepBytes, N>(lines, t.panel_stride);
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

// How sums of u8 x s8 over 32 k become int32.
template <class V>
struct BytePairs {
  // int16 holds 32 k: 8 sums of two products within 24 * 64 each.
  static_assert(8 * 2 * 24 * 64 < 32768);
  static KT_INLINE typename V::Int dot(typename V::Int sum, typename V::Int w, typename V::Int x) {
    return V::add_16(sum, V::madd_u8s8(w, x));
  }
  static KT_INLINE typename V::Int join(typename V::Int high, typename V::Int low) {
    return V::add_32(V::madd_s16(high, V::set1_32(0x00800080)), V::madd_s16(low, V::set1_32(0x00010001)));
  }
};
template <class V>
struct ByteQuads {
  static KT_INLINE typename V::Int dot(typename V::Int sum, typename V::Int w, typename V::Int x) {
    return V::dot_u8s8(sum, w, x);
  }
  static KT_INLINE typename V::Int join(typename V::Int high, typename V::Int low) {
    return V::add_32(V::template shift_left_32<7>(high), low);
  }
};

// 4 bits: codes as unsigned bytes, activations as 128 high + low with |high| <= 64 and -64 <= low < 64, one scale per
// 256. Four products per lane and operation twice over take half of the operations that floats would; the activations
// err by 2^-14 of the largest of 256.
template <class V, class Format, class Sums>
struct GroupedIntCore : GroupedCore<V, Format> {
  using Base = GroupedCore<V, Format>;
  static constexpr int kChunk = Base::kChunk;
  static constexpr int kElementBytes = 2;  // the high parts of a chunk, then the low ones
  static constexpr int kHalves = Format::kHalves;
  static constexpr int kSumDepth = kStepDepth / kHalves;
  static constexpr int kInits = kChunk / kSumDepth;
  static constexpr float kMost = 8191;
  static constexpr bool kTable = Base::kKind.codes == Codes::e2m1;
  // value = kUnit * (byte - kOffset)
  static constexpr int kOffset = kTable ? 12 : 8;
  static constexpr float kUnit = kTable ? 0.5f : 1.0f;
  alignas(16) static constexpr uint8_t kBytes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

  static void gather(const Acts& acts, int row, int k0, int kc, int k, uint8_t* dst, float* scales, int32_t* sums) {
    const uint16_t* src = reinterpret_cast<const uint16_t*>(acts.data + row * acts.pitch) + k0;
    for (int g = 0; g < kc; g += kActGroup) {
      const int left = kc - g < kActGroup ? kc - g : kActGroup, valid = k - k0 - g < left ? k - k0 - g : left;
      alignas(64) float values[kActGroup];
      widen_row<V>(src + g, valid, left, values);
      const SpanScale common = scale_of_span<V>(values, left, kMost);
      scales[g / kActGroup] = common.scale;
      alignas(64) int8_t high[kActGroup], low[kActGroup];
      for (int i = 0; i < left; i += V::kLanes) {
        auto q = V::set1_32(0);
        // An inverse of 0 stands for values that are 0, or NaN and carried by the scale.
        if (common.inverse != 0.0f) q = V::round_to_32(V::mul(V::load_f32(values + i), V::set1_f32(common.inverse)));
        // floor((q + 64) / 128), by a logical shift of what is not negative
        const auto h = V::sub_32(V::template shift_right_32<7>(V::add_32(q, V::set1_32(64 + 8192))), V::set1_32(64));
        V::store_low_8(high + i, h);
        V::store_low_8(low + i, V::sub_32(q, V::template shift_left_32<7>(h)));
      }
      for (int i = 0; i < left; i += kSumDepth) {
        int32_t sum = 0;
        for (int j = i; j < i + kSumDepth; ++j) sum += 128 * high[j] + low[j];
        sums[(g + i) / kSumDepth] = sum;
      }
      put_swapped(high, left, dst + g);
      put_swapped(low, left, dst + kChunk + g);
    }
  }

  // Four k as they lie in a lane of codes: k0 k2 k1 k3.
  static KT_INLINE void put_swapped(const int8_t* from, int count, uint8_t* to) {
    for (int i = 0; i < count; i += 4) {
      uint32_t quad;
      std::memcpy(&quad, from + i, 4);
      quad = (quad & 0xff0000ffu) | (quad & 0x0000ff00u) << 8 | (quad & 0x00ff0000u) >> 8;
      std::memcpy(to + i, &quad, 4);
    }
  }

  template <class, int R, int P>
  static void tile(const TileArgs& t, Chunk<GroupedIntCore> chunk) {
    constexpr int kAll = P * kPanelRows / V::kLanes;
    constexpr int N = R == 1 || V::kManyRegisters ? kAll : 1;
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
      const uint8_t* a = chunk.base + kb;
      const int32_t* sums = chunk.inits(0) + kb / kSumDepth;
      typename V::F32 part[R][N];
      clear<V>(part);
      for (int k = 0; k < depth;) {
        typename V::Int acc[kHalves][R][N];
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
        const int span = layout.group < kStepDepth ? kStepDepth : layout.group;
        for (const int end = k + span < depth ? k + span : depth; k < end;
             k += kStepDepth, a += kStepDepth, lines += Format::kStepBytes, sums += kHalves) {
          fetch_ahead<Format::kStepBytes, div_up(N, Base::kVectors)>(lines, t.panel_stride);
          step<R, N>(lines, t.panel_stride, a, acc);
          KT_UNROLL
          for (int h = 0; h < kHalves; ++h) {
            KT_UNROLL
            for (int r = 0; r < R; ++r) of_acts[h][r] += sums[r * kInits + h];
          }
        }
        KT_UNROLL
        for (int h = 0; h < kHalves; ++h) {
          KT_UNROLL
          for (int v = 0; v < N; ++v) {
            const auto scale = Base::scales(t, block, group + h, v0 + v);
            KT_UNROLL
            for (int r = 0; r < R; ++r) {
              typename V::F32 value;
              if constexpr (Base::kKind.zeros) {
                const uint8_t* of_panel = vector_at_bytes(t, block + layout.zeros_at + group * kPanelRows, v0 + v);
                const auto zeros = V::to_f32(V::load_u8(of_panel));
                value = V::fma(zeros, V::set1_f32(-static_cast<float>(of_acts[h][r])), V::to_f32(acc[h][r][v]));
              } else {
                value = V::to_f32(V::sub_32(acc[h][r][v], V::set1_32(kOffset * of_acts[h][r])));
              }
              part[r][v] = V::fma(value, scale, part[r][v]);
            }
          }
        }
      }
      Base::template add_to_c<R, N>(t, v0, t.first && kb == 0, part, [&](int r, int v) KT_INLINE_BODY {
        return V::mul(Base::rows(t, v0 + v, kUnit), V::set1_f32(chunk.scales(r)[index]));
      });
    }
  }

  static KT_INLINE const uint8_t* vector_at_bytes(const TileArgs& t, const uint8_t* bytes, int v) {
    return bytes + v / Base::kVectors * t.panel_stride + v % Base::kVectors * V::kLanes;
  }

  // 32 k. With half groups the low nibbles are the first and the high ones the second.
  template <int R, int N>
  static KT_INLINE void step(const uint8_t* lines, size_t stride, const uint8_t* a,
                             typename V::Int (&acc)[kHalves][R][N]) {
    constexpr size_t kPitch = Chunk<GroupedIntCore>::kPitch;
    const auto nibble = V::set1_32(0x0f0f0f0f);
    const auto table = V::table16(kBytes);
    typename V::Int sum[2][kHalves][R][N];
    KT_UNROLL
    for (int plane = 0; plane < 2; ++plane) {
      KT_UNROLL
      for (int h = 0; h < kHalves; ++h) {
        KT_UNROLL
        for (int r = 0; r < R; ++r) {
          KT_UNROLL
          for (int v = 0; v < N; ++v) sum[plane][h][r][v] = V::set1_32(0);
        }
      }
    }
    KT_UNROLL
    for (int i = 0; i < 4; ++i) {
      KT_UNROLL
      for (int half = 0; half < 2; ++half) {
        typename V::Int w[N];
        KT_UNROLL
        for (int v = 0; v < N; ++v) {
          const auto bits = V::load(vector_at<V>(lines, stride, v) + i * kLineBytes);
          w[v] = V::bit_and(half ? V::template shift_right_16<4>(bits) : bits, nibble);
          if constexpr (kTable) w[v] = V::look_up(table, w[v]);
        }
        const int h = kHalves == 2 ? half : 0;
        KT_UNROLL
        for (int r = 0; r < R; ++r) {
          KT_UNROLL
          for (int plane = 0; plane < 2; ++plane) {
            const auto x = V::broadcast32(a + r * kPitch + plane * kChunk + 16 * half + 4 * i);
            KT_UNROLL
            for (int v = 0; v < N; ++v) sum[plane][h][r][v] = Sums::dot(sum[plane][h][r][v], w[v], x);
          }
        }
      }
    }
    KT_UNROLL
    for (int h = 0; h < kHalves; ++h) {
      KT_UNROLL
      for (int r = 0; r < R; ++r) {
        KT_UNROLL
        for (int v = 0; v < N; ++v)
          acc[h][r][v] = V::add_32(acc[h][r][v], Sums::join(sum[0][h][r][v], sum[1][h][r][v]));
      }
    }
  }
};

}  // namespace
}  // namespace kt
