#include "moe/workspace.h"

#include <utility>

namespace kt {
namespace {

Status grow(NumaBuffer& buffer, size_t bytes, int numa_id) {
  if (buffer.size() >= bytes) return Status::ok();
  // The old one goes last: other layers still need it if this fails. Pages of the new one are not touched before.
  NumaBuffer larger;
  KT_RETURN_IF_ERROR(NumaBuffer::allocate(bytes, numa_id, &larger));
  buffer = std::move(larger);
  return Status::ok();
}

}  // namespace

Status Workspace::ensure(const WorkspaceNeeds& needs) {
  const std::lock_guard lock(mutex_);
  plan_.reserve(needs.num_experts, needs.max_pairs);
  nodes_.resize(pool_->node_count());
  threads_.resize(pool_->total_threads());
  for (int i = 0, global = 0; i < pool_->node_count(); ++i) {
    const int id = pool_->node(i).numa_id;
    const auto experts = static_cast<size_t>(needs.num_experts);
    if (nodes_[i].intermediate.size() < experts) nodes_[i].intermediate = std::vector<Progress>(experts);
    KT_RETURN_IF_ERROR(grow(nodes_[i].input.memory, needs.input_bytes, id));
    KT_RETURN_IF_ERROR(grow(nodes_[i].hidden, needs.hidden_bytes, id));
    KT_RETURN_IF_ERROR(grow(nodes_[i].hidden_quantised.memory, needs.hidden_quantised_bytes, id));
    KT_RETURN_IF_ERROR(grow(nodes_[i].gathered_few, needs.gathered_few_bytes, id));
    KT_RETURN_IF_ERROR(grow(nodes_[i].gathered_many, needs.gathered_many_bytes, id));
    KT_RETURN_IF_ERROR(grow(nodes_[i].partial, needs.partial_bytes, id));
    KT_RETURN_IF_ERROR(grow(nodes_[i].products, needs.products_bytes, id));
    for (int t = 0; t < pool_->node(i).threads; ++t, ++global) {
      KT_RETURN_IF_ERROR(grow(threads_[global].scratch, needs.scratch_bytes, id));
      KT_RETURN_IF_ERROR(grow(threads_[global].c, needs.c_bytes, id));
      KT_RETURN_IF_ERROR(grow(threads_[global].sum, needs.sum_bytes, id));
      KT_RETURN_IF_ERROR(grow(threads_[global].rows, needs.rows_bytes, id));
    }
  }
  return Status::ok();
}

}  // namespace kt
