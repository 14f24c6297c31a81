// Work that the workers of a node take piece by piece.
#pragma once

#include <atomic>

namespace kt {

// Nodes of a pool that a layer can be split over.
constexpr int kMaxNodes = 64;

// Tasks per worker to aim for: small enough tasks that the last one does not leave the others waiting.
constexpr int kTasksPerWorker = 8;

// Counts 0, 1, 2, ... for whoever asks. Two lines apart, because Intel's L2 fetches lines in pairs.
struct alignas(128) TaskCounter {
  std::atomic<int> next{0};

  int take() { return next.fetch_add(1, std::memory_order_relaxed); }
  void reset() { next.store(0, std::memory_order_relaxed); }
};

}  // namespace kt
