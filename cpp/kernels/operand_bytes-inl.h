// Types of GGUF times many rows, up to what tiles are better at: blocks become bytes once for all rows, activations
// integers with a scale for each 128 k (AVX-512, Q4_K: 238 GFLOPS at 32, 272 at 128, 290 at 256), or for each 256 where
// integer scales of the weights are summed up as integers.
//
// Activations have 8 bits, or 16 where codes are so large that int16 could not hold sums of their products. Products of
// f32 or bf16 would round nothing, but slower (one core of Zen 4, Q4_K, 64 rows: 103 against 234 GFLOPS on AVX2, 204
// against 290 on AVX-512).
#pragma once

#include "kernels/operand_grouped-inl.h"

namespace kt {
namespace {

// Activations of a chunk as integers, with a scale for each kSpan k, and sums over kGroup k. Bytes have kOffset added.
template <class V, int kElementBytes, int kGroup, int kSpan, int kOffset = 0>
struct ByteActs {
  static constexpr float kMost = kElementBytes == 1 ? 127 : 32767;

  // sum(g, s) is told the sum of group g.
  template <class Sum>
  static void gather(const Acts& acts, int row, int k0, int kc, int k, uint8_t* dst, float* scales, Sum sum) {
    const uint16_t* src = reinterpret_cast<const uint16_t*>(acts.data + row * acts.pitch) + k0;
    const int valid = k - k0 < kc ? k - k0 : kc;
    for (int i = 0; i < kc; i += kSpan) {
      const int left = kc - i < kSpan ? kc - i : kSpan, from_row = valid - i < left ? valid - i : left;
      alignas(64) float values[kSpan];
      alignas(64) int16_t q[kSpan];
      widen_row<V>(src + i, from_row > 0 ? from_row : 0, left, values);
      const SpanScale common = scale_of_span<V>(values, left, kMost);
      scales[i / kSpan] = common.scale;
      for (int j = 0; j < left; j += V::kLanes) {
        // An inverse of 0 stands for values that are 0, or NaN and carried by the scale.
        const auto x = V::mul(V::load_f32(values + j), V::set1_f32(common.inverse));
        V::store_low_16(q + j, common.inverse != 0.0f ? V::round_to_32(x) : V::set1_32(0));
      }
      for (int g = 0; g < left; g += kGroup) {
        int32_t total = 0;
        for (int j = g; j < g + kGroup; ++j) total += q[j];
        sum((i + g) / kGroup, total);
      }
      if constexpr (kElementBytes == 2) {
        std::memcpy(dst + 2 * i, q, 2 * static_cast<size_t>(left));
      } else {
        alignas(64) int8_t bytes[kSpan];
        for (int j = 0; j < left; ++j) bytes[j] = static_cast<int8_t>(q[j] + kOffset);
        put_swapped(bytes, left, dst + i);
      }
    }
  }
};

// What the cores below have in common: a chunk of a panel is decoded to blocks of kLayout.
template <class V, int kBytes>
struct BytesBase {
  static constexpr int kPanels = V::kManyRegisters ? 2 : 1;
  static constexpr int kVectors = kPanelRows / V::kLanes;
  static constexpr int kChunk = 512;
  static constexpr int kElementBytes = kBytes;
  static constexpr int kTilesTogether = 8;
};
template <class Core>
struct BytesDecoder {
  static constexpr bool kNeeded = true;
  using Lines = void;
  static void decode(const Expandable& layout, const uint8_t*, const uint8_t* blocks, int kc, uint8_t* out) {
    for (int k = 0; k < kc; k += kActGroup, blocks += layout.block_bytes(), out += Core::kBlockBytes)
      layout.to_bytes(blocks, kc - k < kActGroup ? kc - k : kActGroup, out);
  }
};

// How products of bytes are summed. pmaddubsw: int16 holds kQuads quads.
template <class V, int kQuads>
struct PairsOfBytes {
  using Int = typename V::Int;
  static constexpr int kElementBytes = 1;
  static constexpr int kCount = kQuads;
  static constexpr bool kSmall = true;  // codes must not get an offset
  static KT_INLINE Int dot(Int sum, Int w, const uint8_t* a, int quad) {
    return V::add_16(sum, V::madd_u8s8(w, V::broadcast32(a + 4 * quad)));
  }
  static KT_INLINE Int widen(Int sum) { return V::madd_s16(sum, V::set1_32(0x00010001)); }
};
// vpdpbusd.
template <class V>
struct QuadsOfBytes {
  using Int = typename V::Int;
  static constexpr int kElementBytes = 1;
  static constexpr int kCount = 8;
  static constexpr bool kSmall = false;
  static KT_INLINE Int dot(Int sum, Int w, const uint8_t* a, int quad) {
    return V::dot_u8s8(sum, w, V::broadcast32(a + 4 * quad));
  }
  static KT_INLINE Int widen(Int sum) { return sum; }
};
// pmaddwd, on the even and the odd bytes of a lane.
template <class V>
struct PairsOfWords {
  using Int = typename V::Int;
  static constexpr int kElementBytes = 2;
  static constexpr int kCount = 8;
  static constexpr bool kSmall = false;
  static KT_INLINE Int dot(Int sum, Int w, const uint8_t* a, int quad) {
    const Int even = V::bit_and(w, V::set1_32(0x00ff00ff)), odd = V::template shift_right_16<8>(w);
    sum = V::add_32(sum, V::madd_s16(even, V::broadcast32(a + 8 * quad)));
    return V::add_32(sum, V::madd_s16(odd, V::broadcast32(a + 8 * quad + 4)));
  }
  static KT_INLINE Int widen(Int sum) { return sum; }
};

// Blocks of kTo: c += activation scale * sum over groups of (scale * (sum(byte * a) - offset * sum(a)) + min * sum(a)).
template <class V, GroupedKind kTo, class Sums>
struct BytesCore : BytesBase<V, Sums::kElementBytes> {
  using Base = BytesBase<V, Sums::kElementBytes>;
  using Int = typename V::Int;
  using F32 = typename V::F32;
  static constexpr int kRows = V::kManyRegisters ? 6 : 4;
  static constexpr int kLeastRows = kRows / 2;  // more than 4 rows in even tiles: 5 are 3 + 2, or 5; 7 are 4 + 3
  static constexpr int kGroup = kTo.least_group, kHalves = kStepDepth / kGroup;
  static constexpr int kChunk = Base::kChunk, kVectors = Base::kVectors;
  static constexpr bool kMins = kTo.mins != Mins::none;
  // Of each group -offset * sum(a), or, with mins, sum(a) as float; then the scales.
  static constexpr int kSpan = 128;
  static constexpr int kGroups = kChunk / kGroup, kInits = kGroups + kChunk / kSpan;
  static constexpr GroupedLayout kLayout{kTo, kGroup};
  static constexpr size_t kBlockBytes = kLayout.block_bytes();
  static constexpr int kDecodedBytes = div_up(static_cast<int>(kLayout.panel_bytes(kChunk)), kChunk* kPanelRows);
  template <class>
  using Decoder = BytesDecoder<BytesCore>;

