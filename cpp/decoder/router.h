// Which experts a token goes to, from the logits of its router.
#pragma once

#include <cstdint>
#include <vector>

namespace kt {

// Scores of all experts, of which the top_k largest are taken, the lower id first where they tie.
enum class RouterKind : int {
  softmax,  // weight = e^l / sum of e^l over all experts; renormalised: over those taken, which is "top-k, then
            // softmax"
  sigmoid,  // taken by sigmoid(l) + correction, weight = sigmoid(l)
};

struct RouterConfig {
  RouterKind kind = RouterKind::softmax;
  int num_experts = 0;
  int top_k = 0;
  bool renormalise = true;  // weights are divided by their sum
  float scale = 1;          // of the weights, at last
  // Experts lie in groups of equal size; those outside the top_groups groups with the largest sum of their group_best
  // best, 1 or 2 of them, are not taken while others are left. Of softmax routers, the best alone: logits, not scores,
  // are compared, and their order is that of sums only then.
  int groups = 1;
  int top_groups = 1;
  int group_best = 2;
  std::vector<float> correction;  // [num_experts], or empty; sigmoid only
};

// Floats of scratch that route() needs.
int route_scratch(const RouterConfig& config);

// NaN among the logits gives NaN weights and valid ids.
void route(const RouterConfig& config, const float* logits, float* scratch, int32_t* ids, float* weights);

}  // namespace kt
