// Codes and scales of one panel, row-major as files have them, and the way into a panel and back. Neither rounds
// anything. Not for raw codes, which are panels already.
#pragma once

#include <cstdint>
#include <vector>

#include "formats/grouped.h"

namespace kt {

struct GroupedPanel {
  int k = 0;
  int pitch = 0;  // codes from row to row: the padded depth
  int code_bytes = 0;
  int groups = 0;     // of a row, the last one maybe ragged
  int width = 0;      // bytes of a scale
  int min_width = 0;  // of a zero or min
  int blocks = 0;
  std::vector<uint8_t> codes, scales, mins;
  std::vector<uint16_t> supers;  // super and super_min of every block, row by row
  float rows[kPanelRows] = {};

  // Everything as padding is: weights of 0.
  void reset(const GroupedKind& kind, int depth, int group);
  uint8_t* row(int n) { return codes.data() + static_cast<size_t>(n) * pitch * code_bytes; }
  const uint8_t* row(int n) const { return codes.data() + static_cast<size_t>(n) * pitch * code_bytes; }
  uint8_t* row_scales(int n) { return scales.data() + static_cast<size_t>(n) * groups * width; }
  const uint8_t* row_scales(int n) const { return scales.data() + static_cast<size_t>(n) * groups * width; }
  uint8_t* row_mins(int n) { return mins.data() + static_cast<size_t>(n) * groups * min_width; }
  const uint8_t* row_mins(int n) const { return mins.data() + static_cast<size_t>(n) * groups * min_width; }
  uint16_t* row_supers(int n) { return supers.data() + static_cast<size_t>(n) * blocks * 2; }
  const uint16_t* row_supers(int n) const { return supers.data() + static_cast<size_t>(n) * blocks * 2; }
};

void put_grouped(const GroupedKind& kind, int group, const GroupedPanel& from, uint8_t* panel);
void get_grouped(const GroupedKind& kind, int group, const uint8_t* panel, int k, GroupedPanel* to);

// Of row n at depth k, by the formula in formats/grouped.h.
float decode_weight(const GroupedKind& kind, int group, const GroupedPanel& panel, int n, int k);

float decode_e4m3(uint8_t code);
float decode_f16(uint16_t bits);
float decode_code(const GroupedKind& kind, const uint8_t* code);
float decode_scale(Scales scales, const uint8_t* at);

}  // namespace kt
