// What the tests that run over every row of cmake/isa.cmake share: the tables that run here, and random data.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "base/bf16.h"
#include "formats/format.h"
#include "kernels/dispatch.h"
#include "kernels/kernel.h"

namespace kt_test {

struct Variant {
  const char* name;
  bool emulated;
  const kt::IsaTable* table;
};

struct Skipped {
  const char* name;
  std::string reason;
};

struct Variants {
  std::vector<Variant> run;
  std::vector<Skipped> skipped;
};

inline const Variants& variants() {
  static const Variants all = [] {
    Variants v;
    for (const kt::VariantInfo& info : kt::variants()) {
      const kt::IsaTable* table = nullptr;
      if (!info.runnable) {
        v.skipped.push_back({info.name, info.reason});
      } else if (const kt::Status status = kt::select(info.name, &table); !status.is_ok()) {
        v.skipped.push_back({info.name, status.message()});
      } else {
        v.run.push_back({info.name, info.emulated, table});
      }
    }
    return v;
  }();
  return all;
}

// Whether an emulated row has its native twin beside it, which then takes every shape: the twin of emu is avx2, of
// emu_<row> <row>.
inline bool has_native_twin(const Variant& v) {
  if (!v.emulated) return false;
  const std::string name = v.name, twin = name == "emu" ? "avx2" : name.substr(name.find('_') + 1);
  for (const Variant& other : variants().run) {
    if (twin == other.name) return true;
  }
  return false;
}

inline void print_coverage() {
  std::string native, emulated;
  for (const Variant& v : variants().run) (v.emulated ? emulated : native) += std::string(" ") + v.name;
  std::printf("  ran natively:%s\n  ran emulated:%s\n", native.c_str(), emulated.c_str());
  for (const Skipped& s : variants().skipped) std::printf("  did not run: %s (%s)\n", s.name, s.reason.c_str());
}

inline const char* act_name(kt::ActKind kind) {
  static constexpr const char* kNames[] = {"bf16", "s8", "s16"};
  return kNames[static_cast<int>(kind)];
}

// splitmix64: the same numbers with every compiler.
struct Random {
  uint64_t state;
  explicit Random(uint64_t seed) : state(seed) {}

  uint64_t bits() {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int below(int n) { return static_cast<int>(bits() % static_cast<uint64_t>(n)); }
  // Sum of four uniform numbers: near enough to a Gaussian, variance 1.
  float gaussian() {
    const uint64_t b = bits();
    int sum = -131070;
    for (int i = 0; i < 4; ++i) sum += static_cast<int>(b >> (16 * i) & 0xffff);
    return static_cast<float>(sum) * (1.7320508f / 65536.0f);
  }
  uint16_t gaussian_bf16() { return kt::f32_to_bf16(gaussian()); }
};

template <class Buffer>
void fill_gaussian_bf16(Buffer& buffer, Random& random) {
  for (uint16_t& x : buffer) x = random.gaussian_bf16();
}

// Activations as the kernels of a kind read them, row pitch and all.
inline int acts_group_pitch(int k) { return kt::div_up(k, kt::kActGroup); }
inline int acts_sum_pitch(int k) { return kt::padded_depth(k) / kt::kSumGroup; }

// Where element k of a quantised row lies: s16 keeps quads as k0 k2 k1 k3.
inline int quantised(kt::ActKind kind, const uint8_t* row, int k) {
  if (kind == kt::ActKind::s8) return static_cast<int8_t>(row[k]);
  const int in_quad = k % 4;
  const int at = k - in_quad + (in_quad == 1 ? 2 : in_quad == 2 ? 1 : in_quad);
  int16_t q;
  std::memcpy(&q, row + 2 * at, 2);
  return q;
}

}  // namespace kt_test