  static void gather(const Acts& acts, int row, int k0, int kc, int k, uint8_t* dst, float*, int32_t* inits) {
    float* scales = reinterpret_cast<float*>(inits + kGroups);
    const auto put_sum = [inits](int g, int32_t sum) {
      const float as_float = static_cast<float>(sum);
      const int32_t init = -kTo.offset * sum;
      std::memcpy(inits + g, kMins ? static_cast<const void*>(&as_float) : &init, 4);
    };
    ByteActs<V, Base::kElementBytes, kGroup, kSpan>::gather(acts, row, k0, kc, k, dst, scales, put_sum);
  }

  template <class, int R, int P>
  static void tile(const TileArgs& t, Chunk<BytesCore> chunk) {
    constexpr int kAll = P * kVectors, N = V::kManyRegisters ? kAll : 1;
    KT_UNROLL
    for (int v = 0; v < kAll; v += N) columns<R, N>(t, chunk, v);
  }

  template <int R, int N>
  static KT_INLINE void columns(const TileArgs& t, Chunk<BytesCore> chunk, int v0) {
    const uint8_t* a = chunk.base;
    const int32_t* sums = chunk.inits(0);
    for (int k = 0; k < t.kc;) {
      const uint8_t* block = t.lines + k / kActGroup * kBlockBytes + v0 * V::kBytes;
      const uint8_t* lines = block + kLayout.head + k % kActGroup * kPanelRows;
      const uint8_t* scales = block + k % kActGroup / kGroup * kLineBytes;
      const int span = k / kSpan;
      F32 part[R][N];
      clear<V>(part);
      for (const int end = k + kSpan < t.kc ? k + kSpan : t.kc; k < end; k += kStepDepth) {
        unrolled<kHalves>([&](auto half) KT_INLINE_BODY {
          group<R, N, decltype(half)::kValue>(t, lines, scales, a, sums, part);
          scales += kLineBytes;
          ++sums;
        });
        a += kStepDepth * Base::kElementBytes;
        lines += kStepDepth / 4 * kLineBytes;
      }
      KT_UNROLL
      for (int r = 0; r < R; ++r) {
        const F32 scale = V::set1_f32(reinterpret_cast<const float*>(chunk.inits(r) + kGroups)[span]);
        KT_UNROLL
        for (int v = 0; v < N; ++v) {
          float* c = c_vector<V>(t, r, v0 + v);
          const F32 old = t.first && span == 0 ? V::zero_f32() : V::load_f32(c);
          V::store_f32(c, V::fma(part[r][v], scale, old));
        }
      }
    }
  }

