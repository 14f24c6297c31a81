// The loops that tell what a CPU can do at best; the denominators of every share that `kt bench` prints.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kt {

// Runs `iterations` rounds with operands in registers and returns the arithmetic operations done (a MAC is 2).
using PeakLoop = uint64_t (*)(uint64_t iterations);

struct LimitLoops {
  PeakLoop fma_f32;    // vector FMA
  PeakLoop dot_bf16;   // vdpbf16ps; null where absent
  PeakLoop dot_u8s8;   // vpdpbusd; null where absent
  PeakLoop tile_bf16;  // tdpbf16ps; null where absent
  PeakLoop tile_u8s8;  // tdpbsud; null where absent
  // The same with a tile load from L1 for every product, the least that a matrix product needs with 2 x 2 accumulators.
  PeakLoop tile_bf16_l1;
  PeakLoop tile_u8s8_l1;
  uint64_t (*read_stream)(const void* data,
                          size_t bytes);  // reads every byte once; the value only defeats dead-code removal
};

}  // namespace kt
