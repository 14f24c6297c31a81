// How each integer format turns its packed lines into operands, one vector of lanes at a time.
//
// block() is given the first line of a chunk and the number of a kActGroup in it, group() moves to the next 64 k,
// pair(i) yields the operands of k = 4i..4i+3 and 16+4i..16+4i+3 of that group for i < 4, and of the 32 k behind them
// for i < 8.
#pragma once

#include "formats/int4.h"
#include "formats/int4g.h"
#include "formats/int8.h"
#include "kernels/unroll.h"

namespace kt {
namespace {

// Depth is padded to kDepthUnit, so groups of as many are whole.
constexpr int kGroupLines8 = kDepthUnit / 4;
constexpr int kGroupLines4 = kDepthUnit / 8;
constexpr int kGroupPairs = kGroupLines4;
// Where the activations of pair(i) start.
constexpr int pair_depth(int i) { return i / 4 * 32 + i % 4 * 4; }

template <class V>
struct Int8Lines {
  static constexpr size_t kBlockBytes = kActGroup * 16;
  const uint8_t* next;
  const uint8_t* line;

  KT_INLINE void block(const uint8_t* lines, int index) { next = lines + index * kBlockBytes; }
  KT_INLINE void group() {
    line = next;
    next += kGroupLines8 * kLineBytes;
  }
  KT_INLINE void pair(int i, typename V::Int& w0, typename V::Int& w1) const {
    w0 = V::load(line + pair_depth(i) / 4 * kLineBytes);
    w1 = V::load(line + (pair_depth(i) / 4 + 4) * kLineBytes);
  }
};

// Nibbles as they are, 0..15, and the factor of the group: the operands of the u4 x s8 kernel.
template <class V>
struct Int4Nibbles {
  static constexpr size_t kBlockBytes = kActGroup * 8;
  const uint8_t* next;
  const uint8_t* line;

  KT_INLINE void block(const uint8_t* lines, int index) { next = lines + index * kBlockBytes; }
  KT_INLINE void group() {
    line = next;
    next += kGroupLines4 * kLineBytes;
  }
  KT_INLINE void pair(int i, typename V::Int& w0, typename V::Int& w1) const {
    const auto low = V::set1_32(0x0f0f0f0f);
    const auto bits = V::load(line + i * kLineBytes);
    w0 = V::bit_and(bits, low);
    w1 = V::bit_and(V::template shift_right_16<4>(bits), low);
  }
  // The same with 16 times the nibble in w1, which takes no shift.
  KT_INLINE void pair_unshifted(int i, typename V::Int& w0, typename V::Int& w1) const {
    const auto bits = V::load(line + i * kLineBytes);
    w0 = V::bit_and(bits, V::set1_32(0x0f0f0f0f));
    w1 = V::bit_and(bits, V::set1_32(static_cast<int32_t>(0xf0f0f0f0)));
  }
  KT_INLINE typename V::Int steps() const { return V::set1_32(Int4::kStep * 0x00010001); }
};

// Byte `at` of the words of four lanes, spread over their bytes: in all of them, in the lower ones of both halves, or
// in the lowest alone, zeros elsewhere. For shuffles, as wide as the widest vector.
enum class Spread { bytes, halves, word };
struct SpreadIndex {
  alignas(64) uint8_t of_byte[4][64];
};
constexpr SpreadIndex spread_index(Spread spread) {
  SpreadIndex index{};
  for (int at = 0; at < 4; ++at) {
    for (int i = 0; i < 64; ++i) {
      const bool taken = spread == Spread::bytes || i % (spread == Spread::halves ? 2 : 4) == 0;
      index.of_byte[at][i] = static_cast<uint8_t>(taken ? i % 16 / 4 * 4 + at : 0x80);
    }
  }
  return index;
}
template <Spread kSpread>
constexpr SpreadIndex kSpreadIndex = spread_index(kSpread);

// The steps of a kActGroup are bytes of one word for each row: a shuffle brings that of a group to where it is
// multiplied.
template <class V>
struct Int4gNibbles : Int4Nibbles<V> {
  typename V::Int step_bytes;
  int at;