  template <int R, int N, int H>
  static KT_INLINE void group(const TileArgs& t, const uint8_t* lines, const uint8_t* scales, const uint8_t* a,
                              const int32_t* sums, F32 (&part)[R][N]) {
    constexpr int kQuads = 8 / kHalves, kCount = Sums::kCount < kQuads ? Sums::kCount : kQuads;
    constexpr size_t kPitch = Chunk<BytesCore>::kPitch;
    Int total[R][N];
    unrolled<kQuads / kCount>([&](auto of) KT_INLINE_BODY {
      constexpr int kPart = decltype(of)::kValue;
      Int sum[R][N];
      KT_UNROLL
      for (int r = 0; r < R; ++r) {
        KT_UNROLL
        for (int v = 0; v < N; ++v) sum[r][v] = kMins || kPart ? V::set1_32(0) : V::broadcast32(sums + r * kInits);
      }
      KT_UNROLL
      for (int i = 0; i < kCount; ++i) {
        const int quad = H * kQuads + kPart * kCount + i;
        Int w[N];
        KT_UNROLL
        for (int v = 0; v < N; ++v) w[v] = V::load(vector_at<V>(lines, t.panel_stride, v) + quad * kLineBytes);
        KT_UNROLL
        for (int r = 0; r < R; ++r) {
          KT_UNROLL
          for (int v = 0; v < N; ++v) sum[r][v] = Sums::dot(sum[r][v], w[v], a + r * kPitch, quad);
        }
      }
      KT_UNROLL
      for (int r = 0; r < R; ++r) {
        KT_UNROLL
        for (int v = 0; v < N; ++v) {
          const Int wide = Sums::widen(sum[r][v]);
          total[r][v] = kPart == 0 ? wide : V::add_32(total[r][v], wide);
        }
      }
    });
    KT_UNROLL
    for (int v = 0; v < N; ++v) {
      const uint8_t* of_panel = scales + v / kVectors * t.panel_stride + v % kVectors * V::kBytes;
      const F32 scale = V::load_f32(reinterpret_cast<const float*>(of_panel));
      KT_UNROLL
      for (int r = 0; r < R; ++r) {
        part[r][v] = V::fma(V::to_f32(total[r][v]), scale, part[r][v]);
        if constexpr (kMins) {
          const F32 min = V::load_f32(reinterpret_cast<const float*>(of_panel + kLayout.mins_at));
          const F32 acts = V::set1_f32(reinterpret_cast<const float*>(sums)[r * kInits]);
          part[r][v] = V::fma(min, acts, part[r][v]);
        }
      }
    }
  }
};

// K-quants for pmaddubsw: integers up to the scale of activations. A block of a panel is
//   with mins     [f32: super x 16][f32: super of the mins x 16][s16 pairs: scale, scale; for each group]
//                 [s16 pairs: mins of two groups][lines of bytes]
//                 c += activation scale * (super * sum(scale * sum(byte * a)) - super_min * sum(min * sum(a)))
//   without them  [f32: super x 16][s32: -128 * sum(scale * byte) x 16][s16 pairs as above][lines of signed bytes]
//                 c += activation scale * super * (sum(scale * sum((a + 128) * byte)) + what the block starts with)
// Codes without mins have an offset. Signed they need none, and unsigned activations cost a block one number for all
// rows, where the offset would cost each row as many products as groups have mins.
template <GroupedKind kKind>
struct KBlock {
  static constexpr bool kMins = has_super_min(kKind.mins);
  static constexpr int kGroups = kActGroup / kKind.least_group;
  static constexpr size_t kSecond = kLineBytes;  // super of the mins, or start
  static constexpr size_t kScales = 2 * kLineBytes;
  static constexpr size_t kMinPairs = kScales + kGroups * kLineBytes;
  static constexpr size_t kLines = kMinPairs + (kMins ? kGroups / 2 * kLineBytes : 0);
  static constexpr size_t kBytes = kLines + kActGroup / 4 * kLineBytes;
};

// Scales, and mins where there are some, of the v-th vector of rows.
template <class V, GroupedKind kKind>
KT_INLINE void expand_k_scales(const Grouped<kKind>& layout, const uint8_t* block, int v, uint8_t* out) {
  using Format = Grouped<kKind>;
  using To = KBlock<kKind>;
  const auto low_word = V::set1_32(0xffff);
  auto first = V::set1_32(0);
  for (int g = 0; g < To::kGroups; ++g) {
    const uint8_t* at = scales_at<Format>(block, g) + v * V::kLanes;
    auto scale = kKind.scales == Scales::s8 ? V::load_s8(at) : V::load_u8(at);
    if constexpr (To::kMins) {
      auto min = scale;
      if constexpr (kKind.scales == Scales::u4) {
        min = V::template shift_right_32<4>(scale);
        scale = V::bit_and(scale, V::set1_32(15));
      } else {
        min = V::load_u8(mins_at(layout, block, g) + v * V::kLanes);
      }
      const auto pair = V::bit_or(first, V::template shift_left_32<16>(min));
      if (g % 2) V::store(out + To::kMinPairs + g / 2 * kLineBytes + v * V::kBytes, pair);
      first = min;
    }
    const auto pair = V::bit_or(V::bit_and(scale, low_word), V::template shift_left_32<16>(scale));
    V::store(out + To::kScales + g * kLineBytes + v * V::kBytes, pair);
  }
}

template <class V, GroupedKind kKind>
void expand_k(const uint8_t* block, int, uint8_t* out) {
  using Format = Grouped<kKind>;
  using Bytes = CodeBytes<V, kKind>;
  using To = KBlock<kKind>;
  constexpr int kHalves = Format::kHalves, kQuads = 8 / kHalves;
  const Format layout(kKind.least_group);
  const auto table = Bytes::table(), ones = V::set1_32(0x01010101);
  const auto offset = V::set1_32(static_cast<int32_t>((-kKind.offset & 0xff) * 0x01010101u));
  for (int v = 0; v < kPanelRows / V::kLanes; ++v) {
    expand_k_scales<V, kKind>(layout, block, v, out);
    const uint8_t *lines = block + layout.head + v * V::kBytes, *scales = out + To::kScales + v * V::kBytes;
    uint8_t* to = out + To::kLines + v * V::kBytes;
    auto total = V::set1_32(0);
    for (int k = 0; k < kActGroup; k += kStepDepth, lines += Format::kStepBytes, to += kStepDepth / 4 * kLineBytes) {
      unrolled<kHalves>([&](auto half) KT_INLINE_BODY {
        auto sum = V::set1_32(0);  // of 8 bytes of a group in a word
        unrolled<kQuads>([&](auto index) KT_INLINE_BODY {
          constexpr int Q = decltype(half)::kValue * kQuads + decltype(index)::kValue;
          const auto bytes = V::add_8(Bytes::template quad<Q>(table, lines), offset);
          V::store(to + Q * kLineBytes, bytes);
          if constexpr (!To::kMins) sum = V::add_16(sum, V::madd_u8s8(ones, bytes));
        });
        if constexpr (!To::kMins) total = V::add_32(total, V::madd_s16(sum, V::load(scales)));
        scales += kLineBytes;
      });
    }
    V::store_f32(reinterpret_cast<float*>(out) + v * V::kLanes, load_super<V>(layout, block, 0, v));
    uint8_t* second = out + To::kSecond + v * V::kBytes;
    if constexpr (To::kMins) {
      V::store_f32(reinterpret_cast<float*>(second), load_super<V>(layout, block, 1, v));
    } else {
      V::store(second, V::sub_32(V::set1_32(0), V::template shift_left_32<7>(total)));
    }
  }
}

template <class V, GroupedKind kKind>
struct KCore : BytesBase<V, 1> {
  using Base = BytesBase<V, 1>;
  using Int = typename V::Int;
  using F32 = typename V::F32;
  using To = KBlock<kKind>;
  static constexpr int kRows = V::kManyRegisters ? 8 : 4;
  static constexpr int kLeastRows = 2;
  static constexpr int kGroup = kKind.least_group, kHalves = kStepDepth / kGroup;
  static constexpr int kChunk = Base::kChunk, kVectors = Base::kVectors, kPanels = 1;
  // Quads of which int16 holds the sums.
  static constexpr int kPair = To::kMins ? 2 * 127 * CodeBytes<V, kKind>::kMost : 2 * 255 * kKind.offset;
  static constexpr int kHeld = 32767 / kPair;
  static constexpr int kQuads = 8 / kHalves, kCount = kHeld >= kQuads ? kQuads : kHeld >= 4 ? 4 : 2;
  // With mins, the sums of two groups in a lane; then the scales.
  static constexpr int kPairs = To::kMins ? kChunk / (2 * kGroup) : 0, kInits = kPairs + kChunk / kActGroup;
  static constexpr size_t kBlockBytes = To::kBytes;
  static constexpr int kDecodedBytes = div_up(static_cast<int>(kBlockBytes) * kChunk / kActGroup, kChunk* kPanelRows);
  template <class>
  using Decoder = BytesDecoder<KCore>;

