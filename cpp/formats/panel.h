// The unit of packed weights, shared by every format and instruction set.
//
// A panel holds 16 output rows over the whole depth K. Inside it k runs in lines of 64 bytes, each line holding a few
// consecutive k of all 16 rows, so that a line is one AVX-512 register, two AVX2 registers, or one row of an AMX B
// tile: decode and prefill read the same bytes on every CPU. K is padded to kDepthUnit with weights that decode to 0.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kt {

constexpr int kPanelRows = 16;
constexpr int kLineBytes = 64;
// One AMX int8 tile row covers 64 k; every other kernel steps by a divisor of it.
constexpr int kDepthUnit = 64;
// Activations are quantised in groups of this many k. Error on heavy-tailed inputs falls with the group (per token 11
// %, 256: 3.1 %, 32: 1.1 % with outlier channels), the cost of rescaling the accumulators grows; 256 is free on every
// ISA.
constexpr int kActGroup = 256;
// Several groups may share a scale; this is the most k that do.
constexpr int kMaxSpan = 1024;
// Sums of quantised activations are kept per this many k, the finest group whose offset a weight format removes.
constexpr int kSumGroup = 32;

constexpr int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }
constexpr int div_up(int value, int unit) { return (value + unit - 1) / unit; }
constexpr int padded_depth(int k) { return round_up(k, kDepthUnit); }
constexpr int panel_count(int rows) { return div_up(rows, kPanelRows); }

}  // namespace kt
