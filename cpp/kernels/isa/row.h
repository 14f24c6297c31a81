// The traits of the row that is being compiled (definitions by cmake/isa.cmake): V, and Tiles where the row has them.
#pragma once

#include <cstddef>

#if defined(KT_EMULATED)
#include "kernels/isa/emu.h"
#include "kernels/isa/emu_tiles.h"
#elif defined(__AVX512F__)
#include "kernels/isa/avx512.h"
#else
#include "kernels/isa/avx2.h"
#endif
#if defined(KT_ISA_AMX)
#include "kernels/isa/amx.h"
#endif

namespace kt {
namespace {

#if defined(KT_ISA_EMU)
using V = EmuVec<8>;
#elif defined(KT_EMULATED)
using V = EmuVec<16>;
#elif defined(__AVX512F__)
using V = Avx512;
#else
using V = Avx2;
#endif

#if defined(KT_ISA_AMX)
using Tiles = AmxTiles;
#elif defined(KT_ISA_EMU_AMX)
using Tiles = EmuTiles;
#endif

#if defined(KT_ISA_AMX) || defined(KT_ISA_EMU_AMX)
#define KT_HAS_TILES 1
#endif

// Bytes ahead of the weights at hand that kernels for a few rows fetch: Intel gains by it, and AMD, whose best row is
// avx512_bf16 or avx2, does not.
#if defined(__AVX512F__) && !defined(KT_ISA_AVX512_BF16)
constexpr size_t kFetchAhead = 2048;
#else
constexpr size_t kFetchAhead = 0;
#endif

}  // namespace
}  // namespace kt
