#include "moe/gathered_rows.h"

#include <algorithm>

namespace kt {

void GatheredRows::add_needs(const FormatKernels& kernels, int rows, int k, WorkspaceNeeds* needs) {
  const auto add = [k](const RowGather& gather, int n, size_t* bytes) {
    if (gather.gather) *bytes = std::max(*bytes, static_cast<size_t>(n) * gather.row_bytes(k));
  };
  add(kernels.few, std::min(rows, kMostFew), &needs->gathered_few_bytes);
  add(kernels.many, rows, &needs->gathered_many_bytes);
}

GatheredRows::GatheredRows(const FormatKernels& kernels, const Plan& plan, Rows rows, int count)
    : kernels_(kernels), plan_(plan), rows_(rows), count_(count) {
  if (plan.active() == 0) return;
  few_ = kernels.few.gather && count <= kMostFew && is_few(plan.by_size(plan.active() - 1));
  many_ = kernels.many.gather && pays_for_many();
}

// Rows of tokens are gathered all: if a quarter as many are taken, because an expert has several tasks that would each
// make its own.
bool GatheredRows::pays_for_many() const {
  int taken = 0;
  for (int slot = 0; slot < plan_.active(); ++slot) taken += is_many(slot) ? rows_of(slot) : 0;
  return rows_ == Rows::tokens ? 4 * taken >= count_ : taken > 0;
}

void GatheredRows::gather(const Worker& worker, const Acts& acts, int k, Workspace::Node& node) const {
  const int pieces = div_up(k, kGatherDepth);
  const int64_t all = static_cast<int64_t>(count_) * pieces;
  const int64_t end = all * (worker.index + 1) / worker.node_threads;
  int slot = 0;
  for (int64_t i = all * worker.index / worker.node_threads; i < end; ++i) {
    const int row = static_cast<int>(i / pieces), k0 = static_cast<int>(i % pieces) * kGatherDepth;
    while (rows_ == Rows::pairs && plan_.end(slot) <= row) ++slot;
    const auto put = [&](const RowGather& gather, NumaBuffer& to) {
      gather.gather(acts, row, k0, k, to.data() + row * gather.row_bytes(k));
    };
    if (few_ && (rows_ == Rows::tokens || is_few(slot))) put(kernels_.few, node.gathered_few);
    if (many_ && (rows_ == Rows::tokens || is_many(slot))) put(kernels_.many, node.gathered_many);
  }
}

// The last rows of an expert that has more may be few, or many: those are not there.
void GatheredRows::use(const Workspace::Node& node, int slot, GemmArgs* g) const {
  const bool few = g->m <= kernels_.few_rows;
  const bool there = few ? few_ && is_few(slot) : many_ && is_many(slot);
  g->gathered = !there ? nullptr : few ? node.gathered_few.data() : node.gathered_many.data();
  if (there) g->gathered_pitch = (few ? kernels_.few : kernels_.many).row_bytes(g->k);
}

}  // namespace kt
