// Memory on one NUMA node, in huge pages where the system gives them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"

namespace kt {

class NumaBuffer {
 public:
  NumaBuffer() = default;
  ~NumaBuffer();
  NumaBuffer(NumaBuffer&& other) noexcept;
  NumaBuffer& operator=(NumaBuffer&& other) noexcept;
  NumaBuffer(const NumaBuffer&) = delete;
  NumaBuffer& operator=(const NumaBuffer&) = delete;

  // Zeroed, 2 MB aligned when larger than 2 MB, else page aligned. numa_id < 0: wherever first touched. A refused mbind
  // (containers) is not an error: bound() tells.
  static Status allocate(size_t bytes, int numa_id, NumaBuffer* out);

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  bool bound() const { return bound_; }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
  size_t mapped_ = 0;
  void* mapping_ = nullptr;
  bool bound_ = false;
};

}  // namespace kt
