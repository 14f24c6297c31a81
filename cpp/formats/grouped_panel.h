// Codes and scales of one panel of a checkpoint format, row-major as checkpoints have them, and the way into a panel
// and back. Neither rounds anything.
#pragma once

#include <cstdint>
#include <vector>

#include "formats/grouped.h"

namespace kt {

struct GroupedPanel {
  int k = 0;
  int pitch = 0;   // codes from row to row: the padded depth, a byte each
  int groups = 0;  // of a row, the last one maybe ragged
  int width = 0;   // bytes of a scale
  std::vector<uint8_t> codes, scales, zeros;
  float rows[kPanelRows] = {};

  // Everything as padding is: weights of 0.
  void reset(const GroupedKind& kind, int depth, int group);
  uint8_t* row(int n) { return codes.data() + static_cast<size_t>(n) * pitch; }
  const uint8_t* row(int n) const { return codes.data() + static_cast<size_t>(n) * pitch; }
  uint8_t* row_scales(int n) { return scales.data() + static_cast<size_t>(n) * groups * width; }
  const uint8_t* row_scales(int n) const { return scales.data() + static_cast<size_t>(n) * groups * width; }
  uint8_t* row_zeros(int n) { return zeros.data() + static_cast<size_t>(n) * groups; }
  const uint8_t* row_zeros(int n) const { return zeros.data() + static_cast<size_t>(n) * groups; }
};

void put_grouped(const GroupedKind& kind, int group, const GroupedPanel& from, uint8_t* panel);
void get_grouped(const GroupedKind& kind, int group, const uint8_t* panel, int k, GroupedPanel* to);

float decode_code(Codes codes, uint8_t code);
float decode_scale(Scales scales, const uint8_t* at);

}  // namespace kt
