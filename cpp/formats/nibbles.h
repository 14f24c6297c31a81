// Nibbles as bytes, eight at a time in a plain register: files are unpacked on the x86-64 baseline.
#pragma once

#include <cstdint>
#include <cstring>

namespace kt {
namespace {

constexpr uint64_t each_byte(uint64_t value) { return value * 0x0101010101010101u; }

// Bytes 0..15 that stand for code + 8, and the codes themselves as int8.
inline uint64_t offset_to_codes(uint64_t nibbles) {
  const uint64_t twos = nibbles ^ each_byte(8);
  return twos | (twos & each_byte(8)) * 0x1e;  // 8 * 0x1e = 0xf0: a set sign fills the high half
}
inline uint64_t codes_to_offset(uint64_t codes) { return (codes ^ each_byte(8)) & each_byte(15); }
// The same for nibbles in two's complement.
inline uint64_t twos_to_codes(uint64_t nibbles) { return nibbles | (nibbles & each_byte(8)) * 0x1e; }

// Four bytes to eight, low nibble first, and back.
inline uint64_t spread_nibbles(uint32_t bytes) {
  uint64_t x = bytes;
  x = (x | x << 16) & 0x0000ffff0000ffffu;
  x = (x | x << 8) & 0x00ff00ff00ff00ffu;
  return (x | x << 4) & each_byte(15);
}
inline uint32_t gather_nibbles(uint64_t x) {
  x = (x | x >> 4) & 0x00ff00ff00ff00ffu;
  x = (x | x >> 8) & 0x0000ffff0000ffffu;
  return static_cast<uint32_t>(x | x >> 16);
}

inline uint32_t load_u32(const void* from) {
  uint32_t x;
  std::memcpy(&x, from, 4);
  return x;
}
inline uint64_t load_u64(const void* from) {
  uint64_t x;
  std::memcpy(&x, from, 8);
  return x;
}

}  // namespace
}  // namespace kt
