// The scalar witness of a vector instruction set with N lanes of 32 bits: same operations, plain loops.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/bf16.h"

namespace kt {
namespace {

template <int N>
struct EmuVec {
  static constexpr int kLanes = N;
  static constexpr int kBytes = 4 * N;
  // Wide twins stand for AVX-512 (32 registers), narrow ones for AVX2 (16).
  static constexpr bool kManyRegisters = N == 16;

  struct F32 {
    float v[N];
  };
  struct Int {
    uint8_t b[4 * N];
  };

  template <class T, class Op>
  static Int map(Int x, Int y, Op op) {
    T a[4 * N / sizeof(T)], c[4 * N / sizeof(T)];
    std::memcpy(a, x.b, 4 * N);
    std::memcpy(c, y.b, 4 * N);
    for (unsigned i = 0; i < 4 * N / sizeof(T); ++i) a[i] = static_cast<T>(op(a[i], c[i]));
    Int r;
    std::memcpy(r.b, a, 4 * N);
    return r;
  }
  template <class Op>
  static F32 map_f32(F32 x, F32 y, Op op) {
    for (int i = 0; i < N; ++i) x.v[i] = op(x.v[i], y.v[i]);
    return x;
  }

  static F32 zero_f32() { return set1_f32(0); }
  static F32 set1_f32(float f) {
    F32 r;
    for (float& x : r.v) x = f;
    return r;
  }
  static F32 load_f32(const float* p) {
    F32 r;
    std::memcpy(r.v, p, 4 * N);
    return r;
  }
  static void store_f32(float* p, F32 x) { std::memcpy(p, x.v, 4 * N); }
  static F32 fma(F32 a, F32 b, F32 c) {
    for (int i = 0; i < N; ++i) a.v[i] = std::fma(a.v[i], b.v[i], c.v[i]);
    return a;
  }
  static F32 add(F32 a, F32 b) {
    return map_f32(a, b, [](float x, float y) { return x + y; });
  }
  static F32 sub(F32 a, F32 b) {
    return map_f32(a, b, [](float x, float y) { return x - y; });
  }
  static F32 mul(F32 a, F32 b) {
    return map_f32(a, b, [](float x, float y) { return x * y; });
  }
  // min and max return the second operand when either is NaN, as x86 does.
  static F32 min(F32 a, F32 b) {
    return map_f32(a, b, [](float x, float y) { return x < y ? x : y; });
  }
  static F32 max(F32 a, F32 b) {
    return map_f32(a, b, [](float x, float y) { return x > y ? x : y; });
  }
  static F32 abs(F32 a) {
    for (float& x : a.v) x = std::fabs(x);
    return a;
  }
  static float reduce_max(F32 a) {
    float m = a.v[0];
    for (float x : a.v) m = x > m ? x : m;
    return m;
  }

