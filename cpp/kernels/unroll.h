// Register tiles are arrays indexed by loop counters; they stay in registers only when every such loop is unrolled.
#pragma once

// The emulated sets keep their loops: unrolling scalar arrays costs minutes of compile time and nothing is gained.
#if defined(KT_EMULATED)
#define KT_UNROLL
#elif defined(__clang__)
#define KT_UNROLL _Pragma("clang loop unroll(full)")
#else
#define KT_UNROLL _Pragma("GCC unroll 16")
#endif

// KT_INLINE_BODY is for lambdas: behind the parameters.
#if defined(KT_EMULATED)
#define KT_INLINE inline
#define KT_INLINE_BODY
#else
#define KT_INLINE      inline __attribute__((always_inline))
#define KT_INLINE_BODY __attribute__((always_inline))
#endif

// Makes the compiler forget what it knows about a pointer, so that it reads through it again instead of holding the
// value in a register: with 12 of 16 registers taken by accumulators, holding on means spilling (gcc 12, f32 tile: 66 %
// of the FMA peak with, 93 % without).
template <class T>
KT_INLINE T* fresh(T* p) {
#if !defined(KT_EMULATED)
  asm("" : "+r"(p));
#endif
  return p;
}

namespace kt {
namespace {

template <int I>
struct Index {
  static constexpr int kValue = I;
};

// f(Index<0>{}) .. f(Index<N - 1>{}): for loops whose counter must be a constant.
template <int N, int I = 0, class F>
KT_INLINE void unrolled(const F& f) {
  if constexpr (I < N) {
    f(Index<I>{});
    unrolled<N, I + 1>(f);
  }
}

}  // namespace
}  // namespace kt
