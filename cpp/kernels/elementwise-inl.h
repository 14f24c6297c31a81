// The work between the matrix products: quantising activations, gate times up, weighted sums, rounding to bf16.
#pragma once

#include <cfloat>
#include <cstring>

#include "base/bf16.h"
#include "kernels/kernel.h"
#include "kernels/unroll.h"

namespace kt {
namespace {

// bf16 to f32, with zeros behind.
template <class V>
KT_INLINE void widen_row(const uint16_t* x, int valid, int padded, float* out) {
  int i = 0;
  for (; i + V::kLanes <= valid; i += V::kLanes) V::store_f32(out + i, V::load_bf16(x + i));
  for (; i < valid; ++i) out[i] = bf16_to_f32(x[i]);
  for (; i < padded; ++i) out[i] = 0;
}

// What a span of a row has in common.
struct SpanScale {
  float scale;
  float inverse;  // 0: nothing to quantise
};

// A NaN or Inf anywhere makes the scale NaN, so it reaches the outputs of its own token instead of vanishing in an
// integer. Zeros, denormals whose inverse is no float, and poisoned spans get integers of 0, which keep the kernels'
// int32 arithmetic in range.
template <class V>
KT_INLINE SpanScale scale_of_span(const float* x, int padded, float most) {
  auto largest = V::zero_f32();
  auto poison = V::zero_f32();
  for (int i = 0; i < padded; i += V::kLanes) {
    const auto v = V::load_f32(x + i);
    largest = V::max(largest, V::abs(v));
    poison = V::fma(v, V::zero_f32(), poison);
  }
  float lanes[V::kLanes];
  V::store_f32(lanes, poison);
  float nan = 0;
  for (float lane : lanes) nan += lane;
  const float amax = V::reduce_max(largest);
  return {amax / most + nan, nan == 0.0f && most / amax <= FLT_MAX ? most / amax : 0.0f};
}

// One kActGroup, or its tail. Returns the sum.
template <class V, ActKind kKind>
KT_INLINE int32_t quantise_group(const float* x, int padded, float inverse, uint8_t* data, int32_t* sums) {
  if (inverse == 0.0f) {
    std::memset(data, 0, static_cast<size_t>(padded) * act_bytes(kKind));
    std::memset(sums, 0, static_cast<size_t>(padded / kSumGroup) * 4);
    return 0;
  }
  int32_t group_sum = 0;
  for (int i = 0; i < padded; i += kSumGroup) {
    auto sum = V::set1_32(0);
    for (int j = i; j < i + kSumGroup; j += V::kLanes) {
      const auto q = V::round_to_32(V::mul(V::load_f32(x + j), V::set1_f32(inverse)));
      sum = V::add_32(sum, q);
      if constexpr (kKind == ActKind::s8) {
        V::store_low_8(data + j, q);
      } else {
        V::store_low_16_swapped(data + 2 * j, q);
      }
    }
    const int32_t total = V::reduce_add_32(sum);
    sums[i / kSumGroup] = total;
    group_sum += total;
  }
  return group_sum;
}

template <class V, ActKind kKind>
void quantise_row(const uint16_t* x, int k, int span, uint8_t* data, float* scales, int32_t* group_sums,
                  int32_t* sums) {
  constexpr float kMost = kKind == ActKind::s8 ? 127.0f : 32767.0f;
  alignas(64) float values[kMaxSpan];
  for (int k0 = 0; k0 < k; k0 += span) {
    const int valid = k - k0 < span ? k - k0 : span;
    const int padded = padded_depth(valid);
    widen_row<V>(x + k0, valid, padded, values);
    const SpanScale common = scale_of_span<V>(values, padded, kMost);
    for (int g = 0; g < padded; g += kActGroup) {
      const int at = k0 + g;
      scales[at / kActGroup] = common.scale;
      group_sums[at / kActGroup] =
          quantise_group<V, kKind>(values + g, padded - g < kActGroup ? padded - g : kActGroup, common.inverse,
                                   data + static_cast<size_t>(at) * act_bytes(kKind), sums + at / kSumGroup);
    }
  }
}

template <class V>
void quantise(ActKind kind, const uint16_t* x, int k, int span, uint8_t* data, float* scales, int32_t* group_sums,
              int32_t* sums) {
  if (kind == ActKind::s8) {
    quantise_row<V, ActKind::s8>(x, k, span, data, scales, group_sums, sums);
  } else {
    quantise_row<V, ActKind::s16>(x, k, span, data, scales, group_sums, sums);
  }
}

// 2^x by splitting off the integer part; the polynomial is the Taylor series of 2^f on |f| <= 1/2, relative error 2e-7
// (next term ln2^7 / 7! / 2^7). |x| is clamped to 120 so that 1 + 2^x, its inverse and the first guess of that stay
// normal.
template <class V>
KT_INLINE typename V::F32 exp2(typename V::F32 x) {
  x = V::min(V::max(x, V::set1_f32(-120.0f)), V::set1_f32(120.0f));
  const auto whole = V::round_to_32(x);
  const auto f = V::sub(x, V::to_f32(whole));
  auto p = V::set1_f32(1.540353e-4f);
  p = V::fma(p, f, V::set1_f32(1.3333558e-3f));
  p = V::fma(p, f, V::set1_f32(9.6181291e-3f));
  p = V::fma(p, f, V::set1_f32(5.5504109e-2f));
  p = V::fma(p, f, V::set1_f32(2.4022651e-1f));
  p = V::fma(p, f, V::set1_f32(6.9314718e-1f));
  p = V::fma(p, f, V::set1_f32(1.0f));
  return V::bits_to_f32(V::add_32(V::bits_of(p), V::template shift_left_32<23>(whole)));
}

// 1 / x for normal x in 1..2^121: a guess from the exponent (12 % off) and three Newton steps, each squaring the error.
// Division takes 16 cycles for 16 lanes where this takes 4, and it is a fifth of a product of depth 2048.
template <class V>
KT_INLINE typename V::F32 reciprocal(typename V::F32 x) {
  auto r = V::bits_to_f32(V::sub_32(V::set1_32(0x7ef311c7), V::bits_of(x)));
  for (int i = 0; i < 3; ++i) r = V::mul(r, V::sub(V::set1_f32(2.0f), V::mul(x, r)));
  return r;
}

// min and max return their second operand where one is NaN: the value stands there.
template <class V>
KT_INLINE typename V::F32 at_most(float limit, typename V::F32 x) {
  return V::min(V::set1_f32(limit), x);
}

template <class V>
KT_INLINE typename V::F32 within(float limit, typename V::F32 x) {
  return V::max(V::set1_f32(-limit), at_most<V>(limit, x));
}

// g * sigmoid(slope * g), with exponent = -slope * log2(e) * g. The product with u comes last: g * u may overflow where
// the result does not.
template <class V>
KT_INLINE typename V::F32 gated(typename V::F32 g, typename V::F32 exponent, typename V::F32 u) {
  const auto sigmoid_inverse = V::add(V::set1_f32(1.0f), exp2<V>(exponent));
  return V::mul(V::mul(g, reciprocal<V>(sigmoid_inverse)), u);
}

template <class V, ActivationKind kKind, bool kLimit>
KT_INLINE typename V::F32 activate(Activation a, typename V::F32 g, typename V::F32 u) {
  const auto minus_log2e = V::set1_f32(-1.44269504f);
  if constexpr (kLimit) {
    g = kKind == ActivationKind::swiglu_alpha ? within<V>(a.limit, g) : at_most<V>(a.limit, g);
    u = within<V>(a.limit, u);
  }
  if constexpr (kKind == ActivationKind::gelu_tanh) {
    // (1 + tanh z) / 2 = sigmoid(2 z), z = sqrt(2 / pi) (g + 0.044715 g^3). Beyond |g| = 15 the sigmoid is 0 or 1 in
    // f32, and a g^3 that is infinite would only give NaN for a gate of 0 times it.
    const auto h = within<V>(15.0f, g);
    const auto cubic = V::fma(V::mul(h, h), V::set1_f32(0.044715f), V::set1_f32(1.0f));
    return gated<V>(g, V::mul(V::mul(h, cubic), V::set1_f32(-2 * 0.79788456f * 1.44269504f)), u);
  } else if constexpr (kKind != ActivationKind::silu) {
    // Not times alpha * log2(e): that may be infinite, and times a gate of 0 NaN.
    const auto exponent = V::mul(V::mul(g, V::set1_f32(a.alpha)), minus_log2e);
    return gated<V>(g, exponent, V::add(u, V::set1_f32(1.0f)));
  } else {
    return gated<V>(g, V::mul(g, minus_log2e), u);
  }
}

template <class V, bool kBias>
KT_INLINE typename V::F32 biased(const float* c, const float* bias, int column) {
  if constexpr (kBias) return V::add(V::load_f32(c), V::load_f32(bias + column));
  return V::load_f32(c);
}

// visit(row, pair): products lie pair by pair, results row by row, and a few rows of both stay in L1.
template <class Visit>
KT_INLINE void for_each_of_rows(int m, int pairs, Visit visit) {
  constexpr int kRows = 16;
  for (int first = 0; first < m; first += kRows) {
    const int end = first + kRows < m ? first + kRows : m;
    for (int p = 0; p < pairs; ++p) {
      for (int i = first; i < end; ++i) visit(i, p);
    }
  }
}

template <class V, ActivationKind kKind, bool kLimit, bool kBias>
void swiglu_rows(const GateUp& c, int m, int pairs, Activation activation, uint16_t* h, size_t h_pitch) {
  for_each_of_rows(m, pairs, [&](int i, int p) KT_INLINE_BODY {
    const size_t at = i * c.pitch + p * c.step;
    uint16_t* out = h + i * h_pitch + p * kPanelRows;
    for (int v = 0; v < kPanelRows; v += V::kLanes) {
      const int column = kPairColumns * p + v;
      const auto gate = biased<V, kBias>(c.gate + at + v, c.bias, column);
      const auto up = biased<V, kBias>(c.up + at + v, c.bias, column + kPanelRows);
      V::store_bf16(out + v, activate<V, kKind, kLimit>(activation, gate, up));
    }
  });
}

template <class V>
void relu2_rows(const GateUp& c, int m, int pairs, uint16_t* h, size_t h_pitch) {
  for_each_of_rows(m, pairs, [&](int i, int p) KT_INLINE_BODY {
    const float* up = c.up + i * c.pitch + p * c.step;
    uint16_t* out = h + i * h_pitch + p * kPanelRows;
    for (int v = 0; v < kPanelRows; v += V::kLanes) {
      const auto u = V::max(V::zero_f32(), V::load_f32(up + v));
      V::store_bf16(out + v, V::mul(u, u));
    }
  });
}

template <class V, ActivationKind kKind>
void swiglu_of_kind(const GateUp& c, int m, int pairs, Activation activation, uint16_t* h, size_t h_pitch) {
  const bool limit = activation.limit > 0;
  const auto rows = c.bias ? (limit ? swiglu_rows<V, kKind, true, true> : swiglu_rows<V, kKind, false, true>)
                           : (limit ? swiglu_rows<V, kKind, true, false> : swiglu_rows<V, kKind, false, false>);
  rows(c, m, pairs, activation, h, h_pitch);
}

template <class V>
void swiglu(const GateUp& c, int m, int pairs, Activation activation, uint16_t* h, size_t h_pitch) {
  switch (activation.kind) {
    case ActivationKind::silu:
      return swiglu_of_kind<V, ActivationKind::silu>(c, m, pairs, activation, h, h_pitch);
    case ActivationKind::gelu_tanh:
      return swiglu_of_kind<V, ActivationKind::gelu_tanh>(c, m, pairs, activation, h, h_pitch);
    case ActivationKind::relu2:
      return relu2_rows<V>(c, m, pairs, h, h_pitch);
    case ActivationKind::swiglu_alpha:
      return swiglu_of_kind<V, ActivationKind::swiglu_alpha>(c, m, pairs, activation, h, h_pitch);
    case ActivationKind::swigluoai:
      return swiglu_of_kind<V, ActivationKind::swigluoai>(c, m, pairs, activation, h, h_pitch);
  }
}

template <class V>
void accumulate(float* acc, const float* c, float weight, int n) {
  const auto w = V::set1_f32(weight);
  for (int j = 0; j < n; j += V::kLanes) V::store_f32(acc + j, V::fma(V::load_f32(c + j), w, V::load_f32(acc + j)));
}

template <class V>
void store(const float* const* parts, int n_parts, int n, const uint16_t* addend, uint16_t* out) {
  int j = 0;
  for (; j + V::kLanes <= n; j += V::kLanes) {
    auto sum = V::load_f32(parts[0] + j);
    for (int p = 1; p < n_parts; ++p) sum = V::add(sum, V::load_f32(parts[p] + j));
    if (addend) sum = V::add(sum, V::load_bf16(addend + j));
    V::store_bf16(out + j, sum);
  }
  for (; j < n; ++j) {
    float sum = parts[0][j];
    for (int p = 1; p < n_parts; ++p) sum += parts[p][j];
    if (addend) sum += bf16_to_f32(addend[j]);
    out[j] = f32_to_bf16(sum);
  }
}

template <class V>
void combine(const CombineArgs& a) {
  constexpr int kVectors = kPairColumns / V::kLanes;
  typename V::F32 sum[kVectors];
  KT_UNROLL
  for (int v = 0; v < kVectors; ++v) sum[v] = V::set1_f32(0);
  for (int i = 0; i < a.n; ++i) {
    const float* c = a.c + static_cast<size_t>(a.rows[i]) * kPairColumns;
    const auto weight = V::set1_f32(a.weights[i]);
    KT_UNROLL
    for (int v = 0; v < kVectors; ++v) sum[v] = V::fma(V::load_f32(c + v * V::kLanes), weight, sum[v]);
  }
  KT_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    const int j = v * V::kLanes;
    if (a.f32) {
      V::store_f32(a.f32 + j, sum[v]);
    } else if (j + V::kLanes <= a.columns) {
      V::store_bf16(a.bf16 + j, a.addend ? V::add(sum[v], V::load_bf16(a.addend + j)) : sum[v]);
    } else if (j < a.columns) {
      float tail[V::kLanes];
      V::store_f32(tail, sum[v]);
      const float* parts[] = {tail};
      store<V>(parts, 1, a.columns - j, a.addend ? a.addend + j : nullptr, a.bf16 + j);
    }
  }
}

template <class V, bool kF32>
KT_INLINE void finish_to(const FinishArgs& a) {
  int j = 0;
  for (; j + V::kLanes <= a.n; j += V::kLanes) {
    auto x = V::load_f32(a.c + j);
    if (a.bias) x = V::add(x, V::load_f32(a.bias + j));
    x = V::mul(x, V::set1_f32(a.scale));
    if (a.addend) x = V::add(x, V::load_bf16(a.addend + j));
    if constexpr (kF32) {
      V::store_f32(a.f32 + j, x);
    } else {
      V::store_bf16(a.bf16 + j, x);
    }
  }
  for (; j < a.n; ++j) {
    float x = a.scale * (a.bias ? a.c[j] + a.bias[j] : a.c[j]);
    if (a.addend) x += bf16_to_f32(a.addend[j]);
    if constexpr (kF32) {
      a.f32[j] = x;
    } else {
      a.bf16[j] = f32_to_bf16(x);
    }
  }
}

template <class V>
void finish(const FinishArgs& a) {
  if (a.f32) return finish_to<V, true>(a);
  finish_to<V, false>(a);
}

}  // namespace
}  // namespace kt