  static Int load(const void* p) {
    Int r;
    std::memcpy(r.b, p, 4 * N);
    return r;
  }
  static void store(void* p, Int x) { std::memcpy(p, x.b, 4 * N); }
  static Int set1_32(int32_t i) {
    Int r;
    for (int j = 0; j < N; ++j) std::memcpy(r.b + 4 * j, &i, 4);
    return r;
  }
  static Int broadcast32(const void* p) {
    int32_t i;
    std::memcpy(&i, p, 4);
    return set1_32(i);
  }
  static Int bit_and(Int a, Int b) {
    return map<uint8_t>(a, b, [](int x, int y) { return x & y; });
  }
  static Int bit_or(Int a, Int b) {
    return map<uint8_t>(a, b, [](int x, int y) { return x | y; });
  }
  template <int S>
  static Int shift_left_32(Int a) {
    return map<uint32_t>(a, a, [](uint32_t x, uint32_t) { return x << S; });
  }
  template <int S>
  static Int shift_right_32(Int a) {
    return map<uint32_t>(a, a, [](uint32_t x, uint32_t) { return x >> S; });
  }
  template <int S>
  static Int shift_right_s32(Int a) {
    return map<int32_t>(a, a, [](int32_t x, int32_t) { return x >> S; });
  }
  template <int S>
  static Int shift_right_16(Int a) {
    return map<uint16_t>(a, a, [](int x, int) { return x >> S; });
  }
  template <int S>
  static Int shift_left_16(Int a) {
    return map<uint16_t>(a, a, [](int x, int) { return x << S; });
  }
  template <int S>
  static Int shift_right_s16(Int a) {
    return map<int16_t>(a, a, [](int x, int) { return x >> S; });
  }
  static Int table16(const void* p) {
    Int r;
    for (int i = 0; i < 4 * N; i += 16) std::memcpy(r.b + i, p, 16);
    return r;
  }
  static Int look_up(Int table, Int index) {
    for (int i = 0; i < 4 * N; ++i) index.b[i] = index.b[i] & 0x80 ? 0 : table.b[i / 16 * 16 + index.b[i] % 16];
    return index;
  }
  struct Table128 {
    uint8_t b[128];
  };
  static Table128 table128(const void* p) {
    Table128 r;
    std::memcpy(r.b, p, 128);
    return r;
  }
  static Int look_up(const Table128& table, Int index) {
    for (uint8_t& x : index.b) x = table.b[x & 127];
    return index;
  }
  static Int look_up_words(Int table, Int index) {
    uint16_t words[2 * N];
    std::memcpy(words, table.b, 4 * N);
    return map<uint16_t>(index, index, [&](int x, int) { return words[x % (2 * N)]; });
  }
  static F32 look_up_f32(F32 table, Int index) {
    F32 r;
    for (int i = 0; i < N; ++i) r.v[i] = table.v[index.b[4 * i] % N];
    return r;
  }
  static Int shift_right_lanes(Int a, Int by) {
    return map<uint32_t>(a, by, [](uint32_t x, uint32_t y) { return y < 32 ? x >> y : 0; });
  }
  static Int sub_sat_u16(Int a, Int b) {
    return map<uint16_t>(a, b, [](int x, int y) { return x < y ? 0 : x - y; });
  }
  static Int add_8(Int a, Int b) {
    return map<uint8_t>(a, b, [](int x, int y) { return x + y; });
  }
  static Int add_16(Int a, Int b) {
    return map<uint16_t>(a, b, [](int x, int y) { return x + y; });
  }
  static Int add_32(Int a, Int b) {
    return map<uint32_t>(a, b, [](uint32_t x, uint32_t y) { return x + y; });
  }
  static int32_t reduce_add_32(Int a) {
    uint32_t sum = 0;
    for (int i = 0; i < N; ++i) {
      uint32_t x;
      std::memcpy(&x, a.b + 4 * i, 4);
      sum += x;
    }
    return static_cast<int32_t>(sum);
  }
  static Int sub_16(Int a, Int b) {
    return map<uint16_t>(a, b, [](int x, int y) { return x - y; });
  }
  static Int sub_32(Int a, Int b) {
    return map<uint32_t>(a, b, [](uint32_t x, uint32_t y) { return x - y; });
  }
  static Int mul_lo_16(Int a, Int b) {
    return map<uint16_t>(a, b, [](uint32_t x, uint32_t y) { return x * y; });
  }
  static Int mul_lo_32(Int a, Int b) {
    return map<uint32_t>(a, b, [](uint32_t x, uint32_t y) { return x * y; });
  }
  // pmaddubsw: u8 x s8, pairs summed to int16 with saturation.
  static Int madd_u8s8(Int u, Int s) {
    Int r;
    for (int i = 0; i < 2 * N; ++i) {
      int sum = u.b[2 * i] * static_cast<int8_t>(s.b[2 * i]) + u.b[2 * i + 1] * static_cast<int8_t>(s.b[2 * i + 1]);
      sum = sum > 32767 ? 32767 : sum < -32768 ? -32768 : sum;
      const int16_t w = static_cast<int16_t>(sum);
      std::memcpy(r.b + 2 * i, &w, 2);
    }
    return r;
  }
  // pmaddwd: int16 pairs summed to int32.
  static Int madd_s16(Int a, Int b) {
    Int r;
    for (int i = 0; i < N; ++i) {
      int16_t x[2], y[2];
      std::memcpy(x, a.b + 4 * i, 4);
      std::memcpy(y, b.b + 4 * i, 4);
      const uint32_t sum = static_cast<uint32_t>(x[0] * y[0]) + static_cast<uint32_t>(x[1] * y[1]);
      std::memcpy(r.b + 4 * i, &sum, 4);
    }
    return r;
  }
  // vpdpbusd: acc + sum of four u8 x s8.
  static Int dot_u8s8(Int acc, Int u, Int s) {
    for (int i = 0; i < N; ++i) {
      uint32_t sum;
      std::memcpy(&sum, acc.b + 4 * i, 4);
      for (int j = 4 * i; j < 4 * i + 4; ++j) sum += static_cast<uint32_t>(u.b[j] * static_cast<int8_t>(s.b[j]));
      std::memcpy(acc.b + 4 * i, &sum, 4);
    }
    return acc;
  }
  // vdpbf16ps: acc + a0 b0 + a1 b1.
  static F32 dot_bf16(F32 acc, Int a, Int b) {
    for (int i = 0; i < N; ++i) {
      uint16_t x[2], y[2];
      std::memcpy(x, a.b + 4 * i, 4);
      std::memcpy(y, b.b + 4 * i, 4);
      acc.v[i] =
          std::fma(bf16_to_f32(x[1]), bf16_to_f32(y[1]), std::fma(bf16_to_f32(x[0]), bf16_to_f32(y[0]), acc.v[i]));
    }
    return acc;
  }

