// The loops of limits.h for the instruction set this file is compiled for. Included once by every ISA object, so
// everything lives in an unnamed namespace and nothing but intrinsics and tile traits is used.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/gemm_tiles-inl.h"
#include "kernels/isa/row.h"
#include "kernels/limits.h"

#ifndef KT_EMULATED
#include <immintrin.h>
#endif

namespace kt {
namespace {

#if !defined(KT_EMULATED) && defined(__AVX2__)

#ifdef __AVX512F__
#define KT_PEAK_REGISTER "v"  // zmm0..31
#else
#define KT_PEAK_REGISTER "x"  // ymm0..15
#endif

// Makes the compiler forget what it knows about every accumulator, at no cost: without it equal chains would be merged
// and unused ones dropped.
template <int N, typename Vector>
[[gnu::always_inline]] inline void hide(Vector (&acc)[N]) {
#pragma GCC unroll 32
  for (int i = 0; i < N; ++i) __asm__ volatile("" : "+" KT_PEAK_REGISTER(acc[i]));
}

#undef KT_PEAK_REGISTER

// N chains, one step each per round. Two pipes of latency 6 (vdpbf16ps, the slowest) need 12 chains; 12 and two
// operands also fit the 16 registers of AVX2.
constexpr int kChains = 12;

template <typename Vector, typename Step>
[[gnu::always_inline]] inline void run_chains(uint64_t iterations, Vector start, Step step) {
  Vector acc[kChains];
#pragma GCC unroll 32
  for (int i = 0; i < kChains; ++i) acc[i] = start;
  hide(acc);
  for (uint64_t n = 0; n < iterations; ++n) {
#pragma GCC unroll 32
    for (int i = 0; i < kChains; ++i) acc[i] = step(acc[i]);
    hide(acc);
  }
}

#ifdef __AVX512F__

uint64_t peak_fma_f32(uint64_t iterations) {
  const __m512 one = _mm512_set1_ps(1.0f);
  run_chains(iterations, one, [&](__m512 acc) { return _mm512_fmadd_ps(one, one, acc); });
  return iterations * kChains * 16 * 2;
}

// 4 lines of one stream per round. Tried on 2 cores of a Zen 4, GB/s AVX2 / AVX-512: this 68 / 64; two streams 48 / 45;
// with prefetch 512..4096 B ahead never better. 8 lines 68 / 45: gcc 12 reorders the loads, and the hardware prefetcher
// wants them in order.
uint64_t read_stream(const void* data, size_t bytes) {
  const auto* p = static_cast<const uint8_t*>(data);
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  size_t i = 0;
  for (; i + 256 <= bytes; i += 256) {
    a = _mm512_or_si512(a, _mm512_loadu_si512(p + i));
    b = _mm512_or_si512(b, _mm512_loadu_si512(p + i + 64));
    c = _mm512_or_si512(c, _mm512_loadu_si512(p + i + 128));
    d = _mm512_or_si512(d, _mm512_loadu_si512(p + i + 192));
  }
  alignas(64) uint64_t lanes[8];
  _mm512_store_si512(lanes, _mm512_or_si512(_mm512_or_si512(a, b), _mm512_or_si512(c, d)));
  uint64_t sink = 0;
  for (uint64_t lane : lanes) sink |= lane;
  for (; i < bytes; ++i) sink |= p[i];
  return sink;
}

#else

uint64_t peak_fma_f32(uint64_t iterations) {
  const __m256 one = _mm256_set1_ps(1.0f);
  run_chains(iterations, one, [&](__m256 acc) { return _mm256_fmadd_ps(one, one, acc); });
  return iterations * kChains * 8 * 2;
}

// See the AVX-512 twin for the patterns tried.
uint64_t read_stream(const void* data, size_t bytes) {
  const auto* p = static_cast<const uint8_t*>(data);
  __m256i acc[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
  size_t i = 0;
  for (; i + 256 <= bytes; i += 256) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      const auto* v = reinterpret_cast<const __m256i*>(p + i + 32 * j);
      acc[j % 4] = _mm256_or_si256(acc[j % 4], _mm256_loadu_si256(v));
    }
  }
  alignas(32) uint64_t lanes[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes),
                     _mm256_or_si256(_mm256_or_si256(acc[0], acc[1]), _mm256_or_si256(acc[2], acc[3])));
  uint64_t sink = lanes[0] | lanes[1] | lanes[2] | lanes[3];
  for (; i < bytes; ++i) sink |= p[i];
  return sink;
}

#endif  // __AVX512F__

