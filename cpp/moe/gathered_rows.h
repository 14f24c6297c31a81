// Rows of activations in the form that kernels multiply (RowGather), made once before the tasks of a step. Made in
// every task they are a third of the time of down (Q4_K, T = 2048).
#pragma once

#include <cstdint>

#include "kernels/kernel.h"
#include "moe/plan.h"
#include "moe/workspace.h"
#include "threads/pool.h"

namespace kt {

class GatheredRows {
 public:
  // Kernels for a few rows find theirs if there are no more rows than this: above, few products are theirs, and 256
  // rows of 7168 are 4 MB already.
  static constexpr int kMostFew = 256;
  // Adds the room for `rows` rows of depth k to what is needed so far.
  static void add_needs(const FormatKernels& kernels, int rows, int k, WorkspaceNeeds* needs);

  // Rows are those of tokens, which all experts share, or those of pairs, of which an expert has its own.
  enum class Rows { tokens, pairs };
  GatheredRows(const FormatKernels& kernels, const Plan& plan, Rows rows, int count);

  bool any() const { return few_ || many_; }
  // This worker's share of the rows of its node; all workers of the node together do all. Not needed without any().
  void gather(const Worker& worker, const Acts& acts, int k, Workspace::Node& node) const;
  // Lets a product of g->m rows of an expert have them, if they are gathered.
  void use(const Workspace::Node& node, int slot, GemmArgs* g) const;

 private:
  int rows_of(int slot) const { return plan_.end(slot) - plan_.begin(slot); }
  bool is_few(int slot) const { return rows_of(slot) <= kernels_.few_rows; }
  bool is_many(int slot) const { return !is_few(slot) && rows_of(slot) <= kernels_.many_rows; }
  bool pays_for_many() const;

  const FormatKernels& kernels_;
  const Plan& plan_;
  const Rows rows_;
  const int count_;
  bool few_ = false, many_ = false;
};

}  // namespace kt
