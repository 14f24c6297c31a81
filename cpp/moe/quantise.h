// bf16 matrices to codes in the layout `rows` of formats/code_layouts.h, for files.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "formats/list.h"
#include "kernels/kernel.h"
#include "moe/coded_expert.h"
#include "threads/pool.h"

namespace kt {

struct QuantisedRows {
  uint8_t* codes;  // [rows][row_bytes]
  float* scales;   // [rows]
  uint8_t* steps;  // int4g: [rows][ceil(k / 64)]
};

// With all workers of the pool, or without a pool in the calling thread. The codes are read back from panels, so a file
// holds what load_expert would have packed on one node, and there is one definition of each quantisation. `search`:
// with scales of least error (kernels/scales-inl.h) instead of those of the largest weights.
Status quantise(Pool* pool, const IsaTable& isa, Format format, bool search, const uint16_t* matrix, int rows, int k,
                const QuantisedRows& out);

struct SquaredError {
  double error;   // sum (w - decoded)^2
  double weight;  // sum w^2
};

// How far the codes are from the matrix. Not finite if the matrix is not.
SquaredError squared_error(Format format, const uint16_t* matrix, int rows, int k, const CodedPart& coded);

}  // namespace kt
