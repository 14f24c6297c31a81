// The loops that tell what a CPU can do at best; the denominators of every share that `kt bench` prints.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kt {

// Runs `iterations` rounds with operands in registers and returns the arithmetic operations done (a MAC is 2).
using PeakLoop = uint64_t (*)(uint64_t iterations);

struct LimitLoops {
  PeakLoop fma_f32 = nullptr;    // vector FMA
  PeakLoop dot_bf16 = nullptr;   // vdpbf16ps; null where absent
  PeakLoop dot_u8s8 = nullptr;   // vpdpbusd; null where absent
  PeakLoop tile_bf16 = nullptr;  // tdpbf16ps; null where absent
  PeakLoop tile_u8s8 = nullptr;  // tdpbsud; null where absent
  // The same with the loads of a matrix product of 1 x 2 tiles, from L1: three for two products.
  PeakLoop tile_bf16_l1 = nullptr;
  PeakLoop tile_u8s8_l1 = nullptr;
  // From registers again, but with all eight of them in use, as products of 2 x 2 tiles have them: as fast on a core of
  // one's own, and less than half as fast beside a busy hyperthread (gemm_tiles-inl.h).
  PeakLoop tile_bf16_2x2 = nullptr;
  PeakLoop tile_u8s8_2x2 = nullptr;
  uint64_t (*read_stream)(const void* data,
                          size_t bytes) = nullptr;  // reads every byte once; the value only defeats dead-code removal
};

}  // namespace kt
