// Formats by enum value: names, sizes, and the scalar decoder that tests hold every kernel against.
#pragma once

#include <optional>
#include <string_view>

#include "formats/list.h"
#include "formats/panel.h"

namespace kt {

// A format as a layer has it. `group` is that of the panels of a checkpoint format (formats/grouped.h), else unused.
struct WeightFormat {
  Format id = Format::bf16;
  int group = 0;

  constexpr WeightFormat() = default;
  constexpr WeightFormat(Format format, int group_size = 0) : id(format), group(group_size) {}
};

const char* format_name(Format format);
std::optional<Format> format_by_name(std::string_view name);
size_t panel_bytes(WeightFormat format, int k);
// out[r * k_out + k] for r < 16, k < k_out <= padded depth of a panel packed with depth k_packed.
void decode_panel(WeightFormat format, const uint8_t* panel, int k_packed, int k_out, float* out);

}  // namespace kt
