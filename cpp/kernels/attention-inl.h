// What a decoder does between its matrix products: norms, rotary embedding, attention over cached keys and values.
#pragma once

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

template <class V>
void rotate(const RotateArgs& a) {
  widen_scaled<V>(a.x, a.factor, a.weight, a.n, a.out);
  const int half = a.rotary / 2;
  int i = 0;
  if (a.interleaved) {
    for (; i < half; ++i) {
      const float x = a.out[2 * i], y = a.out[2 * i + 1];
      a.out[2 * i] = x * a.cos[i] - y * a.sin[i];
      a.out[2 * i + 1] = y * a.cos[i] + x * a.sin[i];
    }
    return;
  }
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

// Keys whose scores are in L1 at a time; a key and a value of 128 take 64 KB of L2 together.
constexpr int kAttendBlock = 128;

// p[i] = score of key i of n, as many at a time as there are lanes; lanes behind the last get -inf. Returns the
// largest.
template <class V>
KT_INLINE float attend_scores(const AttendArgs& a, const float* q, const uint16_t* keys, int n, float* p) {
  constexpr int L = V::kLanes;
  auto most = V::set1_f32(-__builtin_inff());
  for (int j = 0; j < n; j += L) {
    const uint16_t* rows[L];
    for (int i = 0; i < L; ++i) rows[i] = keys + static_cast<size_t>(j + i < n ? j + i : n - 1) * a.pitch;
    typename V::F32 sums[L];
    KT_UNROLL
    for (int i = 0; i < L; ++i) sums[i] = V::zero_f32();
    for (int d = 0; d < a.head_dim; d += L) {
      const auto x = V::load_f32(q + d);
      KT_UNROLL
      for (int i = 0; i < L; ++i) sums[i] = V::fma(V::load_bf16(rows[i] + d), x, sums[i]);
    }
    auto score = V::mul(sums_of_lanes<V>(sums), V::set1_f32(a.scale));
    if (a.softcap > 0) score = capped<V>(score, a.softcap);
    V::store_f32(p + j, score);
    for (int i = n - j; i < L; ++i) p[j + i] = -__builtin_inff();
    most = V::max(V::load_f32(p + j), most);
  }
  return V::reduce_max(most);
}

// p[i] = e^(p[i] - most); returns their sum. What is below 2^-120 counts as that, which vanishes beside the largest, 1.
template <class V>
KT_INLINE float attend_weights(float* p, int n, float most) {
  auto sum = V::zero_f32();
  for (int j = 0; j < n; j += V::kLanes) {
    const auto x = V::mul(V::sub(V::load_f32(p + j), V::set1_f32(most)), V::set1_f32(1.44269504f));
    const auto weight = exp2<V>(x);
    V::store_f32(p + j, weight);
    sum = V::add(sum, weight);
  }
  return sum_of_lanes<V>(sum);
}

// out[d] = keep * out[d] + sum_j p[j] * values[j][d], N vectors at a time.
template <class V, int N>
KT_INLINE void add_values(const AttendArgs& a, const uint16_t* values, int n, const float* p, float keep, float* out) {
  typename V::F32 sum[N];
  KT_UNROLL
  for (int v = 0; v < N; ++v) sum[v] = V::mul(V::load_f32(out + v * V::kLanes), V::set1_f32(keep));
  for (int j = 0; j < n; ++j) {
    const auto weight = V::set1_f32(p[j]);
    KT_UNROLL
    for (int v = 0; v < N; ++v) sum[v] = V::fma(V::load_bf16(values + j * a.pitch + v * V::kLanes), weight, sum[v]);
  }
  KT_UNROLL
  for (int v = 0; v < N; ++v) V::store_f32(out + v * V::kLanes, sum[v]);
}

template <class V>
void attend(const AttendArgs& a) {
  constexpr int kVectors = 4;
  alignas(64) float p[kAttendBlock];
  for (int i = 0; i < a.heads * a.head_dim; ++i) a.out[i] = 0;
  for (int h = 0; h < a.heads; ++h) {
    a.most[h] = -__builtin_inff();
    a.sum[h] = 0;
  }
  for (int begin = 0; begin < a.count; begin += kAttendBlock) {
    const int n = a.count - begin < kAttendBlock ? a.count - begin : kAttendBlock;
    const uint16_t* keys = a.keys + begin * a.pitch;
    const uint16_t* values = a.values + begin * a.pitch;
    for (int h = 0; h < a.heads; ++h) {
      const float* q = a.q + static_cast<size_t>(h) * a.head_dim;
      float* out = a.out + static_cast<size_t>(h) * a.head_dim;
      const float block_most = attend_scores<V>(a, q, keys, n, p);
      const float most = block_most > a.most[h] ? block_most : a.most[h];
      float keep[V::kLanes];
      V::store_f32(keep, exp2<V>(V::set1_f32((a.most[h] - most) * 1.44269504f)));
      a.sum[h] = a.sum[h] * keep[0] + attend_weights<V>(p, n, most);
      a.most[h] = most;
      int d = 0;
      for (; d + kVectors * V::kLanes <= a.head_dim; d += kVectors * V::kLanes)
        add_values<V, kVectors>(a, values + d, n, p, keep[0], out + d);
      for (; d < a.head_dim; d += V::kLanes) add_values<V, 1>(a, values + d, n, p, keep[0], out + d);
    }
  }
}

}  // namespace
}  // namespace kt
