// Codes of 16 rows and 64 k, as a file has them, become lines of a panel (formats/grouped.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats/grouped.h"

namespace kt {

// How a matrix [N, K] of codes lies in a file.
enum class CodeOrder {
  rows,  // row-major; 4 bits: even k in the low nibble
  gptq,  // int32 [K / 8, N], k in ascending nibbles
  awq,   // int32 [K, N / 8], n = 0 2 4 6 1 3 5 7 in ascending nibbles
};

constexpr int kStepDepth = 64;
static_assert(kStepDepth == kDepthUnit);

// A step in the file: how many pieces it has, and their bytes.
struct StepPieces {
  int count;
  int bytes;
};
constexpr StepPieces step_pieces(Codes codes, CodeOrder order) {
  switch (order) {
    case CodeOrder::rows:
      return {kPanelRows, kStepDepth * grouped_code_bits(codes) / 8};
    case CodeOrder::gptq:
      return {kStepDepth / 8, 4 * kPanelRows};
    case CodeOrder::awq:
      return {kStepDepth, kPanelRows / 2};
  }
  return {};
}
constexpr int kLargestStep = kPanelRows * kStepDepth;  // bytes

// The pieces lie `pitch` bytes apart. What lies `ahead` bytes behind them is fetched into L2: pieces are too short, or
// too far apart, for the CPU to do so by itself; 0: nothing is. False if a code means NaN.
bool put_step(Codes codes, CodeOrder order, const uint8_t* from, size_t pitch, size_t ahead, uint8_t* lines);

// Scales of 16 rows and 16 / sizeof(T) groups, rows `pitch` bytes apart: out[g][r] = from[r][g]. Returns the largest
// after `& mask`, which is below 0x8000 for 16 bits.
template <class T>
T turn_scales(const uint8_t* from, size_t pitch, T mask, uint8_t* const* out);
extern template uint8_t turn_scales(const uint8_t*, size_t, uint8_t, uint8_t* const*);
extern template uint16_t turn_scales(const uint8_t*, size_t, uint16_t, uint8_t* const*);

}  // namespace kt
