#include "formats/format.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/bf16.h"
#include "formats/bf16.h"
#include "formats/gguf.h"
#include "formats/grouped_panel.h"
#include "formats/int4.h"
#include "formats/int4g.h"
#include "formats/int8.h"

namespace kt {
namespace {

float row_scale(const uint8_t* panel, int n) {
  float d;
  std::memcpy(&d, panel + 4 * n, 4);
  return d;
}

// The u4 of row n at depth k of a block or whole panel whose lines start at `lines`.
int nibble(const uint8_t* lines, int n, int k) {
  const int in_group = k % 32;
  const int line = k / 32 * 4 + (in_group % 16) / 4;
  const uint8_t byte = lines[line * kLineBytes + 4 * n + k % 4];
  return in_group < 16 ? byte & 15 : byte >> 4;
}

float decode(Format format, const uint8_t* panel, int n, int k) {
  switch (format) {
    case Format::bf16: {
      uint16_t bits;
      std::memcpy(&bits, panel + k / 2 * kLineBytes + 4 * n + 2 * (k % 2), 2);
      return bf16_to_f32(bits);
    }
    case Format::int8: {
      const uint8_t u = panel[Int8::offset(0) + k / 4 * kLineBytes + 4 * n + k % 4];
      return row_scale(panel, n) * static_cast<float>(u - Int8::kOffset);
    }
    case Format::int4:
      return row_scale(panel, n) *
             static_cast<float>(Int4::kStep * (nibble(panel + Int4::offset(0), n, k) - Int4::kOffset));
    case Format::int4g: {
      uint32_t steps;
      std::memcpy(&steps, panel + Int4g::steps_offset(k, n), 4);
      const int step = static_cast<int>(steps >> Int4g::steps_shift(k) & 15) + 1;
      const int k0 = k / Int4g::kBlock * Int4g::kBlock;
      return row_scale(panel, n) *
             static_cast<float>(step * (nibble(panel + Int4g::lines_offset(k0), n, k - k0) - Int4g::kOffset));
    }
    default:
      return 0;
  }
}

void decode_grouped_panel(const GroupedKind& kind, int group, const uint8_t* panel, int k_packed, int k_out,
                          float* out) {
  GroupedPanel codes;
  get_grouped(kind, group, panel, k_packed, &codes);
  for (int n = 0; n < kPanelRows; ++n) {
    for (int k = 0; k < k_out; ++k) out[static_cast<size_t>(n) * k_out + k] = decode_weight(kind, group, codes, n, k);
  }
}

void decode_raw_panel(Format format, const uint8_t* panel, int k_out, float* out) {
  constexpr GroupedLayout kLayout(kExpanded, kExpanded.least_group);
  const size_t bytes = static_cast<size_t>(gguf_block(format).bytes) * kPanelRows;
  std::vector<uint8_t> block(kLayout.block_bytes());
  std::vector<float> weights(static_cast<size_t>(kPanelRows) * kActGroup);
  for (int k = 0; k < k_out; k += kActGroup, panel += bytes) {
    expand_raw(format, panel, false, block.data());
    decode_grouped_panel(kExpanded, kLayout.group, block.data(), kActGroup, kActGroup, weights.data());
    for (int n = 0; n < kPanelRows; ++n) {
      std::copy_n(weights.data() + static_cast<size_t>(n) * kActGroup, std::min(kActGroup, k_out - k),
                  out + static_cast<size_t>(n) * k_out + k);
    }
  }
}

}  // namespace

const char* format_name(Format format) {
  static constexpr const char* kNames[] = {
#define KT_FORMAT_NAME(name) #name,
      KT_FORMATS(KT_FORMAT_NAME)
#undef KT_FORMAT_NAME
  };
  return kNames[static_cast<int>(format)];
}

std::optional<Format> format_by_name(std::string_view name) {
  for (int i = 0; i < kFormatCount; ++i) {
    if (name == format_name(static_cast<Format>(i))) return static_cast<Format>(i);
  }
  return std::nullopt;
}

size_t panel_bytes(WeightFormat format, int k) {
  if (const GroupedKind* kind = grouped_kind(format.id)) return GroupedLayout(*kind, format.group).panel_bytes(k);
  switch (format.id) {
    case Format::bf16:
      return Bf16::panel_bytes(k);
    case Format::int8:
      return Int8::panel_bytes(k);
    case Format::int4:
      return Int4::panel_bytes(k);
    case Format::int4g:
      return Int4g::panel_bytes(k);
    default:
      return 0;
  }
}

void decode_panel(WeightFormat format, const uint8_t* panel, int k_packed, int k_out, float* out) {
  if (is_raw(format.id)) return decode_raw_panel(format.id, panel, k_out, out);
  if (const GroupedKind* kind = grouped_kind(format.id))
    return decode_grouped_panel(*kind, format.group, panel, k_packed, k_out, out);
  for (int n = 0; n < kPanelRows; ++n) {
    for (int k = 0; k < k_out; ++k) out[static_cast<size_t>(n) * k_out + k] = decode(format.id, panel, n, k);
  }
}

}  // namespace kt
