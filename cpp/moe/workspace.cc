#include "moe/workspace.h"

#include <utility>

namespace kt {
namespace {

constexpr size_t align64(size_t bytes) { return (bytes + 63) / 64 * 64; }

Status grow(NumaBuffer& buffer, size_t bytes, int numa_id) {
  if (buffer.size() >= bytes) return Status::ok();
  // The old one goes last: other layers still need it if this fails. Pages of the new one are not touched before.
  NumaBuffer larger;
  KT_RETURN_IF_ERROR(NumaBuffer::allocate(bytes, numa_id, &larger));
  buffer = std::move(larger);
  return Status::ok();
}

// 64 bytes of padding spread the rows over the cache sets.
size_t act_pitch(ActKind kind, int k) { return static_cast<size_t>(padded_depth(k)) * act_bytes(kind) + 64; }

}  // namespace

size_t ActBuffer::bytes(ActKind kind, int rows, int k) {
  const size_t n = static_cast<size_t>(rows);
  const size_t groups = div_up(k, kActGroup), fine = padded_depth(k) / kSumGroup;
  return n * act_pitch(kind, k) + 2 * align64(4 * n * groups) + align64(4 * n * fine);
}

void ActBuffer::layout(ActKind kind, int rows, int k, int common_span) {
  const size_t n = static_cast<size_t>(rows);
  span = common_span;
  pitch = act_pitch(kind, k);
  group_pitch = div_up(k, kActGroup);
  sum_pitch = padded_depth(k) / kSumGroup;
  data = memory.data();
  uint8_t* at = data + n * pitch;
  scales = reinterpret_cast<float*>(at);
  at += align64(4 * n * group_pitch);
  group_sums = reinterpret_cast<int32_t*>(at);
  at += align64(4 * n * group_pitch);
  sums = reinterpret_cast<int32_t*>(at);
}

Status Workspace::ensure(const WorkspaceNeeds& needs) {
  const std::lock_guard lock(mutex_);
  plan_.reserve(needs.num_experts, needs.max_pairs);
  nodes_.resize(pool_->node_count());
  threads_.resize(pool_->total_threads());
  for (int i = 0, global = 0; i < pool_->node_count(); ++i) {
    const int id = pool_->node(i).numa_id;
    KT_RETURN_IF_ERROR(grow(nodes_[i].input.memory, needs.input_bytes, id));
    KT_RETURN_IF_ERROR(grow(nodes_[i].hidden, needs.hidden_bytes, id));
    KT_RETURN_IF_ERROR(grow(nodes_[i].hidden_quantised.memory, needs.hidden_quantised_bytes, id));
    KT_RETURN_IF_ERROR(grow(nodes_[i].partial, needs.partial_bytes, id));
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
