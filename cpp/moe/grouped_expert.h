// An expert as a checkpoint has it, for the formats of formats/grouped.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats/grouped_lines.h"

namespace kt {

// A matrix [N, K]. Pitches are in bytes from row to row of the file; for gptq and awq rows of the file are k.
struct GroupedMatrix {
  CodeOrder order = CodeOrder::rows;
  const uint8_t* codes = nullptr;
  size_t code_pitch = 0;
  // Scale of row n and column k: at scales + n / block_rows * scale_row + k / group * scale_group, in the format's
  // width.
  const uint8_t* scales = nullptr;
  size_t scale_row = 0;
  size_t scale_group = 0;
  int block_rows = 1;
  // Zero of row n and group g, a byte: zeros[n * zero_row + g * zero_group]. Null: 8.
  const uint8_t* zeros = nullptr;
  size_t zero_row = 0;
  size_t zero_group = 0;
  // Of formats that have them: rows[n * row_step]; 0 for one factor.
  const float* rows = nullptr;
  int row_step = 0;
};

struct GroupedExpert {
  GroupedMatrix gate, up, down;
  // Column j of gate and up is for column columns[j] of the input; null: they come in order.
  const int32_t* columns = nullptr;
};

// What can be wrong with a matrix: codes or scales that mean NaN, scales beyond kScaleLimit, scales below 0 where the
// format has no sign for them, zeros above 16.
constexpr unsigned kCodeFault = 1, kScaleFault = 2, kRowFault = 4, kZeroFault = 8;
constexpr int kFaultBits = 4;

// 2^90: products with the largest code and row factor, and sums of 2^24 of them with activations of 2^10, stay finite.
constexpr int kScaleLimitExponent = 90;

// Panels that lie side by side in a file and are best packed together: a cache line has codes of 16 rows of gptq, and
// of 128 of awq; lines that are neighbours share a page.
constexpr int panels_together(CodeOrder order) {
  switch (order) {
    case CodeOrder::rows:
      return 1;
    case CodeOrder::gptq:
      return 4;
    case CodeOrder::awq:
      return 8;
  }
  return 1;
}

// Rows row..row+rows and columns k0..k1 of a matrix become panels that lie `stride` bytes apart. `group` is that of the
// matrix and `panel_group`, which divides it, that of the panels; row is a multiple of 16 and k0 one of 64. Returns
// faults; the panels are then of no use.
unsigned pack_matrix(const GroupedKind& kind, const GroupedMatrix& matrix, int group, int row, int rows, int k0, int k1,
                     int panel_group, uint8_t* panels, size_t stride);

}  // namespace kt
