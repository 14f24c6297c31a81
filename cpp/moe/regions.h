// The order of work in the down projection of a long prompt.
#pragma once

#include <algorithm>
#include <cstddef>

#include "kernels/kernel.h"

namespace kt {

// Output columns are taken in regions. Of each, there are tasks of products, which write the rows of all pairs, and
// tasks of sums, which add up those of a token. The sums of a region come behind the products of the next one, so that
// nobody waits for the last products, and there is room for the products of kKept regions at once.
struct Regions {
  static constexpr int kKept = 3;
  // Regions of a pass, at most.
  static constexpr int kMost = 64;

  int pairs = 0;  // of panels in a region; the last one may have fewer
  int count = 0;
  int products = 0, sums = 0;  // tasks of a region

  struct Task {
    bool product;
    int region, index;
  };
  int tasks() const { return count * (products + sums); }
  // Products of region 0; those of region 1, sums of region 0; ...; sums of the last region.
  Task task(int i) const {
    if (i < products) return {true, 0, i};
    const int both = products + sums, region = (i - products) / both, index = (i - products) % both;
    if (region + 1 == count) return {false, region, index};
    if (index < products) return {true, region + 1, index};
    return {false, region, index - products};
  }
};

// Bytes of the products of a region, about, for prompts whose products would be more. Widths in turns, 2048 tokens of
// qwen3-30b, 2.4 MB a pair, AMX, 16 threads: 4, 8, 16, 32, 64 pairs FP8 25.3, 25.1, 24.7, 24.8, 24.8 ms,
// bf16 26.2, 25.2, 24.8, 25.5, 25.8.
constexpr size_t kRegionBytes = size_t{40} << 20;
// Of a pair of panels, for so many rows of products; one more, so that the same row of several pairs does not always
// fall into the same sets of the cache.
constexpr size_t pair_floats(int product_rows) { return (static_cast<size_t>(product_rows) + 1) * kPairColumns; }

// Pairs of panels in a region, at least and at most.
constexpr int least_region_pairs(int hidden) { return div_up(panel_count(hidden), 2 * Regions::kMost); }
inline int region_pairs(const IsaTable& isa, int hidden, int product_rows) {
  const size_t fitting = kRegionBytes / (pair_floats(product_rows) * sizeof(float)), most = isa.max_panels / 2;
  return std::max(static_cast<int>(std::min(fitting, most)), least_region_pairs(hidden));
}

// Enough for any number of rows up to this.
inline size_t regions_bytes(const IsaTable& isa, int hidden, int most_product_rows) {
  const size_t pair = pair_floats(most_product_rows) * sizeof(float);
  const size_t least = pair * least_region_pairs(hidden), widest = pair * region_pairs(isa, hidden, 0);
  return Regions::kKept * std::min(widest, std::max(least, kRegionBytes));
}

}  // namespace kt
