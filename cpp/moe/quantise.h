// bf16 matrices to codes in the layout `rows` of formats/code_layouts.h, for files.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "formats/list.h"
#include "kernels/kernel.h"
#include "threads/pool.h"

namespace kt {

struct QuantisedRows {
  uint8_t* codes;  // [rows][row_bytes]
  float* scales;   // [rows]
  uint8_t* steps;  // int4g: [rows][ceil(k / 32)]
};

// With all workers of the pool. The codes are read back from panels, so a file holds what load_expert would have packed
// on one node, and there is one definition of each quantisation.
Status quantise(Pool& pool, const IsaTable& isa, Format format, const uint16_t* matrix, int rows, int k,
                const QuantisedRows& out);

}  // namespace kt
