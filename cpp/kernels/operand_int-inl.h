// Integer operands. All accumulate exactly in int32 over a kActGroup and add
//   c += float(acc) * (activation scale * row scale)
// once per group, so results do not depend on the instruction set where the operands are the same.
#pragma once

#include "kernels/gemm-inl.h"
#include "kernels/lines-inl.h"
#include "kernels/operand_float-inl.h"

namespace kt {
namespace {

KT_INLINE void gather_values(const Acts& acts, int row, int k0, int kc, int element_bytes, uint8_t* dst) {
  std::memcpy(dst, acts.data + row * acts.pitch + static_cast<size_t>(k0) * element_bytes,
              static_cast<size_t>(kc) * element_bytes);
}

KT_INLINE void gather_scales(const Acts& acts, int row, int k0, int kc, float* scales) {
  const float* s = acts.scales + static_cast<size_t>(row) * acts.group_pitch + k0 / kActGroup;
  for (int g = 0; g * kActGroup < kc; ++g) scales[g] = s[g];
}

// The accumulators start at -offset * sum(a) per group.
KT_INLINE void gather_inits(const Acts& acts, int row, int k0, int kc, int offset, int32_t* inits) {
  const int32_t* sums = acts.group_sums + static_cast<size_t>(row) * acts.group_pitch + k0 / kActGroup;
  for (int g = 0; g * kActGroup < kc; ++g) inits[g] = -offset * sums[g];
}

template <class V, int R, int N, class Group>
KT_INLINE void flush_group(const TileArgs& t, const typename V::Int (&acc)[R][N], bool first, Group scale_of_row) {
  constexpr int kVectors = kPanelRows / V::kLanes;
  KT_UNROLL
  for (int v = 0; v < N; ++v) {
    const auto d = V::load_f32(t.scales[v / kVectors] + v % kVectors * V::kLanes);
    KT_UNROLL
    for (int r = 0; r < R; ++r) {
      float* c = c_vector<V>(t, r, v);
      const auto old = first ? V::zero_f32() : V::load_f32(c);
      V::store_f32(c, V::fma(V::to_f32(acc[r][v]), V::mul(V::set1_f32(scale_of_row(r)), d), old));
    }
  }
}

template <class Format>
constexpr bool kIsInt8 = false;
template <>
constexpr bool kIsInt8<Int8> = true;

// u8 x s8 by vpdpbusd.
template <class V>
struct U8S8Core {
  static constexpr int kRows = 8;
  static constexpr int kPanels = 2;
  static constexpr int kChunk = 1024;
  static_assert(kChunk % Int4g::kBlock == 0);
  static constexpr int kElementBytes = 1;
  static constexpr int kInits = kChunk / kActGroup;
  static constexpr int kDecodedBytes = 1;
  template <class Format>
  using Lines = typename LinesOf<V, Format>::U8;

  template <class Format>
  struct Decoder {
    static constexpr bool kNeeded = !kIsInt8<Format>;
    using Lines = Int8Lines<V>;
    static void decode(const Format&, const uint8_t*, const uint8_t* lines, int kc, uint8_t* out) {
      decode_u8<V, typename LinesOf<V, Format>::U8>(lines, kc, out);
    }
  };

  static void gather(const Acts& acts, int row, int k0, int kc, int, uint8_t* dst, float* scales, int32_t* inits) {
    gather_values(acts, row, k0, kc, 1, dst);
    gather_scales(acts, row, k0, kc, scales);
    gather_inits(acts, row, k0, kc, Int8::kOffset, inits);
  }

