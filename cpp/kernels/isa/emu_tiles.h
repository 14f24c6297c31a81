// The scalar witness of AMX tiles.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/bf16.h"

namespace kt {
namespace {

struct EmuTiles {
  struct Tile {
    uint8_t b[16][64];
  };
  static Tile& tile(int t) {
    static thread_local Tile tiles[8];
    return tiles[t];
  }

  static void begin() {}
  static void end() {}

  template <int T>
  static void zero() {
    std::memset(tile(T).b, 0, sizeof(Tile));
  }
  template <int T>
  static void load(const void* p, size_t pitch) {
    for (int r = 0; r < 16; ++r) std::memcpy(tile(T).b[r], static_cast<const uint8_t*>(p) + r * pitch, 64);
  }
  template <int T>
  static void load_once(const void* p, size_t pitch) {
    load<T>(p, pitch);
  }
  template <int T>
  static void store(void* p, size_t pitch) {
    for (int r = 0; r < 16; ++r) std::memcpy(static_cast<uint8_t*>(p) + r * pitch, tile(T).b[r], 64);
  }
  template <int C, int A, int B>
  static void dot_s8u8() {
    for (int m = 0; m < 16; ++m) {
      for (int n = 0; n < 16; ++n) {
        uint32_t sum;
        std::memcpy(&sum, tile(C).b[m] + 4 * n, 4);
        for (int k = 0; k < 64; ++k) {
          sum += static_cast<uint32_t>(static_cast<int8_t>(tile(A).b[m][k]) * tile(B).b[k / 4][4 * n + k % 4]);
        }
        std::memcpy(tile(C).b[m] + 4 * n, &sum, 4);
      }
    }
  }
  template <int C, int A, int B>
  static void dot_bf16() {
    for (int m = 0; m < 16; ++m) {
      for (int n = 0; n < 16; ++n) {
        float sum;
        std::memcpy(&sum, tile(C).b[m] + 4 * n, 4);
        for (int k = 0; k < 32; ++k) {
          uint16_t a, b;
          std::memcpy(&a, tile(A).b[m] + 2 * k, 2);
          std::memcpy(&b, tile(B).b[k / 2] + 4 * n + 2 * (k % 2), 2);
          sum = std::fma(bf16_to_f32(a), bf16_to_f32(b), sum);
        }
        std::memcpy(tile(C).b[m] + 4 * n, &sum, 4);
      }
    }
  }
};

}  // namespace
}  // namespace kt
