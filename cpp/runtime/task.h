// Work whose arguments are addresses, used when the task runs: forwards of the oldest interface, in which the caller
// owns every buffer, and slices of experts for GPUs.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "cuda/driver.h"
#include "moe/layer.h"
#include "runtime/queue.h"

namespace kt {

struct ForwardTask {
  Layer* layer;
  uint64_t n_tokens;  // address of an int32
  int top_k;
  uint64_t ids;      // int64 [n][top_k]
  uint64_t weights;  // f32 [n][top_k]
  uint64_t input;    // bf16 [n][H]
  uint64_t output;   // bf16 [n][H]
  bool incremental;
  uint64_t skip = 0;  // [num_experts] bytes, non-zero = skip; 0: none
};

// See moe/write_slices.h.
struct WriteSlicesTask {
  Layer* layer;
  int expert;
  std::vector<SliceBuffers> ranks;
};

// The task is copied; what it points to must live until it has run.
Status submit(Queue& queue, const ForwardTask& task);
Status submit(Queue& queue, const WriteSlicesTask& task);
// When the stream gets there. In a graph it runs at every replay.
Status submit_on(Queue& queue, const cuda::Driver& driver, cuda::Stream stream, const ForwardTask& task);
// Makes the stream wait until at most so many tasks are pending.
Status sync_on(Queue& queue, const cuda::Driver& driver, cuda::Stream stream, int allow_n_pending);

}  // namespace kt
