// What a decoder does between its matrix products: norms, rotary embedding, attention over cached keys and values.
#pragma once

#include <cstring>

#include "base/bf16.h"
#include "kernels/elementwise-inl.h"
#include "kernels/kernel.h"
#include "kernels/unroll.h"

namespace kt {
namespace {

template <class V>
KT_INLINE float sum_of_lanes(typename V::F32 x) {
  float lanes[V::kLanes];
  V::store_f32(lanes, x);
  float sum = 0;
  for (float lane : lanes) sum += lane;
  return sum;
}

// Two chains: rows of a few thousand are read from L1 or L2.
template <class V>
float sum_of_squares(const uint16_t* x, int n) {
  auto even = V::zero_f32(), odd = V::zero_f32();
  int i = 0;
  for (; i + 2 * V::kLanes <= n; i += 2 * V::kLanes) {
    const auto a = V::load_bf16(x + i), b = V::load_bf16(x + i + V::kLanes);
    even = V::fma(a, a, even);
    odd = V::fma(b, b, odd);
  }
  float sum = sum_of_lanes<V>(V::add(even, odd));
  for (; i < n; ++i) sum += bf16_to_f32(x[i]) * bf16_to_f32(x[i]);
  return sum;
}

template <class V>
void normalise(const uint16_t* x, float factor, const float* weight, int n, uint16_t* out) {
  const auto f = V::set1_f32(factor);
  int i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes)
    V::store_bf16(out + i, V::mul(V::mul(V::load_bf16(x + i), f), V::load_f32(weight + i)));
  for (; i < n; ++i) out[i] = f32_to_bf16(bf16_to_f32(x[i]) * factor * weight[i]);
}

// out[i] = x[i] * factor * weight[i], as f32.
template <class V>
KT_INLINE void widen_scaled(const uint16_t* x, float factor, const float* weight, int n, float* out) {
  int i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) {
    auto y = V::mul(V::load_bf16(x + i), V::set1_f32(factor));
    if (weight) y = V::mul(y, V::load_f32(weight + i));
    V::store_f32(out + i, y);
  }
  for (; i < n; ++i) out[i] = bf16_to_f32(x[i]) * factor * (weight ? weight[i] : 1.0f);
}

// A few dozen pairs, one after the other.
KT_INLINE void rotate_neighbours(const RotateArgs& a) {
  const int half = a.rotary / 2;
  const bool stay = a.pairs == RotaryPairs::neighbours;
  const auto value = [&](int i) { return bf16_to_f32(a.x[i]) * a.factor * (a.weight ? a.weight[i] : 1.0f); };
  for (int i = 0; i < half; ++i) {
    const float x = value(2 * i), y = value(2 * i + 1);
    a.out[stay ? 2 * i : i] = x * a.cos[i] - y * a.sin[i];
    a.out[stay ? 2 * i + 1 : i + half] = y * a.cos[i] + x * a.sin[i];
  }
}

template <class V>
void rotate(const RotateArgs& a) {
  widen_scaled<V>(a.x, a.factor, a.weight, a.n, a.out);
  if (a.pairs != RotaryPairs::halves) return rotate_neighbours(a);
  const int half = a.rotary / 2;
  int i = 0;
  float *low = a.out, *high = a.out + half;
  for (; i + V::kLanes <= half; i += V::kLanes) {
    const auto x = V::load_f32(low + i), y = V::load_f32(high + i);
    const auto c = V::load_f32(a.cos + i), s = V::load_f32(a.sin + i);
    V::store_f32(low + i, V::sub(V::mul(x, c), V::mul(y, s)));
    V::store_f32(high + i, V::add(V::mul(y, c), V::mul(x, s)));
  }
  for (; i < half; ++i) {
    const float x = low[i], y = high[i];
    low[i] = x * a.cos[i] - y * a.sin[i];
    high[i] = y * a.cos[i] + x * a.sin[i];
  }
}