  static void gather(const Acts& acts, int row, int k0, int kc, int k, uint8_t* dst, float*, int32_t* inits) {
    float* scales = reinterpret_cast<float*>(inits + kPairs);
    int16_t* sums = reinterpret_cast<int16_t*>(inits);
    const auto put_sum = [&](int g, int32_t sum) {
      if constexpr (To::kMins) sums[g] = static_cast<int16_t>(sum);
    };
    ByteActs<V, 1, kGroup, kActGroup, To::kMins ? 0 : 128>::gather(acts, row, k0, kc, k, dst, scales, put_sum);
  }

  template <class, int R, int P>
  static void tile(const TileArgs& t, Chunk<KCore> chunk) {
    // Eight sums in 16 registers, and as many totals in memory: each load of activations serves two vectors.
    columns<R, kVectors>(t, chunk);
  }

  template <int R, int N>
  static KT_INLINE void columns(const TileArgs& t, Chunk<KCore> chunk) {
    constexpr size_t kPitch = Chunk<KCore>::kPitch;
    const uint8_t* a = chunk.base;
    for (int k = 0; k < t.kc; k += kActGroup) {
      const uint8_t* block = t.lines + k / kActGroup * kBlockBytes;
      const uint8_t *scales = block + To::kScales, *lines = block + To::kLines;
      Int acc[R][N];
      KT_UNROLL
      for (int r = 0; r < R; ++r) {
        KT_UNROLL
        for (int v = 0; v < N; ++v)
          acc[r][v] = To::kMins ? V::set1_32(0) : V::load(block + To::kSecond + v * V::kBytes);
      }
      for (int i = 0; i < kActGroup; i += kGroup, scales += kLineBytes) {
        KT_UNROLL
        for (int part = 0; part < kQuads / kCount; ++part) {
          Int sum[R][N];
          KT_UNROLL
          for (int r = 0; r < R; ++r) {
            KT_UNROLL
            for (int v = 0; v < N; ++v) sum[r][v] = V::set1_32(0);
          }
          KT_UNROLL
          for (int q = 0; q < kCount; ++q) {
            Int w[N];
            KT_UNROLL
            for (int v = 0; v < N; ++v) w[v] = V::load(lines + q * kLineBytes + v * V::kBytes);
            KT_UNROLL
            for (int r = 0; r < R; ++r) {
              const Int x = V::broadcast32(a + r * kPitch + 4 * q);
              KT_UNROLL
              for (int v = 0; v < N; ++v)
                sum[r][v] = V::add_16(sum[r][v], To::kMins ? V::madd_u8s8(w[v], x) : V::madd_u8s8(x, w[v]));
            }
          }
          lines += kCount * kLineBytes;
          a += 4 * kCount;
          KT_UNROLL
          for (int v = 0; v < N; ++v) {
            const Int scale = V::load(scales + v * V::kBytes);
            KT_UNROLL
            for (int r = 0; r < R; ++r) acc[r][v] = V::add_32(acc[r][v], V::madd_s16(sum[r][v], scale));
          }
        }
      }
      flush<R, N>(t, chunk, k, block, acc);
    }
  }

