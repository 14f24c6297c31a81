// The scales that bf16 rows are quantised with: of their largest weight, or searched for the least error.
//
// error(d) = sum_k c[k] * (w[k] - d * clamp(round(w[k] / d)))^2, with c = |w| where one scale serves a row, c = sqrt
// |w| where groups have steps of their own. With c = 1 a search of int4 clips the few large weights of a row: 26 % less
// squared error, and a perplexity of SmolLM2 that rises by 42 instead of 7; with |w|^1.5 it rises more than with |w|.
// On 6,656 tokens (17.0): int4 +9.4, with c = |w| +6.8; int4g +3.8, with c = 1 +4.4, |w| +3.3, sqrt |w| +3.2.
//
// Sums run in kLanes lanes and these are added as a tree, in the same order on every instruction set, so that all of
// them find the same scales.
#pragma once

#include <cmath>
#include <cstring>

#include "base/bf16.h"
#include "formats/int4g.h"

namespace kt {
namespace {

enum class ScaleChoice { largest, searched };

// x + 1.5 * 2^23 leaves round-to-nearest-even(x) in the low mantissa bits; |x| < 2^22. Vectorises, unlike lrintf.
constexpr float kRounder = 12582912.0f;

inline int32_t round_even(float x) {
  const float shifted = x + kRounder;
  int32_t bits;
  std::memcpy(&bits, &shifted, 4);
  return bits - 0x4b400000;
}

inline float row_max(const uint16_t* row, int k) {
  uint32_t largest = 0;
  for (int i = 0; i < k; ++i) {
    const uint32_t magnitude = row[i] & 0x7fffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return bf16_to_f32(static_cast<uint16_t>(largest));
}

// Not 1/d: with a subnormal or zero row maximum it would be infinite.
inline float safe_inverse(float d) { return d >= 1e-37f ? 1.0f / d : 0.0f; }

constexpr int kLanes = 16;
constexpr int kGroup = Int4g::kGroup;

inline float sum_lanes(float* lanes) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  }
  return lanes[0];
}

// Smallest and largest code.
struct CodeRange {
  float low, high;
};
constexpr CodeRange kInt8Codes = {-127.0f, 127.0f}, kNibbles = {-8.0f, 7.0f};

inline float code_of(float w, float inverse, CodeRange codes) {
  const float q = (w * inverse + kRounder) - kRounder;
  return q > codes.high ? codes.high : q < codes.low ? codes.low : q;
}

// Weights beyond k are 0.
inline void read_group(const uint16_t* row, int k, int k0, float* w) {
  if (k0 + kGroup <= k) {
    for (int i = 0; i < kGroup; ++i) w[i] = bf16_to_f32(row[k0 + i]);
  } else {
    for (int i = 0; i < kGroup; ++i) w[i] = k0 + i < k ? bf16_to_f32(row[k0 + i]) : 0.0f;
  }
}

enum class Cost { one, root, magnitude };  // c of the error

// The root is within 6 %: halving the exponent vectorises, unlike sqrtf, and c need not be exact.
template <Cost kCost>
float cost_of(float w) {
  if (kCost == Cost::one) return 1.0f;
  if (kCost == Cost::magnitude) return std::fabs(w);
  uint32_t bits;
  std::memcpy(&bits, &w, 4);
  bits = ((bits & 0x7fffffffu) >> 1) + 0x1fc00000u;
  float root;
  std::memcpy(&root, &bits, 4);
  return root;
}

template <Cost kCost>
void add_errors(const float* w, float scale, float inverse, CodeRange codes, float* lanes) {
  for (int i = 0; i < kGroup; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      const float e = w[i + j] - code_of(w[i + j], inverse, codes) * scale;
      lanes[j] += e * e * cost_of<kCost>(w[i + j]);
    }
  }
}

// For weights w = d * n of whole numbers n, d = sum(c w n) / sum(c n n) has the least error.
template <Cost kCost>
struct Moments {
  float wn[kLanes] = {}, nn[kLanes] = {};

  // n = step * code
  void add(const float* w, float inverse, float step, CodeRange codes) {
    for (int i = 0; i < kGroup; i += kLanes) {
      for (int j = 0; j < kLanes; ++j) {
        const float n = step * code_of(w[i + j], inverse, codes), c = cost_of<kCost>(w[i + j]);
        wn[j] += c * w[i + j] * n;
        nn[j] += c * n * n;
      }
    }
  }
  float scale() {
    const float sum = sum_lanes(nn);
    return sum > 0.0f ? sum_lanes(wn) / sum : 0.0f;
  }
};

