// AVX2 + FMA + F16C: eight lanes, sixteen registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace kt {
namespace {

struct Avx2 {
  static constexpr int kLanes = 8;
  static constexpr int kBytes = 32;
  static constexpr bool kManyRegisters = false;

  using F32 = __m256;
  using Int = __m256i;

  static F32 zero_f32() { return _mm256_setzero_ps(); }
  static F32 set1_f32(float f) { return _mm256_set1_ps(f); }
  static F32 load_f32(const float* p) { return _mm256_loadu_ps(p); }
  static void store_f32(float* p, F32 x) { _mm256_storeu_ps(p, x); }
  static F32 fma(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
  static F32 add(F32 a, F32 b) { return _mm256_add_ps(a, b); }
  static F32 sub(F32 a, F32 b) { return _mm256_sub_ps(a, b); }
  static F32 mul(F32 a, F32 b) { return _mm256_mul_ps(a, b); }
  static F32 min(F32 a, F32 b) { return _mm256_min_ps(a, b); }
  static F32 max(F32 a, F32 b) { return _mm256_max_ps(a, b); }
  static F32 abs(F32 a) { return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff))); }
  static float reduce_max(F32 a) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
  }

  static Int load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static void store(void* p, Int x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
  static Int set1_32(int32_t i) { return _mm256_set1_epi32(i); }
  static Int broadcast32(const void* p) {
    return _mm256_castps_si256(_mm256_broadcast_ss(static_cast<const float*>(p)));
  }
  static Int bit_and(Int a, Int b) { return _mm256_and_si256(a, b); }
  static Int bit_or(Int a, Int b) { return _mm256_or_si256(a, b); }
  template <int S>
  static Int shift_left_32(Int a) {
    return _mm256_slli_epi32(a, S);
  }
  template <int S>
  static Int shift_right_32(Int a) {
    return _mm256_srli_epi32(a, S);
  }
  // Copies of the sign come in from the left.
  template <int S>
  static Int shift_right_s32(Int a) {
    return _mm256_srai_epi32(a, S);
  }
  template <int S>
  static Int shift_right_16(Int a) {
    return _mm256_srli_epi16(a, S);
  }
  template <int S>
  static Int shift_left_16(Int a) {
    return _mm256_slli_epi16(a, S);
  }
  template <int S>
  static Int shift_right_s16(Int a) {
    return _mm256_srai_epi16(a, S);
  }
  // 16 bytes as a table, and what it holds at each byte of `index`, 0..15.
  static Int table16(const void* p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  }
  static Int look_up(Int table, Int index) { return _mm256_shuffle_epi8(table, index); }
  static Int add_8(Int a, Int b) { return _mm256_add_epi8(a, b); }
  static Int add_16(Int a, Int b) { return _mm256_add_epi16(a, b); }
  static Int add_32(Int a, Int b) { return _mm256_add_epi32(a, b); }
  static int32_t reduce_add_32(Int a) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
  }
  static Int sub_16(Int a, Int b) { return _mm256_sub_epi16(a, b); }
  static Int sub_32(Int a, Int b) { return _mm256_sub_epi32(a, b); }
  static Int mul_lo_16(Int a, Int b) { return _mm256_mullo_epi16(a, b); }
  static Int mul_lo_32(Int a, Int b) { return _mm256_mullo_epi32(a, b); }
  static Int madd_u8s8(Int u, Int s) { return _mm256_maddubs_epi16(u, s); }
  static Int madd_s16(Int a, Int b) { return _mm256_madd_epi16(a, b); }

  static Int bits_of(F32 a) { return _mm256_castps_si256(a); }
  static F32 bits_to_f32(Int a) { return _mm256_castsi256_ps(a); }
  static F32 to_f32(Int a) { return _mm256_cvtepi32_ps(a); }
  static Int round_to_32(F32 a) { return _mm256_cvtps_epi32(a); }
  static F32 load_bf16(const uint16_t* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
  }
  static F32 load_f16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  // Bytes as 32-bit lanes.
  static Int load_u8(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static Int load_s8(const uint8_t* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  // The words of the lower and of the upper half of a vector, which are f16.
  static F32 f16_low(Int a) { return _mm256_cvtph_ps(_mm256_castsi256_si128(a)); }
  static F32 f16_high(Int a) { return _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)); }
  // Two floats over and over.
  static F32 broadcast_pair(const float* p) {
    return _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(p)));
  }
  // The lanes 0 2 4 .. and 1 3 5 .. of a and then b.
  static F32 even_lanes(F32 a, F32 b) {
    const __m256 mixed = _mm256_shuffle_ps(a, b, 0x88);
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(mixed), 0xd8));
  }
  static F32 odd_lanes(F32 a, F32 b) {
    const __m256 mixed = _mm256_shuffle_ps(a, b, 0xdd);
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(mixed), 0xd8));
  }
  static F32 sum_of_pairs(F32 a, F32 b) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(_mm256_hadd_ps(a, b)), 0xd8));
  }
  static void store_bf16(uint16_t* p, F32 a) {
    const __m256i x = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(x, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(x, _mm256_set1_epi32(0x400000));
    const __m256 nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
    store_low_16(p, _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(nan)), 16));
  }
  static void store_low_8(void* p, Int a) {
    const __m256i bytes =
        _mm256_shuffle_epi8(a, _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8,
                                                12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
    const __m128i low = _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
    _mm_storel_epi64(static_cast<__m128i*>(p), low);
  }
  static void store_low_16(void* p, Int a) {
    const __m256i low = _mm256_and_si256(a, _mm256_set1_epi32(0xffff));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
  // Low words with the middle two of every four swapped: k0 k2 k1 k3.
  static void store_low_16_swapped(void* p, Int a) {
    const __m256i low = _mm256_and_si256(a, _mm256_set1_epi32(0xffff));
    const __m128i x = _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08));
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm_shufflehi_epi16(_mm_shufflelo_epi16(x, 0xd8), 0xd8));
  }
};

}  // namespace
}  // namespace kt