// Lane i of the result is the sum of the lanes of x[i].
template <class V, int N>
KT_INLINE typename V::F32 sums_of_lanes(const typename V::F32 (&x)[N]) {
  if constexpr (N == 1) {
    return x[0];
  } else {
    typename V::F32 half[N / 2];
    KT_UNROLL
    for (int i = 0; i < N / 2; ++i) half[i] = V::sum_of_pairs(x[2 * i], x[2 * i + 1]);
    return sums_of_lanes<V>(half);
  }
}

// cap * tanh(x / cap), with tanh(y) = 1 - 2 / (1 + e^2y).
template <class V>
KT_INLINE typename V::F32 capped(typename V::F32 x, float cap) {
  const auto power = exp2<V>(V::mul(x, V::set1_f32(2.0f * 1.44269504f / cap)));
  const auto inverse = reciprocal<V>(V::add(V::set1_f32(1.0f), power));
  return V::mul(V::set1_f32(cap), V::sub(V::set1_f32(1.0f), V::mul(V::set1_f32(2.0f), inverse)));
}

// Keys whose scores are in L1 at a time; 128 keys and values of 128 elements take 64 KB of L2.
constexpr int kAttendBlock = 128;
// Heads that read a key or a value together: widening it to f32 takes longer than multiplying it.
template <class V>
constexpr int kHeadsTogether = V::kManyRegisters ? 4 : 2;

// p[h][i] = score of key i of n, of H heads; up to a whole vector of keys, -inf behind the last. A step makes one
// vector of scores, L / H keys of every head. The order of a head's sums does not depend on H.
template <class V, int H>
KT_INLINE void attend_scores(const AttendArgs& a, const float* q, const uint16_t* keys, int n,
                             float (&p)[H][kAttendBlock]) {
  constexpr int L = V::kLanes, kKeys = L / H;
  for (int j = 0; j < n; j += kKeys) {
    const uint16_t* rows[kKeys];
    for (int i = 0; i < kKeys; ++i) rows[i] = keys + static_cast<size_t>(j + i < n ? j + i : n - 1) * a.pitch;
    typename V::F32 sums[L];
    KT_UNROLL
    for (int i = 0; i < L; ++i) sums[i] = V::zero_f32();
    for (int d = 0; d < a.head_dim; d += L) {
      typename V::F32 x[H];
      KT_UNROLL
      for (int h = 0; h < H; ++h) x[h] = V::load_f32(q + h * a.head_dim + d);
      KT_UNROLL
      for (int i = 0; i < kKeys; ++i) {
        const auto key = V::load_bf16(rows[i] + d);
        KT_UNROLL
        for (int h = 0; h < H; ++h) sums[h * kKeys + i] = V::fma(key, x[h], sums[h * kKeys + i]);
      }
    }
    auto score = V::mul(sums_of_lanes<V>(sums), V::set1_f32(a.scale));
    if (a.softcap > 0) score = capped<V>(score, a.softcap);
    float scores[L];
    V::store_f32(scores, score);
    for (int h = 0; h < H; ++h) std::memcpy(p[h] + j, scores + h * kKeys, 4 * kKeys);
  }
  for (int h = 0; h < H; ++h) {
    for (int i = n; i < round_up(n, L); ++i) p[h][i] = -__builtin_inff();
  }
}

// p[i] = e^(p[i] - most), most being the larger of `before` and of all p; returns their sum. What is below 2^-120
// counts as that, which vanishes beside the largest, 1.
template <class V>
KT_INLINE float attend_weights(float* p, int n, float before, float* most) {
  auto largest = V::set1_f32(before);
  for (int j = 0; j < n; j += V::kLanes) largest = V::max(V::load_f32(p + j), largest);
  *most = V::reduce_max(largest);
  auto sum = V::zero_f32();
  for (int j = 0; j < n; j += V::kLanes) {
    const auto x = V::mul(V::sub(V::load_f32(p + j), V::set1_f32(*most)), V::set1_f32(1.44269504f));
    const auto weight = exp2<V>(x);
    V::store_f32(p + j, weight);
    sum = V::add(sum, weight);
  }
  return sum_of_lanes<V>(sum);
}

