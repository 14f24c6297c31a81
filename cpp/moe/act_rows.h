// Activation rows as the kernels of a format read them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernel.h"
#include "threads/numa_buffer.h"
#include "threads/pool.h"

namespace kt {

// Quantised rows in memory of somebody else.
struct ActRows {
  uint8_t* data = nullptr;
  float* scales = nullptr;
  int32_t* group_sums = nullptr;
  int32_t* sums = nullptr;
  size_t pitch = 0;
  int group_pitch = 0;
  int sum_pitch = 0;
  int span = kActGroup;

  static size_t bytes(ActKind kind, int rows, int k);
  // rows x k laid out in `memory`, which has so many bytes or more.
  static ActRows at(uint8_t* memory, ActKind kind, int rows, int k, int span);
  Acts acts() const { return {data, pitch, scales, group_sums, sums, group_pitch, sum_pitch, span}; }
};

// The same with memory of its own.
struct ActBuffer : ActRows {
  NumaBuffer memory;

  void layout(ActKind kind, int rows, int k, int common_span) {
    static_cast<ActRows&>(*this) = at(memory.data(), kind, rows, k, common_span);
  }
};

// bf16 rows as they are, `pitch` elements apart.
inline Acts bf16_acts(const uint16_t* rows, size_t pitch) {
  return {reinterpret_cast<const uint8_t*>(rows), 2 * pitch, nullptr, nullptr, nullptr, 0, 0, 0};
}

// The columns [from, to) of a bf16 row, which is the row-th of `to_rows`. Spans must not be cut: `from` is a multiple
// of kMaxSpan, and so is `to` unless it is the end.
void quantise_columns(const IsaTable& isa, ActKind kind, const uint16_t* x, int row, int from, int to,
                      const ActRows& to_rows);

// Rows [begin, end) of bf16 rows, `pitch` elements apart, to quantised ones.
void quantise_range(const IsaTable& isa, ActKind kind, const uint16_t* rows, size_t pitch, int begin, int end, int k,
                    const ActRows& to);

// This worker's share of bf16 rows, `pitch` elements apart, to quantised ones; all workers of its node together do all.
// Rows are cut into pieces so that one row keeps several workers busy. A worker's pieces lie side by side: rows are
// shorter than what a hardware prefetcher needs to get going.
void quantise_rows(const IsaTable& isa, ActKind kind, const Worker& worker, const uint16_t* rows, size_t pitch,
                   int count, int k, const ActRows& to);

}  // namespace kt
