// Routing turned into work: groups by expert, chunks, rows of products, and the order of tasks of regions.
#include "moe/plan.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "moe/regions.h"
#include "threads/progress.h"
#include "threads/tasks.h"
#include "variants.h"

using kt::Plan;
using kt::Regions;
using kt_test::Random;

namespace {

struct Case {
  int experts, tokens, top_k;
  std::vector<int32_t> ids;
  std::vector<float> weights;

  // Some ids are out of range, expert 1 is left out, and a token may name an expert twice.
  Case(int experts, int tokens, int top_k, Random& random) : experts(experts), tokens(tokens), top_k(top_k) {
    for (int i = 0; i < tokens * top_k; ++i) {
      ids.push_back(static_cast<int32_t>(random.below(experts + 2)) - 1);
      weights.push_back(random.gaussian());
    }
  }
  bool taken(int i) const { return ids[i] >= 0 && ids[i] < experts && ids[i] != 1; }
  Plan plan() const {
    Plan p;
    std::vector<uint8_t> skip(experts);
    if (experts > 1) skip[1] = 1;
    p.reserve(experts, tokens * top_k);
    p.leave_out(experts, skip.data(), nullptr);
    p.build({ids.data(), weights.data(), tokens, top_k, 4});
    return p;
  }
};

template <class Body>
void for_each_case(const Body& body) {
  Random random(3);
  for (const auto& [experts, tokens, top_k] : {std::tuple{1, 1, 1}, {8, 5, 2}, {8, 300, 2}, {128, 512, 8}, {3, 0, 2}}) {
    body(Case(experts, tokens, top_k, random));
  }
}

}  // namespace

KT_TEST(chunks_have_every_pair_once_and_rows_of_their_own) {
  for_each_case([](const Case& c) {
    Plan plan = c.plan();
    for (int most : {32, 256}) {
      plan.cut(most);
      std::vector<int> pairs(plan.pairs()), rows(plan.product_rows());
      for (const Plan::Chunk& chunk : plan.chunks()) {
        KT_CHECK(chunk.count > 0 && chunk.count <= most);
        KT_CHECK(chunk.first >= plan.begin(chunk.slot) && chunk.first + chunk.count <= plan.end(chunk.slot));
        KT_CHECK_EQ(chunk.row % kt::kRowUnit, 0);
        // Kernels write whole units.
        KT_CHECK(chunk.row + kt::round_up(chunk.count, kt::kRowUnit) <= plan.product_rows());
        for (int i = 0; i < chunk.count; ++i) ++pairs[chunk.first + i];
        for (int i = 0; i < kt::round_up(chunk.count, kt::kRowUnit); ++i) ++rows[chunk.row + i];
      }
      for (const int n : pairs) KT_CHECK_EQ(n, 1);
      for (const int n : rows) KT_CHECK(n <= 1);
    }
  });
}

KT_TEST(a_token_finds_its_pairs_in_the_order_of_the_routing) {
  for_each_case([](const Case& c) {
    Plan plan = c.plan();
    plan.cut(64);
    // Row of products -> pair.
    std::vector<int> pair_of(plan.product_rows(), -1);
    for (const Plan::Chunk& chunk : plan.chunks()) {
      for (int i = 0; i < chunk.count; ++i) pair_of[chunk.row + i] = chunk.first + i;
    }
    for (int t = 0; t < c.tokens; ++t) {
      const Plan::TokenPairs of = plan.of_token(t);
      int n = 0;
      for (int j = t * c.top_k; j < (t + 1) * c.top_k; ++j) {
        if (!c.taken(j)) continue;
        const int pair = pair_of[of.rows[n]];
        KT_CHECK_EQ(plan.tokens()[pair], t);
        KT_CHECK(plan.weights()[pair] == c.weights[j] && of.weights[n] == c.weights[j]);
        int slot = 0;
        while (plan.end(slot) <= pair) ++slot;
        KT_CHECK_EQ(plan.expert(slot), c.ids[j]);
        ++n;
      }
      KT_CHECK_EQ(of.count, n);
    }
  });
}

KT_TEST(tasks_of_regions_come_once_and_behind_what_they_need) {
  for (int count : {1, 2, 3, 4, 7}) {
    for (int products : {1, 5}) {
      for (int sums : {1, 6}) {
        Regions r;
        r.count = count;
        r.products = products;
        r.sums = sums;
        std::vector<int> done_products(count), done_sums(count);
        std::set<std::pair<int, int>> seen;
        for (int i = 0; i < r.tasks(); ++i) {
          const Regions::Task t = r.task(i);
          KT_CHECK(t.region >= 0 && t.region < count && t.index >= 0);
          KT_CHECK(t.index < (t.product ? products : sums));
          KT_CHECK(seen.insert({2 * t.region + t.product, t.index}).second);
          if (t.product) {
            // The place of its products was that of an earlier region.
            if (t.region >= Regions::kKept) KT_CHECK_EQ(done_sums[t.region - Regions::kKept], sums);
            ++done_products[t.region];
          } else {
            KT_CHECK_EQ(done_products[t.region], products);
            ++done_sums[t.region];
          }
        }
        KT_CHECK_EQ(static_cast<int>(seen.size()), count * (products + sums));
      }
    }
  }
}

KT_TEST(products_of_any_number_of_rows_fit) {
  for (const kt_test::Variant& v : kt_test::variants().run) {
    for (int hidden : {16, 48, 2048, 2880, 7168, 100000}) {
      for (int most : {32, 1000, 40000}) {
        const size_t bytes = kt::regions_bytes(*v.table, hidden, most);
        for (int rows = 0; rows <= most; rows += 32) {
          const int pairs = kt::region_pairs(*v.table, hidden, rows);
          KT_CHECK(pairs >= kt::least_region_pairs(hidden));
          KT_CHECK(Regions::kKept * pairs * kt::pair_floats(rows) * sizeof(float) <= bytes);
          KT_CHECK(kt::div_up(kt::div_up(kt::panel_count(hidden), 2), pairs) <= Regions::kMost);
        }
      }
    }
  }
}

// Workers take tasks in order and wait for earlier ones, as in down. What was written before add() is seen after
// wait().
KT_TEST(waiting_tasks_see_what_they_waited_for) {
  constexpr int kThreads = 4, kTasks = 400;
  for (int round = 0; round < 20; ++round) {
    kt::TaskCounter tasks;
    kt::Progress written;
    std::vector<int> values(kTasks);
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&] {
        for (int task; (task = tasks.take()) < 2 * kTasks;) {
          if (task < kTasks) {
            values[task] = task + 1;
            written.add();
          } else {
            written.wait(kTasks);
            wrong += values[(task * 7) % kTasks] != (task * 7) % kTasks + 1;
          }
        }
      });
    }
    for (std::thread& t : threads) t.join();
    KT_CHECK_EQ(wrong.load(), 0);
  }
}
