// Routers of the decoder against a reference that sorts.
#include "decoder/router.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "check.h"
#include "guarded.h"
#include "variants.h"

using kt::RouterConfig;
using kt::RouterKind;
using kt_test::Guarded;
using kt_test::Random;

namespace {

struct Routed {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Routed run(const RouterConfig& config, const std::vector<float>& logits) {
  Guarded<float> in(logits.size()), scratch(kt::route_scratch(config)), weights(config.top_k);
  Guarded<int32_t> ids(config.top_k);
  std::copy(logits.begin(), logits.end(), in.begin());
  in.seal();
  kt::route(config, in.data(), scratch.data(), ids.data(), weights.data());
  KT_CHECK(scratch.front_intact() && weights.front_intact() && ids.front_intact());
  return {{ids.begin(), ids.end()}, {weights.begin(), weights.end()}};
}

std::vector<float> random_logits(int count, Random& random) {
  std::vector<float> logits(count);
  for (float& l : logits) l = 3 * random.gaussian();
  return logits;
}

// Experts from the largest score down.
std::vector<int> sorted(const std::vector<double>& scores) {
  std::vector<int> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return scores[a] > scores[b]; });
  return order;
}

void check_weights(const Routed& got, const std::vector<int>& order, const std::vector<double>& weights) {
  for (size_t k = 0; k < got.ids.size(); ++k) {
    KT_CHECK_EQ(got.ids[k], order[k]);
    KT_CHECK(std::fabs(got.weights[k] - weights[k]) <= 1e-5 * std::fabs(weights[k]) + 1e-9);
  }
}

}  // namespace

KT_TEST(softmax_routers) {
  Random random(1);
  for (const int experts : {1, 2, 8, 60, 128}) {
    for (const bool renormalise : {false, true}) {
      RouterConfig config;
      config.num_experts = experts;
      config.top_k = std::min(experts, 1 + random.below(8));
      config.renormalise = renormalise;
      config.scale = 2.5f;
      const std::vector<float> logits = random_logits(experts, random);
      const std::vector<double> exact(logits.begin(), logits.end());
      const std::vector<int> order = sorted(exact);
      double all = 0, taken = 0;
      for (const double l : exact) all += std::exp(l);
      for (int k = 0; k < config.top_k; ++k) taken += std::exp(exact[order[k]]);
      std::vector<double> weights;
      for (int k = 0; k < config.top_k; ++k)
        weights.push_back(2.5 * std::exp(exact[order[k]]) / (renormalise ? taken : all));
      check_weights(run(config, logits), order, weights);
    }
  }
}

// DeepSeek V2: a group is as good as its best expert.
KT_TEST(softmax_routers_with_groups) {
  Random random(3);
  for (const int groups : {2, 8}) {
    RouterConfig config;
    config.num_experts = 64;
    config.top_k = 6;
    config.groups = groups;
    config.top_groups = (groups + 1) / 2;
    config.group_best = 1;
    config.renormalise = false;
    config.scale = 16;
    const std::vector<float> logits = random_logits(64, random);
    std::vector<double> choice(logits.begin(), logits.end()), group_score(groups);
    double all = 0;
    for (const double l : choice) all += std::exp(l);
    const int size = 64 / groups;
    for (int g = 0; g < groups; ++g)
      group_score[g] = *std::max_element(choice.begin() + g * size, choice.begin() + (g + 1) * size);
    const std::vector<int> best = sorted(group_score);
    for (int i = config.top_groups; i < groups; ++i)
      std::fill_n(choice.begin() + best[i] * size, size, -std::numeric_limits<double>::infinity());
    const std::vector<int> order = sorted(choice);
    std::vector<double> weights;
    for (int k = 0; k < 6; ++k) weights.push_back(16 * std::exp(choice[order[k]]) / all);
    check_weights(run(config, logits), order, weights);
  }
}

KT_TEST(sigmoid_routers_with_corrections_and_groups) {
  Random random(2);
  for (const int groups : {1, 2, 8}) {
    for (const bool renormalise : {false, true}) {
      for (const bool corrected : {false, true}) {
        RouterConfig config;
        config.kind = RouterKind::sigmoid;
        config.num_experts = 64;
        config.top_k = 6;
        config.groups = groups;
        config.top_groups = (groups + 1) / 2;
        config.renormalise = renormalise;
        config.scale = 1.8f;
        for (int e = 0; corrected && e < 64; ++e) config.correction.push_back(random.gaussian());
        const std::vector<float> logits = random_logits(64, random);
        std::vector<double> score(64), choice(64), group_score(groups);
        for (int e = 0; e < 64; ++e) {
          score[e] = 1 / (1 + std::exp(-static_cast<double>(logits[e])));
          choice[e] = score[e] + (corrected ? config.correction[e] : 0);
        }
        const int size = 64 / groups;
        for (int g = 0; g < groups; ++g) {
          std::vector<double> members(choice.begin() + g * size, choice.begin() + (g + 1) * size);
          std::sort(members.rbegin(), members.rend());
          group_score[g] = members[0] + members[1];
        }
        const std::vector<int> best = sorted(group_score);
        for (int i = config.top_groups; i < groups; ++i)
          std::fill_n(choice.begin() + best[i] * size, size, -std::numeric_limits<double>::infinity());
        const std::vector<int> order = sorted(choice);
        double taken = 0;
        for (int k = 0; k < 6; ++k) taken += score[order[k]];
        std::vector<double> weights;
        for (int k = 0; k < 6; ++k) weights.push_back(1.8 * score[order[k]] / (renormalise ? taken : 1));
        check_weights(run(config, logits), order, weights);
      }
    }
  }
}

KT_TEST(ties_go_to_the_lower_id) {
  RouterConfig config;
  config.num_experts = 6;
  config.top_k = 3;
  const Routed got = run(config, {1, 2, 2, 1, 2, 0});
  KT_CHECK(got.ids == (std::vector<int32_t>{1, 2, 4}));
}

KT_TEST(ids_are_different_and_in_range_whatever_the_logits_are) {
  const float nan = NAN, inf = INFINITY;
  const std::vector<float> cases[] = {
      {nan, nan, nan, nan}, {nan, 1, nan, 2}, {inf, inf, inf, inf}, {-inf, -inf, -inf, -inf}, {inf, -inf, nan, 0}};
  for (const RouterKind kind : {RouterKind::softmax, RouterKind::sigmoid}) {
    for (const int groups : {1, 2, 4}) {
      for (const std::vector<float>& logits : cases) {
        RouterConfig config;
        config.kind = kind;
        config.num_experts = 4;
        config.groups = groups;
        config.group_best = kind == RouterKind::softmax ? 1 : 2;
        for (config.top_k = 1; config.top_k <= 4; ++config.top_k) {
          std::vector<int32_t> ids = run(config, logits).ids;
          std::sort(ids.begin(), ids.end());
          KT_CHECK(ids.front() >= 0 && ids.back() < 4);
          KT_CHECK(std::adjacent_find(ids.begin(), ids.end()) == ids.end());
        }
      }
    }
  }
}
