// Formats that hold the codes and scales of a file as they are, at the width the file has them in:
//   w[n][k] = row[n] * super[n][k / 256] * scale[n][k / group] * (value(code[n][k]) - zero[n][k / group])
//             - super_min[n][k / 256] * min[n][k / group]
// where a format has only some of the factors, or + min[n][k / group] without a super_min.
//
// Panel = [16 f32: row, if any] then per 256 k: [scales: 256 / group x 16][zeros or mins, likewise][f16: super x 16]
// [f16: super_min x 16][lines]. The head of a block, all before its lines, is padded to whole lines, or to half ones
// where blocks have supers: Q3_K would grow by 5 % otherwise, and a load across two lines costs less.
//   A line holds 16 n, 4 bytes each. 32 k are eight quads q of consecutive k; quad q lies
//     8 bits: in line q
//     4 bits: in line q % 4, in the low (q < 4) or high nibbles
//     2 bits: in line q / 4, at bit 2 (q % 4) of each byte
//     3, 5, 6 bits: the low 2 or 4 bits as above, then the others: one bit at bit q of a line, two as 2 bits
//   Four k lie in the order k0 k2 k1 k3: the even bytes of a lane are then one pair of consecutive k and the odd bytes
//   the other, as the kernels take them. Floats: f16 and f32 lie as 16 n of one k after the other.
#pragma once

#include "formats/list.h"
#include "formats/panel.h"

namespace kt {

enum class Codes {
  e4m3,
  e2m1,  // 4 bits
  u2,    // unsigned integers
  u3,
  u4,
  u5,
  u6,
  u8,
  iq4,  // 4 bits, index of a table of 16 integers
  f16,  // the weights themselves
  f32,
  raw,  // blocks of a codebook, row after row, as formats/gguf.h knows them
};
enum class Scales {
  none,
  f32,
  bf16,
  f16,
  e8m0,
  e4m3,
  u8,  // these three are factors of a super
  s8,
  u4,  // the low nibble of a byte
};
enum class Mins {
  none,
  zeros,  // a byte, in units of the codes
  f16,    // added, as f32
  f32,
  u8,  // these two are factors of a super_min, which is subtracted
  u4,  // the high nibble of the byte that holds the scale
};

struct GroupedKind {
  Codes codes;
  Scales scales;
  Mins mins;
  bool row;  // whether row is anything but 1
  int least_group;
  int offset;     // of integers: value = code - offset
  int raw_bytes;  // of a block of 256 k of one row
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
    default:
      return 1;
  }
}
constexpr int min_bytes(Mins mins) {
  switch (mins) {
    case Mins::none:
    case Mins::u4:
      return 0;
    case Mins::f16:
      return 2;
    case Mins::f32:
      return 4;
    default:
      return 1;
  }
}
constexpr bool has_super(Scales scales) { return scales == Scales::u8 || scales == Scales::s8 || scales == Scales::u4; }
constexpr bool has_super_min(Mins mins) { return mins == Mins::u8 || mins == Mins::u4; }

constexpr GroupedKind kFp8{Codes::e4m3, Scales::f32, Mins::none, false, 32, 0, 0};
constexpr GroupedKind kFp8c{Codes::e4m3, Scales::none, Mins::none, true, 32, 0, 0};
constexpr GroupedKind kMxfp8{Codes::e4m3, Scales::e8m0, Mins::none, false, 32, 0, 0};
constexpr GroupedKind kMxfp4{Codes::e2m1, Scales::e8m0, Mins::none, false, 32, 0, 0};
constexpr GroupedKind kNvfp4{Codes::e2m1, Scales::e4m3, Mins::none, true, 16, 0, 0};
constexpr GroupedKind kRawint4{Codes::u4, Scales::bf16, Mins::none, false, 32, 8, 0};
constexpr GroupedKind kInt4z{Codes::u4, Scales::f16, Mins::zeros, false, 32, 0, 0};
constexpr GroupedKind kF32{Codes::f32, Scales::none, Mins::none, false, 256, 0, 0};
constexpr GroupedKind kF16{Codes::f16, Scales::none, Mins::none, false, 256, 0, 0};
constexpr GroupedKind kQ4_0{Codes::u4, Scales::f16, Mins::none, false, 32, 8, 0};
constexpr GroupedKind kQ4_1{Codes::u4, Scales::f16, Mins::f16, false, 32, 0, 0};
constexpr GroupedKind kQ5_0{Codes::u5, Scales::f16, Mins::none, false, 32, 16, 0};
constexpr GroupedKind kQ5_1{Codes::u5, Scales::f16, Mins::f16, false, 32, 0, 0};
constexpr GroupedKind kQ8_0{Codes::u8, Scales::f16, Mins::none, false, 32, 128, 0};
constexpr GroupedKind kQ2_K{Codes::u2, Scales::u4, Mins::u4, false, 16, 0, 0};
constexpr GroupedKind kQ3_K{Codes::u3, Scales::s8, Mins::none, false, 16, 4, 0};
constexpr GroupedKind kQ4_K{Codes::u4, Scales::u8, Mins::u8, false, 32, 0, 0};
constexpr GroupedKind kQ5_K{Codes::u5, Scales::u8, Mins::u8, false, 32, 0, 0};
constexpr GroupedKind kQ6_K{Codes::u6, Scales::s8, Mins::none, false, 16, 32, 0};
constexpr GroupedKind kIq4_nl{Codes::iq4, Scales::f16, Mins::none, false, 32, 0, 0};
constexpr GroupedKind kIq4_xs{Codes::iq4, Scales::s8, Mins::none, false, 32, 0, 0};
constexpr GroupedKind kTq2_0{Codes::u2, Scales::f16, Mins::none, false, 256, 1, 0};
// What blocks of GGUF become before they are multiplied: bytes, and two floats for each 16, or 32.
constexpr GroupedKind kExpanded{Codes::u8, Scales::f32, Mins::f32, false, 16, 128, 0};
constexpr GroupedKind kBytes16{Codes::u8, Scales::f32, Mins::f32, false, 16, 0, 0};
constexpr GroupedKind kBytes32{Codes::u8, Scales::f32, Mins::f32, false, 32, 0, 0};
constexpr GroupedKind kSigned16{Codes::u8, Scales::f32, Mins::none, false, 16, 128, 0};
constexpr GroupedKind kSigned32{Codes::u8, Scales::f32, Mins::none, false, 32, 128, 0};
constexpr GroupedKind raw_kind(int bytes) { return {Codes::raw, Scales::none, Mins::none, false, 256, 0, bytes}; }
constexpr GroupedKind kTq1_0 = raw_kind(54);
constexpr GroupedKind kIq1_s = raw_kind(50);
constexpr GroupedKind kIq1_m = raw_kind(56);
constexpr GroupedKind kIq2_xxs = raw_kind(66);
constexpr GroupedKind kIq2_xs = raw_kind(74);
constexpr GroupedKind kIq2_s = raw_kind(82);
constexpr GroupedKind kIq3_xxs = raw_kind(98);
constexpr GroupedKind kIq3_s = raw_kind(110);

