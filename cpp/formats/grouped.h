// Checkpoint formats: w[n][k] = row[n] * scale[n][k / group] * (code[n][k] - zero[n][k / group]), codes and scales at
// the width the checkpoint has them in.
//
// Panel = [16 f32: row] then per 256 k: [group scales: 256 / group x 16][zeros: 256 / group x 16 bytes][lines].
// The head of a block, scales and zeros, is padded to whole lines.
//   8 bits: line = 16 n x 4 k. 4 bits: four lines cover 32 k as in int4, the low nibbles of line i are k = 4i..4i+3 and
//   the high ones 16+4i..16+4i+3. Four k lie in the order k0 k2 k1 k3: the even bytes of a lane are then one pair of
//   consecutive k and the odd bytes the other, as the kernels take them.
#pragma once

#include "formats/list.h"
#include "formats/panel.h"

namespace kt {

enum class Codes {
  e4m3,  // 8 bits
  e2m1,  // 4 bits
  int4,  // 4 bits, value = nibble - 8
};
enum class Scales { none, f32, bf16, f16, e8m0, e4m3 };

struct GroupedKind {
  Codes codes;
  Scales scales;
  bool zeros;  // in place of the 8 of int4, a byte each
  bool row;    // whether row is anything but 1
  int least_group;
};

constexpr int scale_bytes(Scales scales) {
  switch (scales) {
    case Scales::none:
      return 0;
    case Scales::f32:
      return 4;
    case Scales::bf16:
    case Scales::f16:
      return 2;
    case Scales::e8m0:
    case Scales::e4m3:
      return 1;
  }
  return 0;
}

constexpr GroupedKind kFp8{Codes::e4m3, Scales::f32, false, false, 32};
constexpr GroupedKind kFp8c{Codes::e4m3, Scales::none, false, true, 32};
constexpr GroupedKind kMxfp8{Codes::e4m3, Scales::e8m0, false, false, 32};
constexpr GroupedKind kMxfp4{Codes::e2m1, Scales::e8m0, false, false, 32};
constexpr GroupedKind kNvfp4{Codes::e2m1, Scales::e4m3, false, true, 16};
constexpr GroupedKind kRawint4{Codes::int4, Scales::bf16, false, false, 32};
constexpr GroupedKind kInt4z{Codes::int4, Scales::f16, true, false, 32};

// Null for formats of the other sort.
constexpr const GroupedKind* grouped_kind(Format format) {
  switch (format) {
    case Format::fp8:
      return &kFp8;
    case Format::fp8c:
      return &kFp8c;
    case Format::mxfp8:
      return &kMxfp8;
    case Format::mxfp4:
      return &kMxfp4;
    case Format::nvfp4:
      return &kNvfp4;
    case Format::rawint4:
      return &kRawint4;
    case Format::int4z:
      return &kInt4z;
    default:
      return nullptr;
  }
}

constexpr int grouped_code_bits(Codes codes) { return codes == Codes::e4m3 ? 8 : 4; }

// Where things lie in a panel. A group is a power of two up to kBlock.
struct GroupedLayout {
  static constexpr int kBlock = 256;
  int group;
  int groups;  // of a block
  size_t zeros_at;
  size_t head;
  size_t lines_per_k;  // bytes

  constexpr GroupedLayout(const GroupedKind& kind, int group_size)
      : group(group_size),
        groups(kBlock / group_size),
        zeros_at(static_cast<size_t>(groups) * kPanelRows * scale_bytes(kind.scales)),
        head(static_cast<size_t>(
            round_up(static_cast<int>(zeros_at) + (kind.zeros ? groups * kPanelRows : 0), kLineBytes))),
        lines_per_k(static_cast<size_t>(grouped_code_bits(kind.codes)) * 2) {}

  // Bytes from the start of a panel to depth k; k is a multiple of kBlock, or the padded depth.
  constexpr size_t offset(int k) const {
    return kLineBytes + static_cast<size_t>(div_up(k, kBlock)) * head + static_cast<size_t>(k) * lines_per_k;
  }
  constexpr size_t panel_bytes(int k) const { return offset(padded_depth(k)); }
  constexpr size_t block_bytes() const { return head + kBlock * lines_per_k; }
};
static_assert(GroupedLayout::kBlock == kActGroup);

}  // namespace kt
