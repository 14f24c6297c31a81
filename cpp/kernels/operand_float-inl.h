// Float operands: bf16 weights times f32 activations by FMA (any vector ISA), or bf16 pairs by vdpbf16ps.
#pragma once

#include "base/bf16.h"
#include "formats/bf16.h"
#include "kernels/decode-inl.h"
#include "kernels/elementwise-inl.h"
#include "kernels/gemm-inl.h"

namespace kt {
namespace {

// Chains of dependent adds per output so that latency (4 to 6 cycles, two issues per cycle) is covered. Not of float
// cores for bf16 weights: how many panels a call gets depends on the number of threads, and how many rows on who else
// is there, and the order of additions must depend on neither.
constexpr int chains(int accumulators) { return accumulators >= 8 ? 1 : accumulators >= 4 ? 2 : 4; }

template <class V, int R, int N>
KT_INLINE void start_tile(const TileArgs& t, typename V::F32 (&acc)[R][N]) {
  KT_UNROLL
  for (int r = 0; r < R; ++r) {
    KT_UNROLL
    for (int v = 0; v < N; ++v) acc[r][v] = t.first ? V::zero_f32() : V::load_f32(c_vector<V>(t, r, v));
  }
}

template <class V, int R, int N>
KT_INLINE void store_tile(const TileArgs& t, const typename V::F32 (&acc)[R][N]) {
  KT_UNROLL
  for (int r = 0; r < R; ++r) {
    KT_UNROLL
    for (int v = 0; v < N; ++v) V::store_f32(c_vector<V>(t, r, v), acc[r][v]);
  }
}

// Weights of k and k + 1 as f32, of the v-th vector of rows.
template <class V>
struct Bf16Lines {
  static constexpr size_t kPairBytes = kLineBytes;
  static KT_INLINE typename V::F32 weight(const uint8_t* line, size_t stride, int v, int half) {
    const auto bits = V::load(vector_at<V>(line, stride, v));
    const auto high_half = V::set1_32(static_cast<int32_t>(0xffff0000));
    return V::bits_to_f32(half ? V::bit_and(bits, high_half) : V::template shift_left_32<16>(bits));
  }
};
template <class V>
struct F32Lines {
  static constexpr size_t kPairBytes = 2 * kLineBytes;
  static KT_INLINE typename V::F32 weight(const uint8_t* line, size_t stride, int v, int half) {
    return V::load_f32(reinterpret_cast<const float*>(vector_at<V>(line, stride, v) + half * kLineBytes));
  }
};
// 16 f16 of one k, then those of the next.
template <class V>
struct F16Lines {
  static constexpr size_t kPairBytes = kLineBytes;
  static KT_INLINE typename V::F32 weight(const uint8_t* line, size_t stride, int v, int half) {
    constexpr int kVectors = kPanelRows / V::kLanes;
    const uint8_t* at = line + v / kVectors * stride + v % kVectors * V::kLanes * 2 + half * kLineBytes / 2;
    return V::load_f16(reinterpret_cast<const uint16_t*>(at));
  }
};

// What the lines of a packed panel of floats are.
template <class V, class Format>
struct FloatLines {
  using Lines = std::conditional_t<Format::kKind.codes == Codes::f16, F16Lines<V>, F32Lines<V>>;
};
template <class V>
struct FloatLines<V, Bf16> {
  using Lines = Bf16Lines<V>;
};

// Formats of formats/grouped.h become lines of floats for the blocked path, scales included; bf16 panels are such
// lines.
template <class V, class Format, class Decoded>
struct FloatDecoder {
  static constexpr bool kNeeded = true;
  using Lines = Decoded;
  static void decode(const Format& layout, const uint8_t* rows, const uint8_t* blocks, int kc, uint8_t* out) {
    if constexpr (std::is_same_v<Decoded, F32Lines<V>>) {
      decode_f32<V>(layout, rows, blocks, kc, reinterpret_cast<float*>(out));
    } else {
      decode_bf16<V>(layout, rows, blocks, kc, out);
    }
  }
};
template <class V, class Decoded>
struct FloatDecoder<V, Bf16, Decoded> {
  static constexpr bool kNeeded = false;
  using Lines = Bf16Lines<V>;
};

template <class V>
struct F32Core {
  static constexpr int kRows = V::kManyRegisters ? 8 : 6;
  static constexpr int kPanels = 4;
  static constexpr int kChunk = 512;
  static constexpr int kElementBytes = 4;
  static constexpr int kInits = 0;
  static constexpr int kDecodedBytes = 4;
  template <class Format>
  using Lines = typename FloatLines<V, Format>::Lines;
  template <class Format>
  using Decoder = FloatDecoder<V, Format, F32Lines<V>>;

  static void gather(const Acts& acts, int row, int k0, int kc, int k, uint8_t* dst, float*, int32_t*) {
    const uint16_t* src = reinterpret_cast<const uint16_t*>(acts.data + row * acts.pitch) + k0;
    widen_row<V>(src, k - k0 < kc ? k - k0 : kc, kc, reinterpret_cast<float*>(dst));
  }

