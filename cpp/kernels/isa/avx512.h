// AVX-512 F/BW/DQ/VL: sixteen lanes, thirty-two registers; VNNI and BF16 dot products where the row has them.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace kt {
namespace {

struct Avx512 {
  static constexpr int kLanes = 16;
  static constexpr int kBytes = 64;
  static constexpr bool kManyRegisters = true;

  using F32 = __m512;
  using Int = __m512i;

  static F32 zero_f32() { return _mm512_setzero_ps(); }
  static F32 set1_f32(float f) { return _mm512_set1_ps(f); }
  static F32 load_f32(const float* p) { return _mm512_loadu_ps(p); }
  static void store_f32(float* p, F32 x) { _mm512_storeu_ps(p, x); }
  static F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
  static F32 add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
  static F32 sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
  static F32 mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
  static F32 min(F32 a, F32 b) { return _mm512_min_ps(a, b); }
  static F32 max(F32 a, F32 b) { return _mm512_max_ps(a, b); }
  static F32 abs(F32 a) { return _mm512_abs_ps(a); }
  static float reduce_max(F32 a) { return _mm512_reduce_max_ps(a); }

  static Int load(const void* p) { return _mm512_loadu_si512(p); }
  static void store(void* p, Int x) { _mm512_storeu_si512(p, x); }
  static Int set1_32(int32_t i) { return _mm512_set1_epi32(i); }
  static Int broadcast32(const void* p) { return _mm512_castps_si512(_mm512_set1_ps(*static_cast<const float*>(p))); }
  static Int bit_and(Int a, Int b) { return _mm512_and_si512(a, b); }
  static Int bit_or(Int a, Int b) { return _mm512_or_si512(a, b); }
  template <int S>
  static Int shift_left_32(Int a) {
    return _mm512_slli_epi32(a, S);
  }
  template <int S>
  static Int shift_right_32(Int a) {
    return _mm512_srli_epi32(a, S);
  }
  // Copies of the sign come in from the left.
  template <int S>
  static Int shift_right_s32(Int a) {
    return _mm512_srai_epi32(a, S);
  }
  template <int S>
  static Int shift_right_16(Int a) {
    return _mm512_srli_epi16(a, S);
  }
  template <int S>
  static Int shift_left_16(Int a) {
    return _mm512_slli_epi16(a, S);
  }
  template <int S>
  static Int shift_right_s16(Int a) {
    return _mm512_srai_epi16(a, S);
  }
  // 16 bytes as a table, and what it holds at each byte of `index`, 0..15.
  static Int table16(const void* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
  static Int look_up(Int table, Int index) { return _mm512_shuffle_epi8(table, index); }
  static Int add_8(Int a, Int b) { return _mm512_add_epi8(a, b); }
  static Int add_16(Int a, Int b) { return _mm512_add_epi16(a, b); }
  static Int add_32(Int a, Int b) { return _mm512_add_epi32(a, b); }
  static int32_t reduce_add_32(Int a) { return _mm512_reduce_add_epi32(a); }
  static Int sub_16(Int a, Int b) { return _mm512_sub_epi16(a, b); }
  static Int sub_32(Int a, Int b) { return _mm512_sub_epi32(a, b); }
  static Int mul_lo_16(Int a, Int b) { return _mm512_mullo_epi16(a, b); }
  static Int mul_lo_32(Int a, Int b) { return _mm512_mullo_epi32(a, b); }
  static Int madd_u8s8(Int u, Int s) { return _mm512_maddubs_epi16(u, s); }
  static Int madd_s16(Int a, Int b) { return _mm512_madd_epi16(a, b); }
#ifdef __AVX512VNNI__
  static Int dot_u8s8(Int acc, Int u, Int s) { return _mm512_dpbusd_epi32(acc, u, s); }
#endif
#ifdef __AVX512BF16__
  // 128 bytes as a table, and what it holds at the low seven bits of each byte of `index`.
  struct Table128 {
    Int low, high;
  };
  static Table128 table128(const void* p) { return {load(p), load(static_cast<const uint8_t*>(p) + 64)}; }
  static Int look_up(const Table128& table, Int index) {
    return _mm512_permutex2var_epi8(table.low, index, table.high);
  }
  // 32 words as a table, and what it holds at the low five bits of each word of `index`.
  static Int look_up_words(Int table, Int index) { return _mm512_permutexvar_epi16(index, table); }
  // 16 floats as a table, and what it holds at the low four bits of each lane of `index`.
  static F32 look_up_f32(F32 table, Int index) { return _mm512_permutexvar_ps(index, table); }
  static Int shift_right_lanes(Int a, Int by) { return _mm512_srlv_epi32(a, by); }
  // Unsigned, 0 where b is larger.
  static Int sub_sat_u16(Int a, Int b) { return _mm512_subs_epu16(a, b); }
  // The lanes of a and then b as bf16, to nearest even; denormals become 0.
  static Int narrow_bf16(F32 a, F32 b) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a)); }
  // The same as pairs: lane i is a[i] and, in the high word, b[i].
  static Int narrow_pairs(F32 a, F32 b) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    // Words 0 16 1 17 ..: i in the low word, 16 + i in the high one.
    const __m512i index = _mm512_or_si512(low, _mm512_slli_epi32(_mm512_add_epi32(low, _mm512_set1_epi32(16)), 16));
    return _mm512_permutexvar_epi16(index, narrow_bf16(a, b));
  }
  static F32 dot_bf16(F32 acc, Int a, Int b) {
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
#endif

  static Int bits_of(F32 a) { return _mm512_castps_si512(a); }
  static F32 bits_to_f32(Int a) { return _mm512_castsi512_ps(a); }
  static F32 to_f32(Int a) { return _mm512_cvtepi32_ps(a); }
  static Int round_to_32(F32 a) { return _mm512_cvtps_epi32(a); }
  static F32 load_bf16(const uint16_t* p) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }
  static F32 load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  // Bytes as 32-bit lanes.
  static Int load_u8(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Int load_s8(const uint8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  // The words of the lower and of the upper half of a vector, which are f16.
  static F32 f16_low(Int a) { return _mm512_cvtph_ps(_mm512_castsi512_si256(a)); }
  static F32 f16_high(Int a) { return _mm512_cvtph_ps(_mm512_extracti64x4_epi64(a, 1)); }
  // Two floats over and over.
  static F32 broadcast_pair(const float* p) {
    double both;
    std::memcpy(&both, p, 8);
    return _mm512_castpd_ps(_mm512_set1_pd(both));
  }
  // The lanes 0 2 4 .. and 1 3 5 .. of a and then b.
  static F32 even_lanes(F32 a, F32 b) {
    const __m512i index = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return _mm512_permutex2var_ps(a, index, b);
  }
  static F32 odd_lanes(F32 a, F32 b) {
    const __m512i index = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    return _mm512_permutex2var_ps(a, index, b);
  }
  static F32 sum_of_pairs(F32 a, F32 b) { return add(even_lanes(a, b), odd_lanes(a, b)); }
  // Each lane of the lower or of the upper half twice.
  static F32 twice_low(F32 a) {
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), a);
  }
  static F32 twice_high(F32 a) {
    return _mm512_permutexvar_ps(_mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15), a);
  }
  // Not vcvtneps2bf16: it flushes denormals, and every ISA gives the same bits here.
  static void store_bf16(uint16_t* p, F32 a) {
    const __m512i x = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(x, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(x, _mm512_set1_epi32(0x400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    store_low_16(p, _mm512_srli_epi32(_mm512_mask_blend_epi32(nan, rounded, quiet), 16));
  }
  static void store_low_8(void* p, Int a) { _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a)); }
  static void store_low_16(void* p, Int a) { _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a)); }
  // Low words with the middle two of every four swapped: k0 k2 k1 k3.
  static void store_low_16_swapped(void* p, Int a) {
    const __m256i x = _mm512_cvtepi32_epi16(a);
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(x, 0xd8), 0xd8));
  }
};

}  // namespace
}  // namespace kt