// The rows above in the order of KT_FORMATS, from fp8 on.
constexpr const GroupedKind* kGroupedKinds[] = {
    &kFp8,    &kFp8c,  &kMxfp8, &kMxfp4, &kNvfp4, &kRawint4, &kInt4z,  &kF32,   &kF16,     &kQ4_0,
    &kQ4_1,   &kQ5_0,  &kQ5_1,  &kQ8_0,  &kQ2_K,  &kQ3_K,    &kQ4_K,   &kQ5_K,  &kQ6_K,    &kIq4_nl,
    &kIq4_xs, &kTq2_0, &kTq1_0, &kIq1_s, &kIq1_m, &kIq2_xxs, &kIq2_xs, &kIq2_s, &kIq3_xxs, &kIq3_s};
constexpr int kFirstGrouped = static_cast<int>(Format::fp8);
static_assert(sizeof(kGroupedKinds) / sizeof(kGroupedKinds[0]) == kFormatCount - kFirstGrouped);

// Null for formats of the other sort.
constexpr const GroupedKind* grouped_kind(Format format) {
  const int index = static_cast<int>(format) - kFirstGrouped;
  return index < 0 ? nullptr : kGroupedKinds[index];
}

// Of checkpoints; mxfp4 is of GGUF too.
constexpr bool is_checkpoint(Format format) { return format >= Format::fp8 && format <= Format::int4z; }

// Values of Codes::iq4.
constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Bits of a code; raw ones have no fixed number.
constexpr int grouped_code_bits(Codes codes) {
  switch (codes) {
    case Codes::e4m3:
    case Codes::u8:
      return 8;
    case Codes::e2m1:
    case Codes::u4:
    case Codes::iq4:
      return 4;
    case Codes::u2:
      return 2;
    case Codes::u3:
      return 3;
    case Codes::u5:
      return 5;
    case Codes::u6:
      return 6;
    case Codes::f16:
      return 16;
    case Codes::f32:
      return 32;
    case Codes::raw:
      return 0;
  }
  return 0;
}

#define KT_LAYOUT_INLINE __attribute__((always_inline))

// Where things lie in a panel. A group is a power of two up to kBlock.
struct GroupedLayout {
  static constexpr int kBlock = 256;
  int group;
  int groups;      // of a block
  size_t first;    // bytes before the first block
  size_t mins_at;  // bytes from the start of a block, as the rest
  size_t supers_at;
  size_t head;
  size_t line_bytes;  // of a block

  // Inlined everywhere: code of one instruction set must not be called from another's (tools/check_isolation.py).
  KT_LAYOUT_INLINE constexpr GroupedLayout(GroupedKind kind, int group_size)
      : group(group_size),
        groups(kBlock / group_size),
        first(kind.row ? kLineBytes : 0),
        mins_at(static_cast<size_t>(groups) * kPanelRows * scale_bytes(kind.scales)),
        supers_at(mins_at + static_cast<size_t>(groups) * kPanelRows * min_bytes(kind.mins)),
        head(head_of(kind)),
        line_bytes(kind.codes == Codes::raw ? static_cast<size_t>(kPanelRows) * kind.raw_bytes
                                            : static_cast<size_t>(grouped_code_bits(kind.codes)) * 2 * kBlock) {}

  // Bytes from the start of a panel to depth k; k is a multiple of kBlock, or the padded depth.
  KT_LAYOUT_INLINE constexpr size_t offset(int k) const {
    return first + static_cast<size_t>(div_up(k, kBlock)) * head + static_cast<size_t>(k) * line_bytes / kBlock;
  }
  KT_LAYOUT_INLINE constexpr size_t panel_bytes(int k) const { return offset(padded_depth(k)); }
  KT_LAYOUT_INLINE constexpr size_t block_bytes() const { return head + line_bytes; }

 private:
  KT_LAYOUT_INLINE constexpr size_t head_of(GroupedKind kind) const {
    const int supers = (has_super(kind.scales) ? 1 : 0) + (has_super_min(kind.mins) ? 1 : 0);
    return static_cast<size_t>(
        round_up(static_cast<int>(supers_at) + supers * kPanelRows * 2, supers ? kLineBytes / 2 : kLineBytes));
  }
};
static_assert(GroupedLayout::kBlock == kActGroup);

}  // namespace kt