  KT_INLINE void block(const uint8_t* lines, int index) {
    const uint8_t* start = lines + index / 2 * Int4g::kBlockBytes;
    auto packed = V::load(start);
    if (index % 2 != 0) packed = V::template shift_right_16<4>(packed);
    step_bytes = V::add_8(V::bit_and(packed, V::set1_32(0x0f0f0f0f)), V::set1_32(0x01010101));
    at = -1;
    Int4Nibbles<V>::block(start + kLineBytes, index % 2);
  }
  KT_INLINE void group() {
    ++at;
    Int4Nibbles<V>::group();
  }
  template <Spread kSpread>
  KT_INLINE typename V::Int spread() const {
    return V::look_up(step_bytes, V::load(kSpreadIndex<kSpread>.of_byte[at]));
  }
  KT_INLINE typename V::Int steps() const { return spread<Spread::halves>(); }
  KT_INLINE typename V::Int steps_32() const { return spread<Spread::word>(); }
};

// The same weights as int8 lines with offset 128.
template <class V>
struct Int4Lines : Int4Nibbles<V> {
  // 16 (u4 - 8) + 128 = 16 u4: a shift.
  KT_INLINE void pair(int i, typename V::Int& w0, typename V::Int& w1) const {
    const auto high = V::set1_32(static_cast<int32_t>(0xf0f0f0f0));
    const auto bits = V::load(this->line + i * kLineBytes);
    w0 = V::bit_and(V::template shift_left_32<4>(bits), high);
    w1 = V::bit_and(bits, high);
  }
};

template <class V>
struct Int4gLines : Int4gNibbles<V> {
  typename V::Int step, offset;

  KT_INLINE void group() {
    Int4gNibbles<V>::group();
    const auto bytes = this->template spread<Spread::bytes>();
    step = V::bit_and(bytes, V::set1_32(0x00ff00ff));
    // 128 - 8 s in each byte; 8 s <= 128, so no byte borrows from the next.
    offset = V::sub_32(V::set1_32(static_cast<int32_t>(0x80808080)), V::template shift_left_32<3>(bytes));
  }
  KT_INLINE void pair(int i, typename V::Int& w0, typename V::Int& w1) const {
    Int4gNibbles<V>::pair(i, w0, w1);
    // s * u4 <= 240 fits its byte, so one 16-bit multiply does two bytes.
    w0 = V::add_8(V::mul_lo_16(w0, step), offset);
    w1 = V::add_8(V::mul_lo_16(w1, step), offset);
  }
};

// Format -> lines.
template <class V, class Format>
struct LinesOf;
template <class V>
struct LinesOf<V, Int8> {
  using U8 = Int8Lines<V>;
};
template <class V>
struct LinesOf<V, Int4> {
  using U8 = Int4Lines<V>;
  using U4 = Int4Nibbles<V>;
};
template <class V>
struct LinesOf<V, Int4g> {
  using U8 = Int4gLines<V>;
  using U4 = Int4gNibbles<V>;
};

// Decodes kc of one panel to int8 lines.
template <class V, class Source>
KT_INLINE void decode_u8(const uint8_t* lines, int kc, uint8_t* out) {
  for (int k = 0, block = 0; k < kc; k += kActGroup, ++block) {
    const int groups = (kc - k < kActGroup ? kc - k : kActGroup) / kDepthUnit;
    for (int v = 0; v < kPanelRows / V::kLanes; ++v) {
      Source source;
      source.block(lines + v * V::kBytes, block);
      uint8_t* to = out + static_cast<size_t>(k) * kPanelRows + v * V::kBytes;
      for (int group = 0; group < groups; ++group, to += kGroupLines8 * kLineBytes) {
        source.group();
        KT_UNROLL
        for (int i = 0; i < kGroupPairs; ++i) {
          typename V::Int w0, w1;
          source.pair(i, w0, w1);
          V::store(to + pair_depth(i) / 4 * kLineBytes, w0);
          V::store(to + (pair_depth(i) / 4 + 4) * kLineBytes, w1);
        }
      }
    }
  }
}

}  // namespace
}  // namespace kt