  template <int R, int N>
  static KT_INLINE void flush(const TileArgs& t, Chunk<KCore> chunk, int k, const uint8_t* block,
                              const Int (&acc)[R][N]) {
    const float* supers = reinterpret_cast<const float*>(block);
    KT_UNROLL
    for (int r = 0; r < R; ++r) {
      F32 part[N];
      KT_UNROLL
      for (int v = 0; v < N; ++v) part[v] = V::mul(V::to_f32(acc[r][v]), V::load_f32(supers + v * V::kLanes));
      if constexpr (To::kMins) subtract_mins<N>(chunk.inits(r) + k / (2 * kGroup), block, part);
      const F32 scale = V::set1_f32(reinterpret_cast<const float*>(chunk.inits(r) + kPairs)[k / kActGroup]);
      KT_UNROLL
      for (int v = 0; v < N; ++v) {
        float* c = c_vector<V>(t, r, v);
        V::store_f32(c, V::fma(part[v], scale, t.first && k == 0 ? V::zero_f32() : V::load_f32(c)));
      }
    }
  }

  template <int N>
  static KT_INLINE void subtract_mins(const int32_t* sums, const uint8_t* block, F32 (&part)[N]) {
    Int low[N];
    KT_UNROLL
    for (int v = 0; v < N; ++v) low[v] = V::set1_32(0);
    KT_UNROLL
    for (int pair = 0; pair < kActGroup / (2 * kGroup); ++pair) {
      const Int x = V::broadcast32(sums + pair);
      KT_UNROLL
      for (int v = 0; v < N; ++v) {
        const Int min = V::load(block + To::kMinPairs + pair * kLineBytes + v * V::kBytes);
        low[v] = V::add_32(low[v], V::madd_s16(min, x));
      }
    }
    KT_UNROLL
    for (int v = 0; v < N; ++v) {
      const F32 super = V::load_f32(reinterpret_cast<const float*>(block + To::kSecond) + v * V::kLanes);
      part[v] = V::sub(part[v], V::mul(V::to_f32(low[v]), super));
    }
  }
};

}  // namespace
}  // namespace kt