// A scale and what it costs. Starts with the scale of the largest weight, which stays where errors overflow or vanish.
template <class ErrorOf>
class Search {
 public:
  Search(float scale, const ErrorOf& error_of) : error_of_(error_of), scale_(scale), least_(error_of(scale)) {}

  void consider(float scale) {
    if (safe_inverse(scale) == 0.0f) return;
    const float error = error_of_(scale);
    if (error < least_) {
      least_ = error;
      scale_ = scale;
    }
  }
  template <int kCount>
  void consider_multiples(const float (&factors)[kCount]) {
    const float base = scale_;
    for (const float factor : factors) consider(base * factor);
  }
  float scale() const { return scale_; }

 private:
  const ErrorOf& error_of_;
  float scale_, least_;
};

// Of int8 and int4; `scale` is the one of the largest weight.
template <int kCount>
float best_row_scale(const uint16_t* row, int k, float scale, CodeRange codes, const float (&factors)[kCount]) {
  if (safe_inverse(scale) == 0.0f) return scale;
  const auto error_of = [&](float candidate) {
    const float inverse = 1.0f / candidate;
    float lanes[kLanes] = {}, w[kGroup];
    for (int k0 = 0; k0 < k; k0 += kGroup) {
      read_group(row, k, k0, w);
      add_errors<Cost::magnitude>(w, candidate, inverse, codes, lanes);
    }
    return sum_lanes(lanes);
  };
  Search search(scale, error_of);
  search.consider_multiples(factors);
  const float fine = 0.35f * (1.0f - factors[0]);
  search.consider_multiples({1.0f - fine, 1.0f + fine});
  Moments<Cost::magnitude> moments;
  float w[kGroup];
  for (int k0 = 0; k0 < k; k0 += kGroup) {
    read_group(row, k, k0, w);
    moments.add(w, 1.0f / search.scale(), 1.0f, codes);
  }
  search.consider(moments.scale());
  return search.scale();
}

// Error of a group of int4g quantised with scale s.
template <Cost kCost>
float group_error(const float* w, float s) {
  float lanes[kLanes] = {};
  add_errors<kCost>(w, s, 1.0f / s, kNibbles, lanes);
  return sum_lanes(lanes);
}

struct Step {
  int step;
  float error;
};

// The best scale lies between amax / 8 (the extreme is negative) and a little below amax / 7: one step to either side
// of the middle covers it. A wide look goes on to scales that clip, down to 0.7 of that.
template <Cost kCost, bool kWide = false>
Step best_step(const float* w, float d) {
  float amax = 0;
  for (int i = 0; i < kGroup; ++i) amax = std::fabs(w[i]) > amax ? std::fabs(w[i]) : amax;
  int middle = round_even(amax / (7.6f * d));
  middle = middle < 1 ? 1 : middle > 16 ? 16 : middle;
  Step best = {middle, group_error<kCost>(w, d * static_cast<float>(middle))};
  const int first = kWide ? (middle * 7 - 1) / 10 : middle - 1;
  for (int s = first; s <= middle + 1; ++s) {
    if (s < 1 || s > 16 || s == middle) continue;
    const float error = group_error<kCost>(w, d * static_cast<float>(s));
    if (error < best.error) best = {s, error};
  }
  return best;
}

// Of int4g: w = d * step * code; `d` is the one of the largest weight. The steps of the groups leave little to gain:
// with c = 1, 0.7 % of the error on Gaussian rows, where an endless choice of d would take 0.8 %.
inline float best_stepped_scale(const uint16_t* row, int k, float d) {
  const auto error_of = [&](float candidate) {
    float sum = 0, w[kGroup];
    for (int k0 = 0; k0 < k; k0 += kGroup) {
      read_group(row, k, k0, w);
      sum += best_step<Cost::root>(w, candidate).error;
    }
    return sum;
  };
  Search search(d, error_of);
  search.consider_multiples({1.06f, 0.94f, 0.87f, 0.8f});
  Moments<Cost::root> moments;
  float w[kGroup];
  for (int k0 = 0; k0 < k; k0 += kGroup) {
    read_group(row, k, k0, w);
    const float step = static_cast<float>(best_step<Cost::root>(w, search.scale()).step);
    moments.add(w, 1.0f / (search.scale() * step), step, kNibbles);
  }
  search.consider(moments.scale());
  return search.scale();
}

}  // namespace
}  // namespace kt
