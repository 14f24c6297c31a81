// What this CPU can do and the operating system lets it do.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"

namespace kt {

using FeatureSet = uint32_t;

// Registers that the operating system saves on a context switch; without that their instructions fault.
enum class CpuState { none, ymm, zmm, tile };

// X(name, register, bit, state). The names are those of cmake/isa.cmake.
#define KT_CPU_FEATURES(X)            \
  X(popcnt, leaf1_ecx, 23, none)      \
  X(fma, leaf1_ecx, 12, ymm)          \
  X(f16c, leaf1_ecx, 29, ymm)         \
  X(bmi1, leaf7_ebx, 3, none)         \
  X(avx2, leaf7_ebx, 5, ymm)          \
  X(bmi2, leaf7_ebx, 8, none)         \
  X(avx512f, leaf7_ebx, 16, zmm)      \
  X(avx512dq, leaf7_ebx, 17, zmm)     \
  X(avx512cd, leaf7_ebx, 28, zmm)     \
  X(avx512bw, leaf7_ebx, 30, zmm)     \
  X(avx512vl, leaf7_ebx, 31, zmm)     \
  X(avx512_vbmi, leaf7_ecx, 1, zmm)   \
  X(avx512_vnni, leaf7_ecx, 11, zmm)  \
  X(avx512_bf16, leaf7_1_eax, 5, zmm) \
  X(amx_bf16, leaf7_edx, 22, tile)    \
  X(amx_tile, leaf7_edx, 24, tile)    \
  X(amx_int8, leaf7_edx, 25, tile)

namespace feature {
enum Position : int {
#define KT_POSITION(name, reg, bit, state) name##_position,
  KT_CPU_FEATURES(KT_POSITION)
#undef KT_POSITION
};
#define KT_BIT(name, reg, bit, state) inline constexpr FeatureSet name = FeatureSet{1} << name##_position;
KT_CPU_FEATURES(KT_BIT)
#undef KT_BIT
}  // namespace feature

// The registers that decode() looks at, as data, so that tests can describe any CPU and any operating system.
struct RawCpuid {
  uint32_t leaf1_ecx = 0;
  uint32_t leaf7_ebx = 0;
  uint32_t leaf7_ecx = 0;
  uint32_t leaf7_edx = 0;
  uint32_t leaf7_1_eax = 0;
  uint64_t xcr0 = 0;             // 0 when the operating system does not use XSAVE
  bool tile_on_request = false;  // Linux gives the tile registers to a process that asks for them
};

RawCpuid read_cpuid();
FeatureSet decode(const RawCpuid& raw);

// This machine; read once.
FeatureSet cpu_features();

// "avx2 fma f16c"
std::string feature_names(FeatureSet set);
// All bits of a space-separated list; the first unknown name is an error.
Status parse_features(const std::string& names, FeatureSet* out);

// Asks Linux for the tile registers, for the whole process, once. Call it before the first tile instruction and before
// any thread that will use tiles is started.
Status request_tile_permission();

}  // namespace kt