  // Panels that R rows take at once: enough sums side by side to cover the latency of an FMA, few enough for the
  // registers.
  template <int R, int P>
  static constexpr int at_once() {
    constexpr int kMost = (V::kManyRegisters ? 16 : 8) / (R * kPanelRows / V::kLanes);
    return P < kMost ? P : kMost >= 4 ? 4 : kMost >= 2 ? 2 : 1;
  }

  template <class Source, int R, int P>
  static void tile(const TileArgs& t, Chunk<F32Core> chunk) {
    constexpr int kAtOnce = at_once<R, P>();
    TileArgs part = t;
    KT_UNROLL
    for (int p = 0; p < P; p += kAtOnce) {
      columns<Source, R, kAtOnce>(part, chunk);
      part.lines += kAtOnce * t.panel_stride;
      part.c = c_vector<V>(t, 0, (p + kAtOnce) * kPanelRows / V::kLanes);
    }
  }

  // One sum for every output, in the order of k: a row's result does not depend on how many rows and panels there are.
  template <class Source, int R, int P>
  static KT_INLINE void columns(const TileArgs& t, Chunk<F32Core> chunk) {
    constexpr int N = P * kPanelRows / V::kLanes;
    typename V::F32 acc[R][N];
    start_tile<V>(t, acc);
    constexpr int kVectors = kPanelRows / V::kLanes;
    const uint8_t* lines[P];
    KT_UNROLL
    for (int p = 0; p < P; ++p) lines[p] = t.lines + p * t.panel_stride;
    const float* a = reinterpret_cast<const float*>(chunk.base);
    constexpr int kUnroll = 4;
    for (const float* end = a + t.kc; a < end; a += 2 * kUnroll) {
      KT_UNROLL
      for (int u = 0; u < kUnroll; ++u) {
        KT_UNROLL
        for (int half = 0; half < 2; ++half) {
          typename V::F32 w[N];
          KT_UNROLL
          for (int v = 0; v < N; ++v)
            w[v] = Source::weight(fresh(lines[v / kVectors]) + u * Source::kPairBytes, 0, v % kVectors, half);
          constexpr size_t kPitch = Chunk<F32Core>::kPitch / 4;
          KT_UNROLL
          for (int r = 0; r < R; ++r) {
            const auto x = V::set1_f32(a[r * kPitch + 2 * u + half]);
            KT_UNROLL
            for (int v = 0; v < N; ++v) acc[r][v] = V::fma(w[v], x, acc[r][v]);
          }
        }
      }
      KT_UNROLL
      for (int p = 0; p < P; ++p) lines[p] += kUnroll * Source::kPairBytes;
    }
    store_tile<V>(t, acc);
  }
};

template <class V>
struct Bf16Core {
  static constexpr int kRows = 8;
  static constexpr int kPanels = 2;
  static constexpr int kChunk = 512;
  static constexpr int kElementBytes = 2;
  static constexpr int kInits = 0;
  static constexpr int kDecodedBytes = 2;
  template <class Format>
  using Lines = Bf16Lines<V>;
  template <class Format>
  using Decoder = FloatDecoder<V, Format, Bf16Lines<V>>;

  static void gather(const Acts& acts, int row, int k0, int kc, int k, uint8_t* dst, float*, int32_t*) {
    const uint8_t* src = acts.data + row * acts.pitch + 2 * static_cast<size_t>(k0);
    const int valid = k - k0 < kc ? k - k0 : kc;
    std::memcpy(dst, src, 2 * static_cast<size_t>(valid));
    std::memset(dst + 2 * valid, 0, 2 * static_cast<size_t>(kc - valid));
  }

  // One sum for every output, as above: a single row of a matrix in L2 is 6 % slower than with four (Zen 4, 62 -> 58
  // GB/s on a core), from memory it is not.
  template <class Source, int R, int P>
  static void tile(const TileArgs& t, Chunk<Bf16Core> chunk) {
    constexpr int N = P * kPanelRows / V::kLanes;
    typename V::F32 acc[R][N];
    start_tile<V>(t, acc);
    const uint8_t* line = t.lines;
    const uint8_t* a = chunk.base;
    constexpr int kUnroll = 4;
    for (const uint8_t* end = a + 2 * t.kc; a < end; a += 4 * kUnroll, line += kUnroll * kLineBytes) {
      KT_UNROLL
      for (int u = 0; u < kUnroll; ++u) {
        typename V::Int w[N];
        KT_UNROLL
        for (int v = 0; v < N; ++v) w[v] = V::load(vector_at<V>(line, t.panel_stride, v) + u * kLineBytes);
        KT_UNROLL
        for (int r = 0; r < R; ++r) {
          const auto x = V::broadcast32(a + r * Chunk<Bf16Core>::kPitch + 4 * u);
          KT_UNROLL
          for (int v = 0; v < N; ++v) acc[r][v] = V::dot_bf16(acc[r][v], w[v], x);
        }
      }
    }
    store_tile<V>(t, acc);
  }
};

}  // namespace
}  // namespace kt
