#include "moe/plan.h"

#include <algorithm>
#include <cstddef>

#include "kernels/kernel.h"

namespace kt {
namespace {

// body(ids as what they are)
template <class Body>
auto with_ids(const Routing& routing, const Body& body) {
  return routing.id_bytes == 4 ? body(static_cast<const int32_t*>(routing.ids))
                               : body(static_cast<const int64_t*>(routing.ids));
}

}  // namespace

void Plan::reserve(int num_experts, int max_pairs) {
  const auto grow = [](auto& vector, size_t size) {
    if (vector.capacity() < size) vector.reserve(size);
  };
  grow(experts_, num_experts);
  grow(by_size_, num_experts);
  grow(begin_, num_experts + 1);
  grow(slot_, num_experts);
  grow(tokens_, max_pairs);
  grow(weights_, max_pairs);
  grow(left_out_, num_experts);
  grow(next_row_, num_experts);
  grow(token_begin_, max_pairs + 1);
  grow(product_row_, max_pairs);
  grow(token_weights_, max_pairs);
  grow(chunks_, num_experts + max_pairs / kRowUnit);
}

void Plan::leave_out(int num_experts, const uint8_t* mask, const uint8_t* skip) {
  left_out_.resize(num_experts);
  for (int e = 0; e < num_experts; ++e) left_out_[e] = (mask && mask[e]) || (skip && skip[e]);
}

void Plan::build(const Routing& routing) {
  with_ids(routing, [&](const auto* ids) { build_from(ids, routing); });
}

int Plan::first_missing(const Routing& routing, const uint8_t* loaded) const {
  const size_t count = static_cast<size_t>(routing.tokens) * routing.top_k;
  return with_ids(routing, [&](const auto* ids) {
    for (size_t i = 0; i < count; ++i) {
      if (!skipped(ids[i]) && !loaded[ids[i]]) return static_cast<int>(ids[i]);
    }
    return -1;
  });
}

void Plan::cut(int most) {
  chunks_.clear();
  for (const int slot : by_size_) {
    // build() left it behind the rows of the expert.
    const int rows = end(slot) - begin(slot), first_row = next_row_[expert(slot)] - rows;
    for (int i = 0; i < rows; i += most)
      chunks_.push_back({slot, begin(slot) + i, std::min(most, rows - i), first_row + i});
  }
}

template <class Id>
void Plan::build_from(const Id* ids, const Routing& routing) {
  slot_.assign(num_experts(), 0);
  const int count = routing.tokens * routing.top_k;
  for (int i = 0; i < count; ++i) {
    if (!skipped(ids[i])) ++slot_[ids[i]];
  }
  experts_.clear();
  by_size_.clear();
  begin_.assign(1, 0);
  next_row_.resize(num_experts());
  product_rows_ = 0;
  for (int e = 0; e < num_experts(); ++e) {
    const int n = slot_[e];
    if (n == 0) continue;
    slot_[e] = begin_.back();
    next_row_[e] = product_rows_;
    product_rows_ += round_up(n, kRowUnit);
    by_size_.push_back(active());
    experts_.push_back(e);
    begin_.push_back(begin_.back() + n);
  }
  // Ties in order of id, so that the same routing gives the same order of work.
  std::sort(by_size_.begin(), by_size_.end(), [&](int a, int b) {
    const int size_a = end(a) - begin(a), size_b = end(b) - begin(b);
    return size_a != size_b ? size_a > size_b : a < b;
  });
  tokens_.resize(pairs());
  weights_.resize(pairs());
  token_begin_.resize(routing.tokens + 1);
  product_row_.resize(pairs());
  token_weights_.resize(pairs());
  int pair = 0;
  for (int t = 0; t < routing.tokens; ++t) {
    token_begin_[t] = pair;
    for (int j = t * routing.top_k; j < (t + 1) * routing.top_k; ++j) {
      if (skipped(ids[j])) continue;
      const int at = slot_[ids[j]]++;
      tokens_[at] = t;
      weights_[at] = routing.weights[j];
      product_row_[pair] = next_row_[ids[j]]++;
      token_weights_[pair++] = routing.weights[j];
    }
  }
  token_begin_[routing.tokens] = pair;
}

}  // namespace kt
