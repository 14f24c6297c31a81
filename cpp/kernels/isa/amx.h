// AMX tiles: eight registers of 16 rows x 64 bytes.
#pragma once

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
    asm volatile("ldtilecfg %0" ::"m"(config));  // gcc's intrinsic claims to read 8 of the 64 bytes only
  }
  // Frees the tile state, so that context switches need not save 8 KB.
  static void end() { asm volatile("tilerelease"); }

  // Assembly, because gcc's intrinsics paste the tile number into a name and so take no template argument. The memory
  // clobbers order plain stores before tile loads and tile stores before plain loads.
  template <int T>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  template <int T>
  static void load(const void* p, size_t pitch) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(pitch), "i"(T) : "memory");
  }
  // The same, for what is not read again soon: it takes no room in L1.
  template <int T>
  static void load_once(const void* p, size_t pitch) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(pitch), "i"(T) : "memory");
  }
  template <int T>
  static void store(void* p, size_t pitch) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(pitch), "i"(T) : "memory");
  }
  // c += a (s8, rows x 64 k) * b (u8, lines of 16 n x 4 k)
  template <int C, int A, int B>
  static void dot_s8u8() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
  // c += a (bf16, rows x 32 k) * b (bf16, lines of 16 n x 2 k)
  template <int C, int A, int B>
  static void dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

}  // namespace
}  // namespace kt