  template <class Source, int R, int P>
  static void tile(const TileArgs& t, Chunk<U8S8Core> chunk) {
    constexpr int N = P * kPanelRows / V::kLanes;
    constexpr int S = chains(R * N);
    for (int kb = 0, block = 0; kb < t.kc; kb += kActGroup, ++block) {
      typename V::Int acc[S][R][N];
      KT_UNROLL
      for (int r = 0; r < R; ++r) {
        const auto init = V::set1_32(chunk.inits(r)[block]);
        KT_UNROLL
        for (int v = 0; v < N; ++v) {
          acc[0][r][v] = init;
          KT_UNROLL
          for (int s = 1; s < S; ++s) acc[s][r][v] = V::set1_32(0);
        }
      }
      Source source[N];
      KT_UNROLL
      for (int v = 0; v < N; ++v) source[v].block(vector_at<V>(t.lines, t.panel_stride, v), block);
      const int groups = (t.kc - kb < kActGroup ? t.kc - kb : kActGroup) / kDepthUnit;
      const uint8_t* a = chunk.base + kb;
      for (int group = 0; group < groups; ++group, a += kDepthUnit) {
        KT_UNROLL
        for (int v = 0; v < N; ++v) source[v].group();
        KT_UNROLL
        for (int i = 0; i < kGroupPairs; ++i) {
          typename V::Int w[2][N];
          KT_UNROLL
          for (int v = 0; v < N; ++v) source[v].pair(i, w[0][v], w[1][v]);
          KT_UNROLL
          for (int half = 0; half < 2; ++half) {
            KT_UNROLL
            for (int r = 0; r < R; ++r) {
              const auto x = V::broadcast32(a + r * Chunk<U8S8Core>::kPitch + 16 * half + pair_depth(i));
              KT_UNROLL
              for (int v = 0; v < N; ++v) {
                auto& sum = acc[(2 * i + half) % S][r][v];
                sum = V::dot_u8s8(sum, w[half][v], x);
              }
            }
          }
        }
      }
      KT_UNROLL
      for (int s = 1; s < S; ++s) {
        KT_UNROLL
        for (int r = 0; r < R; ++r) {
          KT_UNROLL
          for (int v = 0; v < N; ++v) acc[0][r][v] = V::add_32(acc[0][r][v], acc[s][r][v]);
        }
      }
      flush_group<V, R, N>(t, acc[0], t.first && block == 0, [&](int r) { return chunk.scales(r)[block]; });
    }
  }
};

// u8 x s16 by pmaddwd, for CPUs without vpdpbusd: pmaddubsw would saturate (2 * 255 * 127 > 32767), so bytes are
// widened in place (even and odd bytes of each lane) and the activations keep 16 bits for free.
template <class V>
struct U8S16Core {
  static constexpr int kRows = V::kManyRegisters ? 8 : 4;
  static constexpr int kPanels = 1;
  static constexpr int kChunk = 512;
  static constexpr int kElementBytes = 2;
  static constexpr int kInits = kChunk / kActGroup;
  static constexpr int kDecodedBytes = 0;
  template <class Format>
  using Lines = Int8Lines<V>;
  template <class Format>
  struct Decoder {
    static constexpr bool kNeeded = false;
    using Lines = Int8Lines<V>;
  };

  static void gather(const Acts& acts, int row, int k0, int kc, int, uint8_t* dst, float* scales, int32_t* inits) {
    gather_values(acts, row, k0, kc, 2, dst);
    gather_scales(acts, row, k0, kc, scales);
    gather_inits(acts, row, k0, kc, Int8::kOffset, inits);
  }

