#include "cpu/features.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>

namespace kt {
namespace {

// XCR0 and arch_prctl(2) numbers; <asm/prctl.h> of older distributions lacks the latter.
constexpr uint64_t kYmmState = 0x6;               // SSE, AVX
constexpr uint64_t kZmmState = kYmmState | 0xe0;  // opmask, upper halves, zmm16-31
constexpr uint64_t kTileState = 0x60000;          // XTILECFG, XTILEDATA
constexpr int kArchGetXcompSupp = 0x1021;
constexpr int kArchReqXcompPerm = 0x1023;
constexpr int kXfeatureTileData = 18;

constexpr uint32_t kOsxsave = 1u << 27;

// Inline, because the intrinsic needs a flag above the baseline. Legal only where CPUID reports OSXSAVE.
uint64_t xgetbv0() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}

bool has_state(const RawCpuid& raw, CpuState state) {
  auto saved = [&](uint64_t mask) { return (raw.xcr0 & mask) == mask; };
  switch (state) {
    case CpuState::none:
      return true;
    case CpuState::ymm:
      return saved(kYmmState);
    case CpuState::zmm:
      return saved(kZmmState);
    case CpuState::tile:
      return saved(kTileState) && raw.tile_on_request;
  }
  return false;
}

struct FeatureName {
  std::string_view name;
  FeatureSet bit;
};

constexpr FeatureName kNames[] = {
#define KT_NAME(name, reg, bit, state) {#name, feature::name},
    KT_CPU_FEATURES(KT_NAME)
#undef KT_NAME
};

}  // namespace

RawCpuid read_cpuid() {
  RawCpuid raw;
  unsigned eax, ebx, ecx, edx;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx)) raw.leaf1_ecx = ecx;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
    const unsigned last_subleaf = eax;
    raw.leaf7_ebx = ebx;
    raw.leaf7_ecx = ecx;
    raw.leaf7_edx = edx;
    if (last_subleaf >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) raw.leaf7_1_eax = eax;
  }
  if (raw.leaf1_ecx & kOsxsave) raw.xcr0 = xgetbv0();
  uint64_t on_request = 0;
  if (syscall(SYS_arch_prctl, kArchGetXcompSupp, &on_request) == 0) {
    raw.tile_on_request = on_request >> kXfeatureTileData & 1;
  }
  return raw;
}

FeatureSet decode(const RawCpuid& raw) {
  FeatureSet set = 0;
#define KT_DECODE(name, reg, bit, state) \
  if ((raw.reg >> bit & 1) && has_state(raw, CpuState::state)) set |= feature::name;
  KT_CPU_FEATURES(KT_DECODE)
#undef KT_DECODE
  return set;
}

FeatureSet cpu_features() {
  static const FeatureSet features = decode(read_cpuid());
  return features;
}

std::string feature_names(FeatureSet set) {
  std::string names;
  for (const auto& [name, bit] : kNames) {
    if (!(set & bit)) continue;
    if (!names.empty()) names += ' ';
    names += name;
  }
  return names;
}

Status parse_features(const std::string& names, FeatureSet* out) {
  FeatureSet set = 0;
  for (size_t begin = 0; (begin = names.find_first_not_of(' ', begin)) != std::string::npos;) {
    const size_t end = std::min(names.find(' ', begin), names.size());
    const std::string_view word(names.data() + begin, end - begin);
    FeatureSet bit = 0;
    for (const auto& known : kNames) {
      if (known.name == word) bit = known.bit;
    }
    if (!bit) {
      return Status::invalid("unknown CPU feature '" + std::string(word) +
                             "'; known: " + feature_names(~FeatureSet{0}));
    }
    set |= bit;
    begin = end;
  }
  *out = set;
  return Status::ok();
}

Status request_tile_permission() {
  static const int error = syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureTileData) == 0 ? 0 : errno;
  if (error == 0) return Status::ok();
  return Status::unsupported(std::string("Linux refused the AMX tile registers (arch_prctl: ") + std::strerror(error) +
                             "); AMX needs Linux 5.16 or newer and a container that allows arch_prctl");
}

}  // namespace kt
