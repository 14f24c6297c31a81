// The traits of the row that is being compiled (definitions by cmake/isa.cmake): V, and Tiles where the row has them.
#pragma once

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

}  // namespace
}  // namespace kt
