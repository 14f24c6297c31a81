// Compiled once per row of cmake/isa.cmake with that row's flags, as cpp/kernels/instances.cc is; see trait_checks.h. A
// Python test checks that every operation of the traits has a line here.
#include "trait_checks.h"

#include "kernels/isa/row.h"

namespace kt {
namespace {

using kt_test::Compare;
using kt_test::Inputs;
using kt_test::TraitCheck;

constexpr int kBytes = V::kBytes;
constexpr int kInputBytes = 3 * kBytes;

// Operand i of the input.
const float* floats(const uint8_t* in, int i = 0) { return reinterpret_cast<const float*>(in + i * kBytes); }
V::F32 f32(const uint8_t* in, int i) { return V::load_f32(floats(in, i)); }
V::Int ints(const uint8_t* in, int i) { return V::load(in + i * kBytes); }
int32_t word(const uint8_t* in) {
  int32_t i;
  __builtin_memcpy(&i, in, 4);
  return i;
}
void put(uint8_t* out, V::F32 x) { V::store_f32(reinterpret_cast<float*>(out), x); }
void put(uint8_t* out, V::Int x) { V::store(out, x); }
void put(uint8_t* out, float x) { __builtin_memcpy(out, &x, 4); }

// KT_CHECK_OP(name, inputs, compare, out_bytes, expression of `in`), and the forms that store to `out` themselves.
#define KT_RUN_OP(name, inputs, compare, out_bytes, statement) \
  {name, [](const uint8_t* in, uint8_t* out) { statement; }, kInputBytes, out_bytes, Inputs::inputs, Compare::compare}
#define KT_FLOAT_2(op)   KT_RUN_OP(#op, any, f32, kBytes, put(out, V::op(f32(in, 0), f32(in, 1))))
#define KT_INT_2(op)     KT_RUN_OP(#op, any, bits, kBytes, put(out, V::op(ints(in, 0), ints(in, 1))))
#define KT_SHIFT(op, by) KT_RUN_OP(#op "<" #by ">", any, bits, kBytes, put(out, V::template op<by>(ints(in, 0))))

constexpr TraitCheck kVectorChecks[] = {
    KT_RUN_OP("zero_f32", any, bits, kBytes, (void)in; put(out, V::zero_f32())),
    KT_RUN_OP("set1_f32", any, f32, kBytes, put(out, V::set1_f32(floats(in)[0]))),
    KT_RUN_OP("load_f32 store_f32", any, bits, kBytes, put(out, f32(in, 1))),
    KT_RUN_OP("fma", any, f32, kBytes, put(out, V::fma(f32(in, 0), f32(in, 1), f32(in, 2)))),
    KT_FLOAT_2(add),
    KT_FLOAT_2(sub),
    KT_FLOAT_2(mul),
    KT_FLOAT_2(min),
    KT_FLOAT_2(max),
    KT_RUN_OP("abs", any, f32, kBytes, put(out, V::abs(f32(in, 0)))),
    KT_RUN_OP("reduce_max", finite, f32, 4, put(out, V::reduce_max(V::abs(f32(in, 0))))),
    KT_RUN_OP("load store", any, bits, kBytes, put(out, ints(in, 1))),
    KT_RUN_OP("set1_32", any, bits, kBytes, put(out, V::set1_32(word(in)))),
    KT_RUN_OP("broadcast32", any, bits, kBytes, put(out, V::broadcast32(in + 8))),
    KT_INT_2(bit_and),
    KT_INT_2(bit_or),
    KT_SHIFT(shift_left_32, 3),
    KT_SHIFT(shift_left_32, 4),
    KT_SHIFT(shift_left_32, 8),
    KT_SHIFT(shift_left_32, 16),
    KT_SHIFT(shift_left_32, 23),
    KT_SHIFT(shift_right_32, 4),
    KT_SHIFT(shift_right_32, 31),
    KT_SHIFT(shift_right_s32, 4),
    KT_SHIFT(shift_right_16, 4),
    KT_SHIFT(shift_right_16, 8),
    KT_SHIFT(shift_left_32, 20),
    KT_SHIFT(shift_left_16, 8),
    KT_SHIFT(shift_right_s16, 1),
    KT_RUN_OP("table16 look_up", any, bits, kBytes,
              put(out, V::look_up(V::table16(in), V::bit_and(ints(in, 1), V::set1_32(0x0f0f0f0f))))),
    KT_INT_2(add_8),
    KT_INT_2(add_16),
    KT_INT_2(add_32),
    KT_RUN_OP("reduce_add_32", any, bits, 4, const int32_t sum = V::reduce_add_32(ints(in, 0));
              __builtin_memcpy(out, &sum, 4)),
    KT_INT_2(sub_16),
    KT_INT_2(sub_32),
    KT_INT_2(mul_lo_16),
    KT_INT_2(mul_lo_32),
    KT_INT_2(madd_u8s8),
    KT_INT_2(madd_s16),
#if defined(KT_EMULATED) || defined(__AVX512VNNI__)
    KT_RUN_OP("dot_u8s8", any, bits, kBytes, put(out, V::dot_u8s8(ints(in, 0), ints(in, 1), ints(in, 2)))),
#endif
#if defined(KT_EMULATED) || defined(__AVX512BF16__)
    KT_RUN_OP("table128 look_up", any, bits, kBytes, put(out, V::look_up(V::table128(in), ints(in, 2)))),
    KT_INT_2(look_up_words),
    KT_INT_2(sub_sat_u16),
    KT_RUN_OP("look_up_f32", any, bits, kBytes, put(out, V::look_up_f32(f32(in, 0), ints(in, 1)))),
    KT_INT_2(shift_right_lanes),
    KT_RUN_OP("shift_right_lanes below 32", any, bits, kBytes,
              put(out, V::shift_right_lanes(ints(in, 0), V::bit_and(ints(in, 1), V::set1_32(31))))),
    KT_RUN_OP("narrow_bf16", any, bits, kBytes, put(out, V::narrow_bf16(f32(in, 0), f32(in, 1)))),
    KT_RUN_OP("narrow_pairs", any, bits, kBytes, put(out, V::narrow_pairs(f32(in, 0), f32(in, 1)))),
    KT_RUN_OP("dot_bf16", bf16, near, kBytes, put(out, V::dot_bf16(f32(in, 0), ints(in, 1), ints(in, 2)))),
#endif
    KT_RUN_OP("bits_of", any, bits, kBytes, put(out, V::bits_of(f32(in, 0)))),
    KT_RUN_OP("bits_to_f32", any, bits, kBytes, put(out, V::bits_to_f32(ints(in, 0)))),
    KT_RUN_OP("to_f32", any, bits, kBytes, put(out, V::to_f32(ints(in, 0)))),
    KT_RUN_OP("round_to_32", any, bits, kBytes, put(out, V::round_to_32(f32(in, 0)))),
    KT_RUN_OP("load_bf16", any, f32, kBytes, put(out, V::load_bf16(reinterpret_cast<const uint16_t*>(in + 2)))),
    KT_RUN_OP("load_f16", any, f32, kBytes, put(out, V::load_f16(reinterpret_cast<const uint16_t*>(in + 2)))),
    KT_RUN_OP("load_u8", any, bits, kBytes, put(out, V::load_u8(in + 3))),
    KT_RUN_OP("load_s8", any, bits, kBytes, put(out, V::load_s8(in + 3))),
    KT_RUN_OP("f16_low", any, f32, kBytes, put(out, V::f16_low(ints(in, 0)))),
    KT_RUN_OP("f16_high", any, f32, kBytes, put(out, V::f16_high(ints(in, 0)))),
    KT_RUN_OP("broadcast_pair", any, bits, kBytes, put(out, V::broadcast_pair(floats(in) + 1))),
    KT_FLOAT_2(even_lanes),
    KT_FLOAT_2(odd_lanes),
    KT_FLOAT_2(sum_of_pairs),
#if defined(KT_EMULATED) || defined(__AVX512F__)
    KT_RUN_OP("twice_low", any, bits, kBytes, put(out, V::twice_low(f32(in, 0)))),
    KT_RUN_OP("twice_high", any, bits, kBytes, put(out, V::twice_high(f32(in, 0)))),
#endif
    KT_RUN_OP("store_bf16", any, bits, kBytes / 2, V::store_bf16(reinterpret_cast<uint16_t*>(out), f32(in, 0))),
    KT_RUN_OP("store_low_8", any, bits, kBytes / 4, V::store_low_8(out, ints(in, 0))),
    KT_RUN_OP("store_low_16", any, bits, kBytes / 2, V::store_low_16(out, ints(in, 0))),
    KT_RUN_OP("store_low_16_swapped", any, bits, kBytes / 2, V::store_low_16_swapped(out, ints(in, 0))),
};

#if defined(KT_HAS_TILES)
constexpr int kTile = 1024;
constexpr int kWidePitch = 96;

template <int T>
void tile_copy(const uint8_t* in, uint8_t* out) {
  Tiles::begin();
  Tiles::load<T>(in, kWidePitch);
  Tiles::store<T>(out, 64);
  Tiles::end();
}
template <int T>
void tile_zero(const uint8_t* in, uint8_t* out) {
  Tiles::begin();
  Tiles::load<T>(in, 64);
  Tiles::zero<T>();
  Tiles::store<T>(out, 64);
  Tiles::end();
}
template <bool kInt, int C, int A, int B>
void tile_dot(const uint8_t* in, uint8_t* out) {
  Tiles::begin();
  Tiles::load<C>(in, 64);
  Tiles::load_once<A>(in + kTile, 64);
  Tiles::load<B>(in + 2 * kTile, 64);
  if constexpr (kInt) {
    Tiles::dot_s8u8<C, A, B>();
  } else {
    Tiles::dot_bf16<C, A, B>();
  }
  Tiles::store<C>(out, 64);
  Tiles::end();
}

#define KT_TILE(t)                                                                       \
  {"tile load store " #t, tile_copy<t>, 3 * kTile, kTile, Inputs::any, Compare::bits}, { \
    "tile zero " #t, tile_zero<t>, 3 * kTile, kTile, Inputs::any, Compare::bits          \
  }
#define KT_TILE_DOT(c, a, b)                                                                            \
  {"tile dot_s8u8 " #c #a #b, tile_dot<true, c, a, b>, 3 * kTile, kTile, Inputs::any, Compare::bits}, { \
    "tile dot_bf16 " #c #a #b, tile_dot<false, c, a, b>, 3 * kTile, kTile, Inputs::bf16, Compare::near  \
  }
constexpr TraitCheck kTileChecks[] = {
    KT_TILE(0), KT_TILE(1), KT_TILE(2),           KT_TILE(3),           KT_TILE(4),           KT_TILE(5),
    KT_TILE(6), KT_TILE(7), KT_TILE_DOT(0, 4, 6), KT_TILE_DOT(1, 4, 7), KT_TILE_DOT(2, 5, 6), KT_TILE_DOT(3, 5, 7),
};
constexpr int kTileCount = sizeof(kTileChecks) / sizeof(kTileChecks[0]);
#else
constexpr const TraitCheck* kTileChecks = nullptr;
constexpr int kTileCount = 0;
#endif

constexpr kt_test::TraitTable kTables[] = {
    {V::kLanes, kVectorChecks, sizeof(kVectorChecks) / sizeof(kVectorChecks[0])},
    {V::kLanes, kTileChecks, kTileCount},
};

}  // namespace
}  // namespace kt

#define KT_CONCAT(a, b) a##b
#define KT_EXPORT(isa)  KT_CONCAT(kt_trait_checks_, isa)
// Two tables: vectors and tiles.
extern "C" const kt_test::TraitTable* KT_EXPORT(KT_ISA)() { return kt::kTables; }
