// An expert that was quantised before, as its file holds it.
#pragma once

#include <cstdint>
#include <vector>

#include "formats/code_layouts.h"

namespace kt {

struct CodedPart {
  const uint8_t* codes;
  const uint8_t* scales;  // f32, one per row of the part; files do not align them
  const uint8_t* steps;   // int4g: [rows][ceil(k / 64)], else null
};

// Equal parts, as many of each: gate and up [I, H] are cut by rows, down [H, I] by columns, so every part of down has
// row scales of its own.
struct CodedExpert {
  const CodeLayout* layout;
  std::vector<CodedPart> gate;
  std::vector<CodedPart> up;
  std::vector<CodedPart> down;
};

}  // namespace kt
