// Quantised weights apart from any layout: w[n][k] = scales[n] * step * codes[n][k].
//
// int8: codes -128..127, step 1. int4: codes -8..7, step 16. int4g: codes -8..7, step = steps[n][k / 64] in 1..16.
#pragma once

#include <cstdint>
#include <vector>

#include "formats/list.h"
#include "formats/panel.h"

namespace kt {

// Bits of a code; 0 for formats without codes.
int code_bits(Format format);
bool has_steps(Format format);

// The codes of one panel, row-major, in the panel's padded depth.
struct PanelCodes {
  int k = 0;
  int pitch = 0;       // codes from row to row
  int step_pitch = 0;  // steps from row to row
  std::vector<int8_t> codes;
  std::vector<uint8_t> steps;
  float scales[kPanelRows] = {};

  // Everything as padding is: codes 0, steps 1, scales 0.
  void reset(int depth);
  int8_t* row(int n) { return codes.data() + static_cast<size_t>(n) * pitch; }
  const int8_t* row(int n) const { return codes.data() + static_cast<size_t>(n) * pitch; }
  uint8_t* row_steps(int n) { return steps.data() + static_cast<size_t>(n) * step_pitch; }
  const uint8_t* row_steps(int n) const { return steps.data() + static_cast<size_t>(n) * step_pitch; }
};

// The two are inverse to each other and round nothing. Formats with codes only.
void put_codes(Format format, const PanelCodes& from, uint8_t* panel);
void get_codes(Format format, const uint8_t* panel, int k, PanelCodes* to);

}  // namespace kt
