#include "formats/gguf.h"

#include <algorithm>
#include <cstring>

#include "formats/nibbles.h"

namespace kt {
namespace {

constexpr int kSuper = 256;

uint16_t load_u16(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return bits;
}

// A place in a panel: row n from depth k on.
struct Place {
  GroupedPanel& panel;
  int n, k;

  uint8_t* codes() const { return panel.row(n) + k; }
  uint8_t* scales(int group) const { return panel.row_scales(n) + static_cast<size_t>(k / group) * panel.width; }
  uint8_t* mins(int group) const { return panel.row_mins(n) + static_cast<size_t>(k / group) * panel.min_width; }
  void supers(const uint8_t* super, const uint8_t* super_min) const {
    uint16_t* to = panel.row_supers(n) + k / kSuper * 2;
    to[0] = load_u16(super);
    if (super_min) to[1] = load_u16(super_min);
  }
};

// Low nibbles of `count` bytes, then the high ones.
void put_nibbles(const uint8_t* from, int count, uint8_t* to) {
  for (int i = 0; i < count; ++i) {
    to[i] = from[i] & 15;
    to[i + count] = from[i] >> 4;
  }
}

// Two bits of 32 bytes, four times over: k = 32 j + i.
void put_pairs_of_bits(const uint8_t* from, uint8_t* to) {
  for (int j = 0; j < 4; ++j) {
    for (int i = 0; i < 32; ++i) to[32 * j + i] = from[i] >> 2 * j & 3;
  }
}

// [f16 scale][f16 min][32 bits: fifth bits][16 bytes], the parts that a type has.
void put_legacy(const uint8_t* block, bool min, bool fifth, const Place& to) {
  std::memcpy(to.scales(32), block, 2);
  block += 2;
  if (min) {
    std::memcpy(to.mins(32), block, 2);
    block += 2;
  }
  uint32_t bits = 0;
  if (fifth) {
    bits = load_u32(block);
    block += 4;
  }
  uint8_t* codes = to.codes();
  put_nibbles(block, 16, codes);
  for (int i = 0; fifth && i < 32; ++i) codes[i] = static_cast<uint8_t>(codes[i] | (bits >> i & 1) << 4);
}

void put_q8_0(const uint8_t* block, const Place& to) {
  std::memcpy(to.scales(32), block, 2);
  uint8_t* codes = to.codes();
  for (int i = 0; i < 32; ++i) codes[i] = block[2 + i] ^ 0x80;
}

void put_mxfp4(const uint8_t* block, const Place& to) {
  *to.scales(32) = block[0];
  put_nibbles(block + 1, 16, to.codes());
}

// [16 bytes: scale | min << 4][64 bytes][super][super_min]
void put_q2_k(const uint8_t* block, const Place& to) {
  std::memcpy(to.scales(16), block, 16);
  for (int half = 0; half < 2; ++half) put_pairs_of_bits(block + 16 + 32 * half, to.codes() + 128 * half);
  to.supers(block + 80, block + 82);
}

// [32 bytes: bit 2][64 bytes: bits 0 and 1][12 bytes: scales of 6 bits + 32][super]
void put_q3_k(const uint8_t* block, const Place& to) {
  const uint8_t *high = block, *packed = block + 96;
  uint8_t *codes = to.codes(), *scales = to.scales(16);
  for (int half = 0; half < 2; ++half) put_pairs_of_bits(block + 32 + 32 * half, codes + 128 * half);
  for (int k = 0; k < kSuper; ++k) codes[k] = static_cast<uint8_t>(codes[k] | (high[k % 32] >> k / 32 & 1) << 2);
  for (int g = 0; g < 16; ++g) {
    const int low = g < 8 ? packed[g] & 15 : packed[g - 8] >> 4, top = packed[8 + g % 4] >> 2 * (g / 4) & 3;
    scales[g] = static_cast<uint8_t>((low | top << 4) - 32);
  }
  to.supers(block + 108, nullptr);
}

// [super][super_min][12 bytes: scales and mins of 6 bits]
void put_k_scales(const uint8_t* block, const Place& to) {
  const uint8_t* packed = block + 4;
  uint8_t *scales = to.scales(32), *mins = to.mins(32);
  for (int g = 0; g < 4; ++g) {
    scales[g] = packed[g] & 63;
    mins[g] = packed[g + 4] & 63;
    scales[g + 4] = static_cast<uint8_t>((packed[g + 8] & 15) | packed[g] >> 6 << 4);
    mins[g + 4] = static_cast<uint8_t>(packed[g + 8] >> 4 | packed[g + 4] >> 6 << 4);
  }
  to.supers(block, block + 2);
}

void put_q4_k(const uint8_t* block, const Place& to) {
  put_k_scales(block, to);
  for (int i = 0; i < 4; ++i) put_nibbles(block + 16 + 32 * i, 32, to.codes() + 64 * i);
}

// Scales as Q4_K, [32 bytes: bit 4][128 bytes]
void put_q5_k(const uint8_t* block, const Place& to) {
  put_k_scales(block, to);
  uint8_t* codes = to.codes();
  for (int i = 0; i < 4; ++i) put_nibbles(block + 48 + 32 * i, 32, codes + 64 * i);
  for (int k = 0; k < kSuper; ++k) codes[k] = static_cast<uint8_t>(codes[k] | (block[16 + k % 32] >> k / 32 & 1) << 4);
}

// [128 bytes: bits 0 to 3][64 bytes: bits 4 and 5][16 bytes: scales][super]
void put_q6_k(const uint8_t* block, const Place& to) {
  for (int half = 0; half < 2; ++half) {
    uint8_t* codes = to.codes() + 128 * half;
    put_nibbles(block + 64 * half, 64, codes);
    const uint8_t* high = block + 128 + 32 * half;
    for (int k = 0; k < 128; ++k) codes[k] = static_cast<uint8_t>(codes[k] | (high[k % 32] >> k / 32 * 2 & 3) << 4);
  }
  std::memcpy(to.scales(16), block + 192, 16);
  to.supers(block + 208, nullptr);
}

// [super][16 bits: bits 4 and 5 of the scales][4 bytes: bits 0 to 3][128 bytes]
void put_iq4_xs(const uint8_t* block, const Place& to) {
  const int high = load_u16(block + 2);
  for (int g = 0; g < 8; ++g) {
    const int low = block[4 + g / 2] >> g % 2 * 4 & 15;
    to.scales(32)[g] = static_cast<uint8_t>((low | (high >> 2 * g & 3) << 4) - 32);
    put_nibbles(block + 8 + 16 * g, 16, to.codes() + 32 * g);
  }
  to.supers(block, nullptr);
}

void put_tq2_0(const uint8_t* block, const Place& to) {
  for (int half = 0; half < 2; ++half) put_pairs_of_bits(block + 32 * half, to.codes() + 128 * half);
  std::memcpy(to.scales(kSuper), block + 64, 2);
}

void put_block(Format format, const uint8_t* block, const Place& to) {
  switch (format) {
    case Format::q4_0:
    case Format::iq4_nl:
      return put_legacy(block, false, false, to);
    case Format::q4_1:
      return put_legacy(block, true, false, to);
    case Format::q5_0:
      return put_legacy(block, false, true, to);
    case Format::q5_1:
      return put_legacy(block, true, true, to);
    case Format::q8_0:
      return put_q8_0(block, to);
    case Format::mxfp4:
      return put_mxfp4(block, to);
    case Format::q2_k:
      return put_q2_k(block, to);
    case Format::q3_k:
      return put_q3_k(block, to);
    case Format::q4_k:
      return put_q4_k(block, to);
    case Format::q5_k:
      return put_q5_k(block, to);
    case Format::q6_k:
      return put_q6_k(block, to);
    case Format::iq4_xs:
      return put_iq4_xs(block, to);
    case Format::tq2_0:
      return put_tq2_0(block, to);
    default:
      return;
  }
}

// Where a block has its f16 scales: one at `first`, a second one behind it if `two`.
struct HalfPlaces {
  int first;
  bool two;
};
HalfPlaces halves_of(Format format) {
  switch (format) {
    case Format::q2_k:
      return {80, true};
    case Format::q3_k:
      return {108, false};
    case Format::q6_k:
      return {208, false};
    case Format::tq2_0:
      return {64, false};
    case Format::tq1_0:
      return {52, false};
    case Format::q4_1:
    case Format::q5_1:
    case Format::q4_k:
    case Format::q5_k:
      return {0, true};
    default:
      return {0, false};
  }
}

bool finite(uint16_t f16) { return (f16 & 0x7c00) != 0x7c00; }

// IQ1_M has its scale in the highest four bits of four words.
constexpr int kIq1mScales = 48;
uint16_t iq1m_scale(const uint8_t* block) {
  int bits = 0;
  for (int i = 0; i < 4; ++i) bits |= (load_u16(block + kIq1mScales + 2 * i) >> 12) << 4 * i;
  return static_cast<uint16_t>(bits);
}

bool scales_are_finite(Format format, const uint8_t* block) {
  if (format == Format::mxfp4) return block[0] != 255;
  if (format == Format::iq1_m) return finite(iq1m_scale(block));
  const HalfPlaces places = halves_of(format);
  return finite(load_u16(block + places.first)) && (!places.two || finite(load_u16(block + places.first + 2)));
}

bool pack_raw(Format format, const uint8_t* rows, size_t pitch, int count, int k0, int k1, uint8_t* panel) {
  const size_t bytes = static_cast<size_t>(gguf_block(format).bytes);
  bool good = true;
  for (int k = k0; k < k1; k += kSuper) {
    for (int n = 0; n < kPanelRows; ++n, panel += bytes) {
      if (n >= count) {
        std::memset(panel, 0, bytes);
        continue;
      }
      std::memcpy(panel, rows + n * pitch + static_cast<size_t>(k / kSuper) * bytes, bytes);
      good &= scales_are_finite(format, panel);
    }
  }
  return good;
}

void pack_floats(int width, const uint8_t* rows, size_t pitch, int count, int k0, int k1, uint8_t* panel) {
  std::memset(panel, 0, static_cast<size_t>(padded_depth(k1 - k0)) * kPanelRows * width);
  for (int n = 0; n < count; ++n) {
    const uint8_t* from = rows + n * pitch + static_cast<size_t>(k0) * width;
    for (int k = 0; k < k1 - k0; ++k)
      std::memcpy(panel + (static_cast<size_t>(k) * kPanelRows + n) * width, from + static_cast<size_t>(k) * width,
                  width);
  }
}

}  // namespace

GgufBlock gguf_block(Format format) {
  switch (format) {
    case Format::f32:
      return {1, 4};
    case Format::f16:
    case Format::bf16:
      return {1, 2};
    case Format::q4_0:
    case Format::iq4_nl:
      return {32, 18};
    case Format::q4_1:
      return {32, 20};
    case Format::q5_0:
      return {32, 22};
    case Format::q5_1:
      return {32, 24};
    case Format::q8_0:
      return {32, 34};
    case Format::mxfp4:
      return {32, 17};
    case Format::q2_k:
      return {kSuper, 84};
    case Format::q3_k:
      return {kSuper, 110};
    case Format::q4_k:
      return {kSuper, 144};
    case Format::q5_k:
      return {kSuper, 176};
    case Format::q6_k:
      return {kSuper, 210};
    case Format::iq4_xs:
      return {kSuper, 136};
    case Format::tq2_0:
      return {kSuper, 66};
    default: {
      return is_raw(format) ? GgufBlock{kSuper, grouped_kind(format)->raw_bytes} : GgufBlock{0, 0};
    }
  }
}

bool pack_gguf(Format format, const uint8_t* rows, size_t pitch, int count, int k0, int k1, GroupedPanel* scratch,
               uint8_t* panel) {
  if (is_raw(format)) return pack_raw(format, rows, pitch, count, k0, k1, panel);
  const GroupedKind& kind = *grouped_kind(format);
  const GgufBlock type = gguf_block(format);
  if (type.weights == 1) {
    pack_floats(type.bytes, rows, pitch, count, k0, k1, panel);
    return true;
  }
  const int group = kind.least_group;
  bool good = true;
  scratch->reset(kind, k1 - k0, group);
  for (int n = 0; n < count; ++n) {
    const uint8_t* block = rows + n * pitch + static_cast<size_t>(k0 / type.weights) * type.bytes;
    for (int k = 0; k < k1 - k0; k += type.weights, block += type.bytes) {
      put_block(format, block, {*scratch, n, k});
      good &= scales_are_finite(format, block);
    }
  }
  put_grouped(kind, group, *scratch, panel);
  return good;
}

void set_raw_scale(Format format, uint16_t f16, uint8_t* block) {
  if (format != Format::iq1_m) {
    std::memcpy(block + halves_of(format).first, &f16, 2);
    return;
  }
  for (int i = 0; i < 4; ++i) {
    uint8_t& high = block[kIq1mScales + 2 * i + 1];
    high = static_cast<uint8_t>((high & 15) | (f16 >> 4 * i & 15) << 4);
  }
}

}  // namespace kt