  template <class Source, int R, int P>
  static void tile(const TileArgs& t, Chunk<U8S16Core> chunk) {
    constexpr int N = P * kPanelRows / V::kLanes;
    const auto even_mask = V::set1_32(0x00ff00ff);
    const uint8_t* line = t.lines;
    const uint8_t* a = chunk.base;
    for (int kb = 0, block = 0; kb < t.kc; kb += kActGroup, ++block) {
      typename V::Int acc[R][N];
      KT_UNROLL
      for (int r = 0; r < R; ++r) {
        KT_UNROLL
        for (int v = 0; v < N; ++v) acc[r][v] = V::set1_32(chunk.inits(r)[block]);
      }
      const int kc = t.kc - kb < kActGroup ? t.kc - kb : kActGroup;
      for (const uint8_t* end = a + 2 * kc; a < end; a += 16, line += 2 * kLineBytes) {
        KT_UNROLL
        for (int u = 0; u < 2; ++u) {
          KT_UNROLL
          for (int odd = 0; odd < 2; ++odd) {
            typename V::Int w[N];
            KT_UNROLL
            for (int v = 0; v < N; ++v) {
              const auto bits = V::load(vector_at<V>(line, t.panel_stride, v) + u * kLineBytes);
              w[v] = odd ? V::template shift_right_16<8>(bits) : V::bit_and(bits, even_mask);
            }
            KT_UNROLL
            for (int r = 0; r < R; ++r) {
              const auto x = V::broadcast32(a + r * Chunk<U8S16Core>::kPitch + 8 * u + 4 * odd);
              KT_UNROLL
              for (int v = 0; v < N; ++v) acc[r][v] = V::add_32(acc[r][v], V::madd_s16(w[v], x));
            }
          }
        }
      }
      flush_group<V, R, N>(t, acc, t.first && block == 0, [&](int r) { return chunk.scales(r)[block]; });
    }
  }
};

// How the u4 x s8 kernel sums kDepth k before the group's integer scale is applied.
//
// pmaddubsw into int16 pairs, widened by pmaddwd with the scale as second operand. int16 cannot overflow: after the
// start value -8 * sum(a), each half of a lane ends within 16 * 8 * 127 = 16,256, and pmaddubsw itself stays within 2 *
// 15 * 127 = 3,810; wrapping in between is harmless.
template <class V>
struct PairSums {
  static constexpr int kRows = V::kManyRegisters ? 8 : 4;
  static constexpr int kPanels = 1;
  static constexpr int kDepth = 32;
  static constexpr int sums(int) { return 1; }
  // In the low half of each lane; |8 * 32 * 127| = 32,512 fits int16.
  static int32_t init(int32_t sum) { return (-Int4::kOffset * sum) & 0xffff; }
  static KT_INLINE typename V::Int dot(typename V::Int sum, typename V::Int w, typename V::Int x) {
    return V::add_16(sum, V::madd_u8s8(w, x));
  }
  template <class Source>
  static KT_INLINE typename V::Int scaled(typename V::Int sum, const Source& source) {
    return V::madd_s16(sum, source.steps());
  }
};

// vpdpbusd into int32, times the scale.
//
// Up to four rows have a second sum, of the high nibbles where they are: 16 times too large, shifted once for 64 k
// instead of in every line. Against int4, whose bytes take no steps, from the cache of one Zen 4 core: 1.0, 0.95, 0.92,
// 0.94 of its speed with 1 to 4 rows (one sum: 0.89, 0.91, 0.90, 0.93), 0.92 with 5 and 6, 0.89 with 7 and 8 (int8
// lines decoded in registers: 0.85, 0.86, 0.86, 0.87).
template <class V>
struct QuadSums {
  static constexpr int kRows = 8;
  static constexpr int kPanels = 2;
  static constexpr int kDepth = Int4g::kGroup;
  static constexpr int sums(int rows) { return rows <= 4 ? 2 : 1; }
  static int32_t init(int32_t sum) { return -Int4::kOffset * sum; }
  static KT_INLINE typename V::Int dot(typename V::Int sum, typename V::Int w, typename V::Int x) {
    return V::dot_u8s8(sum, w, x);
  }
  template <class Source>
  static KT_INLINE typename V::Int scaled(typename V::Int sum, const Source& source) {
    return V::mul_lo_32(sum, source.steps_32());
  }
};

template <class V, class Sums = PairSums<V>>
struct U4S8Core {
  static constexpr int kRows = Sums::kRows;
  static constexpr int kPanels = Sums::kPanels;
  static constexpr int kChunk = 1024;
  static_assert(kChunk % Int4g::kBlock == 0);
  static constexpr int kElementBytes = 1;
  static constexpr int kInits = kChunk / Sums::kDepth;
  static constexpr int kDecodedBytes = 0;
  template <class Format>
  using Lines = typename LinesOf<V, Format>::U4;
  template <class Format>
  struct Decoder {
    static constexpr bool kNeeded = false;
    using Lines = typename LinesOf<V, Format>::U4;
  };

  static void gather(const Acts& acts, int row, int k0, int kc, int, uint8_t* dst, float* scales, int32_t* inits) {
    gather_values(acts, row, k0, kc, 1, dst);
    gather_scales(acts, row, k0, kc, scales);
    const int32_t* sums = acts.sums + static_cast<size_t>(row) * acts.sum_pitch + k0 / kSumGroup;
    for (int g = 0; g * Sums::kDepth < kc; ++g) {
      int32_t sum = 0;
      for (int i = 0; i < Sums::kDepth / kSumGroup; ++i) sum += *sums++;
      inits[g] = Sums::init(sum);
    }
  }

