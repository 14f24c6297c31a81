// Float operands: bf16 weights times f32 activations by FMA (any vector ISA), or bf16 pairs by vdpbf16ps.
#pragma once

#include "base/bf16.h"
#include "formats/bf16.h"
#include "kernels/gemm-inl.h"

namespace kt {
namespace {

// Chains of dependent adds per output so that latency (4 to 6 cycles, two issues per cycle) is covered. Float cores
// count the accumulators of their largest tile of R rows, not of the one at hand: how many panels a call gets depends
// on the number of threads, and the order of additions must not.
constexpr int chains(int accumulators) { return accumulators >= 8 ? 1 : accumulators >= 4 ? 2 : 4; }

// Weights are decoded in registers: the blocked path reads the packed lines.
struct NoDecoder {
  static constexpr bool kNeeded = false;
  struct Lines {};
};

// Vector v of a line when panels of 16 rows are cut into vectors of V::kLanes.
template <class V>
KT_INLINE const uint8_t* vector_at(const uint8_t* line, size_t panel_stride, int v) {
  constexpr int kVectors = kPanelRows / V::kLanes;
  return line + v / kVectors * panel_stride + v % kVectors * V::kBytes;
}

// The first chain goes on from c, the others start at 0.
template <class V, int S, int R, int N>
KT_INLINE void start_tile(const TileArgs& t, typename V::F32 (&acc)[S][R][N]) {
  KT_UNROLL
  for (int s = 0; s < S; ++s) {
    KT_UNROLL
    for (int r = 0; r < R; ++r) {
      KT_UNROLL
      for (int v = 0; v < N; ++v) {
        const bool zero = s > 0 || t.first;
        acc[s][r][v] = zero ? V::zero_f32() : V::load_f32(t.c + r * t.c_pitch + v * V::kLanes);
      }
    }
  }
}

template <class V>
struct F32Core {
  static constexpr int kRows = V::kManyRegisters ? 8 : 6;
  static constexpr int kPanels = V::kManyRegisters ? 2 : 1;
  static constexpr int kChunk = 512;
  static constexpr int kElementBytes = 4;
  static constexpr int kInits = 0;
  template <class Format>
  struct Lines {};
  template <class Format>
  using Decoder = NoDecoder;

  static void gather(const Acts& acts, int row, int k0, int kc, int k, uint8_t* dst, float*, int32_t*) {
    const uint16_t* src = reinterpret_cast<const uint16_t*>(acts.data + row * acts.pitch) + k0;
    float* out = reinterpret_cast<float*>(dst);
    const int valid = k - k0 < kc ? k - k0 : kc;
    int i = 0;
    for (; i + V::kLanes <= valid; i += V::kLanes) V::store_f32(out + i, V::load_bf16(src + i));
    for (; i < valid; ++i) out[i] = bf16_to_f32(src[i]);
    for (; i < kc; ++i) out[i] = 0;
  }

  template <class Source, int R, int P>
  static void tile(const TileArgs& t, Chunk<F32Core> chunk) {
    constexpr int N = P * kPanelRows / V::kLanes;
    constexpr int S = chains(R * kPanels * kPanelRows / V::kLanes);
    typename V::F32 acc[S][R][N];
    start_tile<V>(t, acc);
    const auto high_half = V::set1_32(static_cast<int32_t>(0xffff0000));
    const uint8_t* line = t.lines;
    const float* a = reinterpret_cast<const float*>(chunk.base);
    constexpr int kUnroll = 4;
    for (const float* end = a + t.kc; a < end; a += 2 * kUnroll, line += kUnroll * kLineBytes) {
      KT_UNROLL
      for (int u = 0; u < kUnroll; ++u) {
        KT_UNROLL
        for (int half = 0; half < 2; ++half) {
          typename V::F32 w[N];
          KT_UNROLL
          for (int v = 0; v < N; ++v) {
            const auto bits = V::load(vector_at<V>(fresh(line), t.panel_stride, v) + u * kLineBytes);
            w[v] = V::bits_to_f32(half ? V::bit_and(bits, high_half) : V::template shift_left_32<16>(bits));
          }
          constexpr size_t kPitch = Chunk<F32Core>::kPitch / 4;
          KT_UNROLL
          for (int r = 0; r < R; ++r) {
            const auto x = V::set1_f32(a[r * kPitch + 2 * u + half]);
            KT_UNROLL
            for (int v = 0; v < N; ++v) {
              auto& sum = acc[(2 * u + half) % S][r][v];
              sum = V::fma(w[v], x, sum);
            }
          }
        }
      }
    }
    store_tile<S, R, N>(t, acc);
  }

  template <int S, int R, int N>
  static KT_INLINE void store_tile(const TileArgs& t, typename V::F32 (&acc)[S][R][N]) {
    KT_UNROLL
    for (int r = 0; r < R; ++r) {
      KT_UNROLL
      for (int v = 0; v < N; ++v) {
        auto sum = acc[0][r][v];
        KT_UNROLL
        for (int s = 1; s < S; ++s) sum = V::add(sum, acc[s][r][v]);
        V::store_f32(t.c + r * t.c_pitch + v * V::kLanes, sum);
      }
    }
  }
};

template <class V>
struct Bf16Core {
  static constexpr int kRows = 8;
  static constexpr int kPanels = 2;
  static constexpr int kChunk = 512;
  static constexpr int kElementBytes = 2;
  static constexpr int kInits = 0;
  template <class Format>
  struct Lines {};
  template <class Format>
  using Decoder = NoDecoder;

  static void gather(const Acts& acts, int row, int k0, int kc, int k, uint8_t* dst, float*, int32_t*) {
    const uint8_t* src = acts.data + row * acts.pitch + 2 * static_cast<size_t>(k0);
    const int valid = k - k0 < kc ? k - k0 : kc;
    std::memcpy(dst, src, 2 * static_cast<size_t>(valid));
    std::memset(dst + 2 * valid, 0, 2 * static_cast<size_t>(kc - valid));
  }

  template <class Source, int R, int P>
  static void tile(const TileArgs& t, Chunk<Bf16Core> chunk) {
    constexpr int N = P * kPanelRows / V::kLanes;
    constexpr int S = chains(R * kPanels * kPanelRows / V::kLanes);
    typename V::F32 acc[S][R][N];
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
          for (int v = 0; v < N; ++v) acc[u % S][r][v] = V::dot_bf16(acc[u % S][r][v], w[v], x);
        }
      }
    }
    F32Core<V>::template store_tile<S, R, N>(t, acc);
  }
};

}  // namespace
}  // namespace kt
