// How files lay out the codes of a matrix [rows, k]: one reader per layout, found by name and width of a code.
//
// rows: row-major. 8 bits: int8 [rows, k]. 4 bits: [rows, ceil(k / 2)] bytes, even k in the low nibble, code + 8.
// blocks: what kt-kernel 0.4 to 0.7 wrote for its tiles, two's complement. See code_layouts.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kt {

// Rows row..row+rows and columns k0..k1 of a matrix. k0 is even; for blocks, row is a multiple of 16 and
// k0 and k1 are of 64.
struct CodeBlock {
  int row;
  int rows;  // at most kPanelRows
  int k0;
  int k1;
};

struct CodeLayout {
  const char* name;
  int code_bits;
  int unit;  // rows and k of a matrix must be multiples of it
  size_t (*bytes)(int rows, int k);
  // out[r * pitch + k - k0] = code of row block.row + r at k.
  void (*read)(const uint8_t* data, int rows, int k, const CodeBlock& block, int8_t* out, size_t pitch);
};

// Null if there is none.
const CodeLayout* code_layout(std::string_view name, int code_bits);

// The other way for rows of 4 bits: k codes to ceil(k / 2) bytes, the unused nibble as code 0.
void write_row_int4(const int8_t* codes, int k, uint8_t* out);

}  // namespace kt