  template <class Source, int R, int P>
  static void tile(const TileArgs& t, Chunk<U4S8Core> chunk) {
    constexpr int kAll = P * kPanelRows / V::kLanes;
    // 16 registers hold R int16 and R int32 sums of one vector, or of two when R <= 2. 32 do not hold those of two when
    // R > 6, but a broadcast for each product costs more than spilling (0.69 of int4's speed with 8 rows, not 0.89).
    constexpr int N = (V::kManyRegisters || R <= 2) && kAll >= 2 ? 2 : 1;
    KT_UNROLL
    for (int v0 = 0; v0 < kAll; v0 += N) columns<Source, R, N>(t, chunk, v0);
  }

  template <class Source, int R, int N>
  static KT_INLINE void columns(const TileArgs& t, Chunk<U4S8Core> chunk, int v0) {
    for (int kb = 0, block = 0; kb < t.kc; kb += kActGroup, ++block) {
      typename V::Int acc[R][N];
      KT_UNROLL
      for (int r = 0; r < R; ++r) {
        KT_UNROLL
        for (int v = 0; v < N; ++v) acc[r][v] = V::set1_32(0);
      }
      Source source[N];
      KT_UNROLL
      for (int v = 0; v < N; ++v) source[v].block(vector_at<V>(t.lines, t.panel_stride, v0 + v), block);
      const int groups = (t.kc - kb < kActGroup ? t.kc - kb : kActGroup) / kDepthUnit;
      const uint8_t* a = chunk.base + kb;
      const int32_t* inits = chunk.inits(0) + kb / Sums::kDepth;
      for (int group = 0; group < groups; ++group, a += kDepthUnit) {
        KT_UNROLL
        for (int v = 0; v < N; ++v) source[v].group();
        KT_UNROLL
        for (int i = 0; i < kGroupPairs; i += Sums::kDepth / 8, ++inits) add_sums<R, N>(source, i, a, inits, acc);
      }
      TileArgs part = t;
      part.c = t.c + v0 * V::kLanes;
      part.scales[0] = t.scales[0] + v0 * V::kLanes;
      flush_group<V, R, N>(part, acc, t.first && block == 0, [&](int r) { return chunk.scales(r)[block]; });
    }
  }

  // acc += step * sum over the Sums::kDepth k from pair `first` of a group on.
  template <int R, int N, class Source>
  static KT_INLINE void add_sums(const Source (&source)[N], int first, const uint8_t* a, const int32_t* inits,
                                 typename V::Int (&acc)[R][N]) {
    constexpr int S = Sums::sums(R);
    typename V::Int sum[S][R][N];
    KT_UNROLL
    for (int r = 0; r < R; ++r) {
      KT_UNROLL
      for (int v = 0; v < N; ++v) {
        sum[0][r][v] = V::broadcast32(inits + r * kInits);
        if constexpr (S == 2) sum[1][r][v] = V::set1_32(0);
      }
    }
    KT_UNROLL
    for (int i = first; i < first + Sums::kDepth / 8; ++i) {
      typename V::Int w[2][N];
      KT_UNROLL
      for (int v = 0; v < N; ++v) {
        if constexpr (S == 2) {
          source[v].pair_unshifted(i, w[0][v], w[1][v]);
        } else {
          source[v].pair(i, w[0][v], w[1][v]);
        }
      }
      KT_UNROLL
      for (int half = 0; half < 2; ++half) {
        KT_UNROLL
        for (int r = 0; r < R; ++r) {
          const auto x = V::broadcast32(a + r * Chunk<U4S8Core>::kPitch + 16 * half + pair_depth(i));
          KT_UNROLL
          for (int v = 0; v < N; ++v) sum[half % S][r][v] = Sums::dot(sum[half % S][r][v], w[half][v], x);
        }
      }
    }
    KT_UNROLL
    for (int v = 0; v < N; ++v) {
      KT_UNROLL
      for (int r = 0; r < R; ++r) {
        if constexpr (S == 2) sum[0][r][v] = V::add_32(sum[0][r][v], V::template shift_right_s32<4>(sum[1][r][v]));
        acc[r][v] = V::add_32(acc[r][v], Sums::scaled(sum[0][r][v], source[v]));
      }
    }
  }
};

}  // namespace
}  // namespace kt