// out[h][d] = keep[h] * out[h][d] + sum_j p[h][j] * values[j][d], of N vectors of d.
template <class V, int H, int N>
KT_INLINE void add_values(const AttendArgs& a, const uint16_t* values, int n, const float (&p)[H][kAttendBlock],
                          const float (&keep)[H], float* out) {
  typename V::F32 sum[H][N];
  KT_UNROLL
  for (int h = 0; h < H; ++h) {
    KT_UNROLL
    for (int v = 0; v < N; ++v)
      sum[h][v] = V::mul(V::load_f32(out + h * a.value_dim + v * V::kLanes), V::set1_f32(keep[h]));
  }
  for (int j = 0; j < n; ++j) {
    typename V::F32 value[N];
    KT_UNROLL
    for (int v = 0; v < N; ++v) value[v] = V::load_bf16(values + j * a.pitch + v * V::kLanes);
    KT_UNROLL
    for (int h = 0; h < H; ++h) {
      const auto weight = V::set1_f32(p[h][j]);
      KT_UNROLL
      for (int v = 0; v < N; ++v) sum[h][v] = V::fma(value[v], weight, sum[h][v]);
    }
  }
  KT_UNROLL
  for (int h = 0; h < H; ++h) {
    KT_UNROLL
    for (int v = 0; v < N; ++v) V::store_f32(out + h * a.value_dim + v * V::kLanes, sum[h][v]);
  }
}

// A block of keys, of H heads from `head` on.
template <class V, int H>
KT_INLINE void attend_heads(const AttendArgs& a, int head, const uint16_t* keys, const uint16_t* values, int n) {
  constexpr int kVectors = 4;
  alignas(64) float p[H][kAttendBlock];
  attend_scores<V, H>(a, a.q + static_cast<size_t>(head) * a.head_dim, keys, n, p);
  float keep[H];
  for (int h = 0; h < H; ++h) {
    const float before = a.most[head + h];
    const float sum = attend_weights<V>(p[h], n, before, &a.most[head + h]);
    float lanes[V::kLanes];
    V::store_f32(lanes, exp2<V>(V::set1_f32((before - a.most[head + h]) * 1.44269504f)));
    keep[h] = lanes[0];
    a.sum[head + h] = a.sum[head + h] * keep[h] + sum;
  }
  float* out = a.out + static_cast<size_t>(head) * a.value_dim;
  int d = 0;
  for (; d + kVectors * V::kLanes <= a.value_dim; d += kVectors * V::kLanes)
    add_values<V, H, kVectors>(a, values + d, n, p, keep, out + d);
  for (; d < a.value_dim; d += V::kLanes) add_values<V, H, 1>(a, values + d, n, p, keep, out + d);
}

template <class V>
void attend(const AttendArgs& a) {
  constexpr int kMost = kHeadsTogether<V>;
  for (int i = 0; i < a.heads * a.value_dim; ++i) a.out[i] = 0;
  for (int h = 0; h < a.heads; ++h) {
    a.most[h] = -__builtin_inff();
    a.sum[h] = 0;
  }
  for (int begin = 0; begin < a.count; begin += kAttendBlock) {
    const int n = a.count - begin < kAttendBlock ? a.count - begin : kAttendBlock;
    const uint16_t* keys = a.keys + begin * a.pitch;
    const uint16_t* values = a.values + begin * a.pitch;
    int h = 0;
    for (; h + kMost <= a.heads; h += kMost) attend_heads<V, kMost>(a, h, keys, values, n);
    if constexpr (kMost > 2) {
      for (; h + 2 <= a.heads; h += 2) attend_heads<V, 2>(a, h, keys, values, n);
    }
    for (; h < a.heads; ++h) attend_heads<V, 1>(a, h, keys, values, n);
  }
}

}  // namespace
}  // namespace kt
