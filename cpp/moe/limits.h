// What this machine can do at best with all workers of a pool: the denominators of the shares that `kt bench` prints.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "kernels/limits.h"
#include "threads/numa_buffer.h"
#include "threads/pool.h"

namespace kt {

// Node-local memory that every worker reads its own contiguous slice of. Made once and measured often: what other
// tenants leave of the memory bandwidth changes within seconds, so a share is only worth something right beside its
// limit.
class ReadProbe {
 public:
  ReadProbe() = default;
  ReadProbe(ReadProbe&&) = default;
  ReadProbe& operator=(ReadProbe&&) = default;
  // Said aloud, because a vector of move-only buffers claims that it can be copied.
  ReadProbe(const ReadProbe&) = delete;
  ReadProbe& operator=(const ReadProbe&) = delete;

  // `bytes` over all workers; well above the last-level cache, or the figure means nothing. The pool must outlive the
  // probe.
  static Status create(Pool& pool, size_t bytes, ReadProbe* out);

  // Bytes per second of the best round within `seconds` (three rounds at least).
  Status measure(const LimitLoops& loops, double seconds, double* bytes_per_s) const;

 private:
  uint8_t* slice(const Worker& worker) const { return buffers_[worker.node].data() + slice_bytes_ * worker.index; }

  Pool* pool_ = nullptr;
  size_t slice_bytes_ = 0;
  std::vector<NumaBuffer> buffers_;  // one per node of the pool
};

// Operations per second of `loop` on all workers at once, best round within `seconds`.
Status measure_peak(Pool& pool, PeakLoop loop, double seconds, double* ops_per_s);

}  // namespace kt
