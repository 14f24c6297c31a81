// Slices of an expert for the ranks of a tensor-parallel GPU, in the bytes of the checkpoint, row-major.
//
// With I / G = n, rank r of G gets
//   w13_weight  rows [r n, (r + 1) n) of gate, then the same of up: [2 n, H]
//   w2_weight   columns [r n, (r + 1) n) of down: [H, n]
//   w13_scale, w2_scale   the scales that these weights have. Where one covers weights of two ranks both get it: with b
//     rows (or columns) to a scale, those of rank r are r n / b (rounded down) up to (r + 1) n / b (rounded up), and
//     weight i of the slice has scale (r n + i) / b - (r n) / b, both rounded down.
// Scales are f32 (fp8; fp8c: one for each row, those of down whole on every rank), e8m0 (mxfp8) or bf16 (rawint4;
// mxfp4, whose e8m0 are powers of two in bf16 too). bf16 has none.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats/unpack.h"

namespace kt {

// Of one rank; scales of bf16 are not looked at.
struct SliceBuffers {
  uint8_t* w13_weight = nullptr;
  uint8_t* w13_scale = nullptr;
  uint8_t* w2_weight = nullptr;
  uint8_t* w2_scale = nullptr;
};

struct SliceBytes {
  size_t w13_weight = 0, w13_scale = 0, w2_weight = 0, w2_scale = 0;
};

// int4z has lost how the file lay, nvfp4 has two scales, and what we quantised is of no checkpoint.
constexpr bool has_slices(Format format) {
  const GroupedKind* kind = grouped_kind(format);
  if (!kind) return format == Format::bf16;
  return is_checkpoint(format) && kind->mins == Mins::none && !(kind->row && kind->scales != Scales::none);
}

// How many rows of each matrix of an expert share a scale, in formats that have group scales. Panels do not tell; 0:
// nobody did.
struct ScaleRows {
  int gate = 1, up = 1, down = 1;
};

}  // namespace kt
