// AMX tiles: eight registers of 16 rows x 64 bytes.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace kt {
namespace {

struct AmxTiles {
  // Configures this thread; every tile is 16 x 64 bytes. About 100 cycles, so once per matrix product is fine.
  static void begin() {
    struct alignas(64) Config {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    static_assert(sizeof(Config) == 64);
    const Config config;
    _tile_loadconfig(&config);
  }
  // Frees the tile state, so that context switches need not save 8 KB.
  static void end() { _tile_release(); }
  // gcc 12 does not see that tile loads read memory: this keeps plain stores before them.
  static void fence() { asm volatile("" ::: "memory"); }

  template <int T>
  static void zero() {
    _tile_zero(T);
  }
  template <int T>
  static void load(const void* p, size_t pitch) {
    _tile_loadd(T, p, pitch);
  }
  template <int T>
  static void store(void* p, size_t pitch) {
    _tile_stored(T, p, pitch);
  }
  // c += a (s8, rows x 64 k) * b (u8, lines of 16 n x 4 k)
  template <int C, int A, int B>
  static void dot_s8u8() {
    _tile_dpbsud(C, A, B);
  }
  // c += a (bf16, rows x 32 k) * b (bf16, lines of 16 n x 2 k)
  template <int C, int A, int B>
  static void dot_bf16() {
    _tile_dpbf16ps(C, A, B);
  }
};

}  // namespace
}  // namespace kt