#ifdef __AVX512BF16__
uint64_t peak_dot_bf16(uint64_t iterations) {
  const __m512bh one = (__m512bh)_mm512_set1_epi16(0x3f80);
  const __m512 zero = _mm512_setzero_ps();
  run_chains(iterations, zero, [&](__m512 acc) { return _mm512_dpbf16_ps(acc, one, one); });
  return iterations * kChains * 32 * 2;
}
#define KT_PEAK_DOT_BF16 peak_dot_bf16
#else
#define KT_PEAK_DOT_BF16 nullptr
#endif

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
uint64_t peak_dot_u8s8(uint64_t iterations) {
  const __m512i one = _mm512_set1_epi8(1);
  const __m512i zero = _mm512_setzero_si512();
  run_chains(iterations, zero, [&](__m512i acc) { return _mm512_dpbusd_epi32(acc, one, one); });
  return iterations * kChains * 64 * 2;
}
#define KT_PEAK_DOT_U8S8 peak_dot_u8s8
#else
#define KT_PEAK_DOT_U8S8 nullptr
#endif

#if defined(KT_ISA_AMX)

// 1.0 as bf16; as bytes some pattern that is not zero.
template <int N>
void fill_tiles(uint16_t (&tiles)[N][512]) {
  for (auto& tile : tiles) {
    for (uint16_t& value : tile) value = 0x3f80;
  }
}

template <bool kInt>
constexpr uint64_t kTileOps = 16 * 16 * (kInt ? 64 : 32) * 2;

// Two products into two tiles of sums, as in a real kernel; a chain into one would be as fast. kLoads: with the loads
// of the kernel, from L1.
template <bool kInt, bool kLoads>
uint64_t peak_tiles(uint64_t iterations) {
  // Operands of four steps: a quarter of L1, so that they stay where a hyperthread has half of it.
  constexpr uint64_t kSteps = 4;
  alignas(64) uint16_t operands[3 * kSteps][512];
  fill_tiles(operands);
  Tiles::begin();
  Tiles::zero<0>();
  Tiles::zero<1>();
  load_operands<Tiles>(reinterpret_cast<const uint8_t*>(operands[0]), kLineBytes,
                       reinterpret_cast<const uint8_t*>(operands[1]));
  for (uint64_t n = 0; n < iterations; ++n) {
    const auto* next = reinterpret_cast<const uint8_t*>(operands[n % kSteps * 3]);
    tile_dot<Tiles, kInt, 0, 2, 3>();
    if constexpr (kLoads) Tiles::load<3>(next + 2 * kTileBytes, kLineBytes);
    tile_dot<Tiles, kInt, 1, 2, 3>();
    if constexpr (kLoads) load_operands<Tiles>(next, kLineBytes, next + kTileBytes);
  }
  Tiles::end();
  return iterations * 2 * kTileOps<kInt>;
}

template <bool kInt>
uint64_t peak_tiles_2x2(uint64_t iterations) {
  alignas(64) uint16_t operands[4][512];
  fill_tiles(operands);
  Tiles::begin();
  Tiles::zero<0>();
  Tiles::zero<1>();
  Tiles::zero<2>();
  Tiles::zero<3>();
  Tiles::load<4>(operands[0], kLineBytes);
  Tiles::load<5>(operands[1], kLineBytes);
  Tiles::load<6>(operands[2], kLineBytes);
  Tiles::load<7>(operands[3], kLineBytes);
  for (uint64_t n = 0; n < iterations; ++n) {
    tile_dot<Tiles, kInt, 0, 4, 6>();
    tile_dot<Tiles, kInt, 1, 4, 7>();
    tile_dot<Tiles, kInt, 2, 5, 6>();
    tile_dot<Tiles, kInt, 3, 5, 7>();
  }
  Tiles::end();
  return iterations * 4 * kTileOps<kInt>;
}

// clang-format off
#define KT_PEAK_TILES \
  peak_tiles<false, false>, peak_tiles<true, false>, peak_tiles<false, true>, peak_tiles<true, true>, \
  peak_tiles_2x2<false>, peak_tiles_2x2<true>
// clang-format on
#else
#define KT_PEAK_TILES nullptr, nullptr, nullptr, nullptr, nullptr, nullptr
#endif

constexpr LimitLoops kLimitLoops = {peak_fma_f32, KT_PEAK_DOT_BF16, KT_PEAK_DOT_U8S8, KT_PEAK_TILES, read_stream};

#undef KT_PEAK_DOT_BF16
#undef KT_PEAK_DOT_U8S8
#undef KT_PEAK_TILES

#else  // emulated: a machine without vectors has no peak worth a share, but memory is memory

uint64_t read_stream(const void* data, size_t bytes) {
  const auto* p = static_cast<const uint8_t*>(data);
  uint64_t sink = 0;
  size_t i = 0;
  for (; i + 8 <= bytes; i += 8) {
    uint64_t word;
    __builtin_memcpy(&word, p + i, 8);
    sink |= word;
  }
  for (; i < bytes; ++i) sink |= p[i];
  return sink;
}

constexpr LimitLoops kLimitLoops = {.read_stream = read_stream};

#endif

}  // namespace
}  // namespace kt
