// Every operation of the native traits against its emulated twin, on random and on awkward values.
#include "trait_checks.h"

#include <algorithm>

#include "check.h"
#include "guarded.h"
#include "variants.h"

extern "C" {
#define KT_ISA_ROW(name, emulated, needs) const kt_test::TraitTable* kt_trait_checks_##name();
#include "isa_list.inc"
#undef KT_ISA_ROW
}

using kt_test::Compare;
using kt_test::Inputs;
using kt_test::Random;
using kt_test::TraitCheck;
using kt_test::TraitTable;

namespace {

struct Row {
  const char* name;
  bool emulated;
  const TraitTable* (*tables)();
};
constexpr Row kRows[] = {
#define KT_ISA_ROW(name, emulated, needs) {#name, emulated != 0, kt_trait_checks_##name},
#include "isa_list.inc"
#undef KT_ISA_ROW
};

// Zeros, ones, halves (ties), limits of int8, int16 and int32 as bits and as floats, denormals, infinities, NaN.
constexpr uint32_t kEdges[] = {
    0x00000000, 0x80000000, 0x3f800000, 0xbf800000, 0x3f000000, 0xbf000000, 0x3fc00000, 0x40200000, 0xc0200000,
    0x7fffffff, 0xffffffff, 0x80808080, 0x7f7f7f7f, 0x80008000, 0x7fff7fff, 0xff00ff00, 0x00ff00ff, 0x0f0f0f0f,
    0x4f000000, 0xcf000000, 0x4effffff, 0xcf000001, 0x4b400000, 0x00000001, 0x80000001, 0x007fffff, 0x00800000,
    0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00000, 0x7f800001, 0x3f808000, 0x3f818000,
};

uint16_t mild_bf16(Random& random) {
  const int chance = random.below(2000);
  if (chance < 100) return 0;
  if (chance < 102) return 0x7f80;
  if (chance < 104) return 0x7fc0;
  const uint64_t bits = random.bits();
  return static_cast<uint16_t>((bits & 0x8000) | (bits & 0x10000 ? 0x3f80 : 0x3f00) | (bits & 0x7f));
}

uint32_t input_word(Inputs inputs, Random& random) {
  if (inputs == Inputs::bf16) return static_cast<uint32_t>(mild_bf16(random)) << 16 | mild_bf16(random);
  uint32_t word;
  const int choice = random.below(8);
  if (choice < 3) {
    word = kEdges[random.below(std::size(kEdges))];
  } else if (choice < 6) {
    const float f = random.gaussian() * std::ldexp(1.0f, random.below(40) - 8);
    std::memcpy(&word, &f, 4);
  } else {
    word = static_cast<uint32_t>(random.bits());
  }
  if (inputs == Inputs::finite && (word & 0x7f800000) == 0x7f800000) word &= 0xff7fffff;
  return word;
}

bool equal_f32(uint32_t a, uint32_t b, Compare compare) {
  float x, y;
  std::memcpy(&x, &a, 4);
  std::memcpy(&y, &b, 4);
  if (std::isnan(x) || std::isnan(y)) return std::isnan(x) && std::isnan(y);
  if (a == b) return true;
  // At most 33 terms of size 4: f32 steps of 2^-17.
  return compare == Compare::near && std::fabs(x - y) <= 1e-4f;
}

bool equal(const TraitCheck& check, const uint8_t* a, const uint8_t* b) {
  if (check.compare == Compare::bits) return std::memcmp(a, b, check.out_bytes) == 0;
  for (int i = 0; i < check.out_bytes; i += 4) {
    uint32_t x, y;
    std::memcpy(&x, a + i, 4);
    std::memcpy(&y, b + i, 4);
    if (!equal_f32(x, y, check.compare)) return false;
  }
  return true;
}

const TraitCheck* find(const TraitTable& table, const char* name) {
  for (int i = 0; i < table.count; ++i) {
    if (std::strcmp(table.checks[i].name, name) == 0) return &table.checks[i];
  }
  return nullptr;
}

// The emulated row of this build with as many lanes that has the operation.
const TraitCheck* twin_of(const TraitTable& table, int kind, const char* name) {
  for (const Row& row : kRows) {
    const TraitTable& other = row.tables()[kind];
    if (!row.emulated || other.lanes != table.lanes) continue;
    if (const TraitCheck* check = find(other, name)) return check;
  }
  return nullptr;
}

void compare(const char* isa, const TraitCheck& native, const TraitCheck& twin, Random& random) {
  kt_test::now_running("%s %s", isa, native.name);
  kt_test::Guarded<uint8_t> in(native.in_bytes), out(native.out_bytes), expected(native.out_bytes);
  const int rounds = native.in_bytes > 1024 ? 40 : 2000;
  for (int round = 0; round < rounds; ++round) {
    for (int i = 0; i < native.in_bytes; i += 4) {
      const uint32_t word = input_word(native.inputs, random);
      std::memcpy(in.data() + i, &word, 4);
    }
    std::fill(out.begin(), out.end(), uint8_t{0});
    std::fill(expected.begin(), expected.end(), uint8_t{0});
    native.run(in.data(), out.data());
    twin.run(in.data(), expected.data());
    if (!equal(native, out.data(), expected.data()) || !out.front_intact()) {
      kt_test::fail(__FILE__, __LINE__, std::string(isa) + " " + native.name + " differs from its emulated twin");
      return;
    }
  }
}

bool has_twin_row(const TraitTable& table) {
  return std::any_of(std::begin(kRows), std::end(kRows),
                     [&](const Row& row) { return row.emulated && row.tables()[0].lanes == table.lanes; });
}

}  // namespace

KT_TEST(every_operation_agrees_with_its_emulated_twin) {
  Random random(1);
  for (const auto& v : kt_test::variants().run) {
    if (v.emulated) continue;
    const Row& row =
        *std::find_if(std::begin(kRows), std::end(kRows), [&](const Row& r) { return !std::strcmp(r.name, v.name); });
    for (int kind = 0; kind < 2; ++kind) {
      const TraitTable& table = row.tables()[kind];
      if (!has_twin_row(table)) {
        std::printf("  not compared: %s (this build has no emulated row of %d lanes)\n", v.name, table.lanes);
        break;
      }
      for (int i = 0; i < table.count; ++i) {
        const TraitCheck* twin = twin_of(table, kind, table.checks[i].name);
        if (twin) {
          compare(v.name, table.checks[i], *twin, random);
        } else {
          kt_test::fail(__FILE__, __LINE__, std::string(v.name) + " " + table.checks[i].name + " has no emulated twin");
        }
      }
    }
  }
}

KT_TEST(coverage) {
  for (const auto& v : kt_test::variants().run) {
    for (const Row& row : kRows) {
      if (std::strcmp(row.name, v.name) == 0 && !row.emulated) {
        std::printf("  %s: %d operations\n", v.name, row.tables()[0].count + row.tables()[1].count);
      }
    }
  }
  for (const auto& s : kt_test::variants().skipped) std::printf("  did not run: %s (%s)\n", s.name, s.reason.c_str());
}