  static Int bits_of(F32 a) { return load(a.v); }
  static F32 bits_to_f32(Int a) { return load_f32(reinterpret_cast<const float*>(a.b)); }
  static F32 to_f32(Int a) {
    F32 r;
    for (int i = 0; i < N; ++i) {
      int32_t x;
      std::memcpy(&x, a.b + 4 * i, 4);
      r.v[i] = static_cast<float>(x);
    }
    return r;
  }
  // Rounds to nearest even; NaN and values outside int32 give INT32_MIN, as x86 does.
  static Int round_to_32(F32 a) {
    Int r;
    for (int i = 0; i < N; ++i) {
      const float f = std::nearbyint(a.v[i]);
      const int32_t x = f >= -2147483648.0f && f < 2147483648.0f ? static_cast<int32_t>(f) : INT32_MIN;
      std::memcpy(r.b + 4 * i, &x, 4);
    }
    return r;
  }
  static F32 load_bf16(const uint16_t* p) {
    F32 r;
    for (int i = 0; i < N; ++i) r.v[i] = bf16_to_f32(p[i]);
    return r;
  }
  static float from_f16(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
    uint32_t x = sign | ((magnitude << 13) + (112u << 23));
    if (magnitude >= 0x7c00u)
      x = sign | 0x7f800000u | (magnitude & 0x3ffu) << 13 | (magnitude > 0x7c00u ? 0x400000u : 0);
    float f;
    std::memcpy(&f, &x, 4);
    return magnitude < 0x400u ? std::copysign(std::ldexp(static_cast<float>(magnitude), -24), f) : f;
  }
  static F32 load_f16(const void* p) {
    F32 r;
    for (int i = 0; i < N; ++i) {
      uint16_t bits;
      std::memcpy(&bits, static_cast<const uint8_t*>(p) + 2 * i, 2);
      r.v[i] = from_f16(bits);
    }
    return r;
  }
  static Int load_u8(const uint8_t* p) {
    Int r = set1_32(0);
    for (int i = 0; i < N; ++i) r.b[4 * i] = p[i];
    return r;
  }
  static Int load_s8(const uint8_t* p) {
    Int r;
    for (int i = 0; i < N; ++i) {
      const int32_t x = static_cast<int8_t>(p[i]);
      std::memcpy(r.b + 4 * i, &x, 4);
    }
    return r;
  }
  static F32 f16_low(Int a) { return load_f16(a.b); }
  static F32 f16_high(Int a) { return load_f16(a.b + 2 * N); }
  static F32 broadcast_pair(const float* p) {
    F32 r;
    for (int i = 0; i < N; ++i) r.v[i] = p[i % 2];
    return r;
  }
  static F32 every_second(F32 a, F32 b, int from) {
    F32 r;
    for (int i = 0; i < N; ++i) r.v[i] = (i < N / 2 ? a : b).v[2 * (i % (N / 2)) + from];
    return r;
  }
  static F32 even_lanes(F32 a, F32 b) { return every_second(a, b, 0); }
  static F32 odd_lanes(F32 a, F32 b) { return every_second(a, b, 1); }
  static F32 sum_of_pairs(F32 a, F32 b) { return add(even_lanes(a, b), odd_lanes(a, b)); }
  static F32 twice_low(F32 a) {
    F32 r;
    for (int i = 0; i < N; ++i) r.v[i] = a.v[i / 2];
    return r;
  }
  static F32 twice_high(F32 a) {
    F32 r;
    for (int i = 0; i < N; ++i) r.v[i] = a.v[N / 2 + i / 2];
    return r;
  }
  static Int narrow_bf16(F32 a, F32 b) {
    Int r;
    for (int i = 0; i < 2 * N; ++i) {
      const float f = (i < N ? a : b).v[i % N];
      const uint16_t bits = f32_to_bf16(std::fpclassify(f) == FP_SUBNORMAL ? std::copysign(0.0f, f) : f);
      std::memcpy(r.b + 2 * i, &bits, 2);
    }
    return r;
  }
  static Int narrow_pairs(F32 a, F32 b) {
    const Int side_by_side = narrow_bf16(a, b);
    Int r;
    for (int i = 0; i < 2 * N; ++i) std::memcpy(r.b + 2 * i, side_by_side.b + 2 * (i / 2 + i % 2 * N), 2);
    return r;
  }
  static void store_bf16(uint16_t* p, F32 a) {
    for (int i = 0; i < N; ++i) p[i] = f32_to_bf16(a.v[i]);
  }
  // Stores the low byte or word of each lane; the values fit.
  static void store_low_8(void* p, Int a) {
    for (int i = 0; i < N; ++i) static_cast<uint8_t*>(p)[i] = a.b[4 * i];
  }
  static void store_low_16(void* p, Int a) {
    for (int i = 0; i < N; ++i) std::memcpy(static_cast<uint8_t*>(p) + 2 * i, a.b + 4 * i, 2);
  }
  // Low words with the middle two of every four swapped: k0 k2 k1 k3.
  static void store_low_16_swapped(void* p, Int a) {
    for (int i = 0; i < N; ++i) {
      const int from = i % 4 == 1 ? i + 1 : i % 4 == 2 ? i - 1 : i;
      std::memcpy(static_cast<uint8_t*>(p) + 2 * i, a.b + 4 * from, 2);
    }
  }
};

}  // namespace
}  // namespace kt
