// What trait_checks.cc exports per row of cmake/isa.cmake: each operation of the traits as a function on memory, so
// that trait_test.cc, built for the baseline, can run a row and its emulated twin on the same bytes.
#pragma once

#include <cstdint>

namespace kt_test {

enum class Inputs {
  any,     // all bit patterns
  finite,  // as floats
  bf16,    // pairs of bf16 of size 0.5 .. 2, few zeros, infinities and NaN
};

enum class Compare {
  bits,
  f32,   // bits, but one NaN is as good as another
  near,  // sums of bf16 products, whose order and inner rounding are the CPU's
};

struct TraitCheck {
  const char* name;
  void (*run)(const uint8_t* in, uint8_t* out);
  int in_bytes, out_bytes;
  Inputs inputs;
  Compare compare;
};

struct TraitTable {
  int lanes;
  const TraitCheck* checks;
  int count;
};

}  // namespace kt_test
