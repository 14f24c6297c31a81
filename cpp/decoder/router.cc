#include "decoder/router.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kt {
namespace {

constexpr float kLeast = -std::numeric_limits<float>::infinity();

// The largest of what is not taken. A NaN loses against all, and an id is always found.
int take_largest(const float* scores, const float* taken, int count) {
  int best = -1;
  for (int i = 0; i < count; ++i) {
    if (taken[i] == 0 && (best < 0 || scores[i] > scores[best] || (std::isnan(scores[best]) && !std::isnan(scores[i]))))
      best = i;
  }
  return best;
}

// The best, or the sum of the two best.
float sum_of_best(const float* scores, int count, int best) {
  float first = kLeast, second = kLeast;
  for (int i = 0; i < count; ++i) {
    if (scores[i] > first) {
      second = first;
      first = scores[i];
    } else if (scores[i] > second) {
      second = scores[i];
    }
  }
  return count > 1 && best > 1 ? first + second : first;
}

// taken[e] = 1 for the experts of the groups that lose.
void leave_out_groups(const RouterConfig& c, const float* choice, float* group_scores, float* group_taken,
                      float* taken) {
  const int size = c.num_experts / c.groups;
  for (int g = 0; g < c.groups; ++g) {
    group_scores[g] = sum_of_best(choice + g * size, size, c.group_best);
    group_taken[g] = 0;
  }
  for (int i = 0; i < c.top_groups; ++i) group_taken[take_largest(group_scores, group_taken, c.groups)] = 1;
  for (int e = 0; e < c.num_experts; ++e) taken[e] = group_taken[e / size] == 0 ? 1.0f : 0.0f;
}

}  // namespace

int route_scratch(const RouterConfig& config) { return 3 * config.num_experts + 2 * config.groups; }

void route(const RouterConfig& c, const float* logits, float* scratch, int32_t* ids, float* weights) {
  const int E = c.num_experts;
  float *scores = scratch, *choice = scores + E, *taken = choice + E, *groups = taken + E;
  float sum = 0;
  if (c.kind == RouterKind::softmax) {
    const float most = *std::max_element(logits, logits + E);
    for (int e = 0; e < E; ++e) {
      scores[e] = std::exp(logits[e] - most);
      sum += scores[e];
    }
  } else {
    for (int e = 0; e < E; ++e) scores[e] = 1.0f / (1.0f + std::exp(-logits[e]));
  }
  // Logits differ where their exponentials are rounded to the same.
  for (int e = 0; e < E; ++e)
    choice[e] = c.kind == RouterKind::softmax ? logits[e] : scores[e] + (c.correction.empty() ? 0.0f : c.correction[e]);
  std::fill_n(taken, E, 0.0f);
  if (c.groups > 1) leave_out_groups(c, choice, groups, groups + c.groups, taken);
  float taken_sum = 0;
  for (int k = 0; k < c.top_k; ++k) {
    int e = take_largest(choice, taken, E);
    if (e < 0) {  // fewer experts in the groups than top_k: the others come next
      std::fill_n(taken, E, 0.0f);
      for (int j = 0; j < k; ++j) taken[ids[j]] = 1;
      e = take_largest(choice, taken, E);
    }
    taken[e] = 1;
    ids[k] = e;
    weights[k] = scores[e];
    taken_sum += scores[e];
  }
  // Sigmoids may all vanish; a softmax holds a 1.
  const float divisor = c.renormalise                   ? taken_sum + (c.kind == RouterKind::sigmoid ? 1e-20f : 0.0f)
                        : c.kind == RouterKind::softmax ? sum
                                                        : 1.0f;
  for (int k = 0; k < c.top_k; ++k) weights[k] = weights[k] / divisor * c.scale;
}

}  // namespace kt
