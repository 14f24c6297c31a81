// Host memory of one call: what comes in, what goes out, and the two words through which a GPU and the queue talk.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "base/status.h"
#include "cuda/driver.h"
#include "threads/gate.h"
#include "threads/numa_buffer.h"

namespace kt {

struct StageSize {
  int tokens = 0;
  int top_k = 0;
  int hidden = 0;
  bool deferring = false;  // with room for what is left to the next layer
};

class Stage {
 public:
  // With a driver: pinned memory that the GPU reads and writes. Without: plain memory.
  static Status create(const StageSize& size, const cuda::Driver* driver, std::unique_ptr<Stage>* out);
  ~Stage();
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;

  const StageSize& size() const { return size_; }

  uint8_t* ids() const { return memory_ + ids_at_; }  // 4 or 8 bytes each
  float* weights() const { return reinterpret_cast<float*>(memory_ + weights_at_); }
  uint16_t* input() const { return reinterpret_cast<uint16_t*>(memory_ + input_at_); }
  uint16_t* output() const { return reinterpret_cast<uint16_t*>(memory_ + output_at_); }
  uint16_t* deferred() const { return reinterpret_cast<uint16_t*>(memory_ + deferred_at_); }

  // Written by the GPU when the tokens are here: which call they are for. Never 0. Reset by the queue.
  std::atomic<uint32_t>& bell() const { return *reinterpret_cast<std::atomic<uint32_t>*>(memory_); }
  // Written by the queue when the output is here: 1. Reset by a stream before it rings the bell: whatever became of the
  // call before, and however often somebody waits for this one.
  std::atomic<uint32_t>& done() const { return *reinterpret_cast<std::atomic<uint32_t>*>(memory_ + kWordPitch); }

  // For a host thread that waits: advances with every output. `status` is of the call before the last advance,
  // `deferred_status` of its deferred rows: for whoever has waited for the call that adds them.
  Gate finished;
  Status status, deferred_status;
  // Calls submitted by the host and not finished that use it, deferred part included, or add its deferred rows.
  // (Replays of a graph are not seen.)
  std::atomic<int> running{0};

 private:
  static constexpr size_t kWordPitch = 128;  // two cache lines: the adjacent one is prefetched along

  Stage(const StageSize& size, const cuda::Driver* driver);

  StageSize size_;
  const cuda::Driver* driver_;
  NumaBuffer plain_;
  uint8_t* memory_ = nullptr;
  size_t ids_at_ = 0, weights_at_ = 0, input_at_ = 0, output_at_ = 0, deferred_at_ = 0, bytes_ = 0;
};

}  // namespace kt
