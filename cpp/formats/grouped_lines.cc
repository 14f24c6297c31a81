// Files are packed on the x86-64 baseline: SSE2. Names of vectors tell what an element is: q four codes of one row, the
// lane of a line.
#include "formats/grouped_lines.h"

#include <emmintrin.h>

// Arrays of vectors stay in registers only where the loops over them are unrolled, which -O2 does not do by itself.
#if defined(__clang__)
#define KT_UNROLL _Pragma("clang loop unroll(full)")
#else
#define KT_UNROLL _Pragma("GCC unroll 16")
#endif

namespace kt {
namespace {

__m128i load(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
void fetch(const uint8_t* at) { _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T1); }
void fetch_pieces(int count, const uint8_t* from, size_t pitch) {
  for (int i = 0; i < count; ++i) fetch(from + static_cast<size_t>(i) * pitch);
}
void store(uint8_t* to, __m128i x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), x); }

// Lanes of four rows and four lines: q[row] holds lines 0..3, and goes to lines[line] + 4 * row.
void put_square(const __m128i (&q)[4], uint8_t* lines) {
  const __m128i a = _mm_unpacklo_epi32(q[0], q[1]), b = _mm_unpackhi_epi32(q[0], q[1]);
  const __m128i c = _mm_unpacklo_epi32(q[2], q[3]), d = _mm_unpackhi_epi32(q[2], q[3]);
  store(lines, _mm_unpacklo_epi64(a, c));
  store(lines + kLineBytes, _mm_unpackhi_epi64(a, c));
  store(lines + 2 * kLineBytes, _mm_unpacklo_epi64(b, d));
  store(lines + 3 * kLineBytes, _mm_unpackhi_epi64(b, d));
}

// k0 k1 k2 k3 -> k0 k2 k1 k3
__m128i swap_middle(__m128i q) {
  const __m128i differ = _mm_and_si128(_mm_xor_si128(q, _mm_srli_epi32(q, 8)), _mm_set1_epi32(0xff00));
  return _mm_xor_si128(q, _mm_or_si128(differ, _mm_slli_epi32(differ, 8)));
}

bool put_bytes(const uint8_t* from, size_t pitch, size_t ahead, uint8_t* lines) {
  if (ahead) fetch_pieces(kPanelRows, from + ahead, pitch);
  const __m128i sign = _mm_set1_epi8(-128), ones = _mm_set1_epi8(-1);
  __m128i nan = _mm_setzero_si128();
  for (int n = 0; n < kPanelRows; n += 4) {
    for (int k = 0; k < kStepDepth; k += 16) {
      __m128i q[4];
      KT_UNROLL
      for (int i = 0; i < 4; ++i) {
        q[i] = load(from + static_cast<size_t>(n + i) * pitch + k);
        nan = _mm_or_si128(nan, _mm_cmpeq_epi8(_mm_or_si128(q[i], sign), ones));
        q[i] = swap_middle(q[i]);
      }
      put_square(q, lines + k / 4 * kLineBytes + 4 * n);
    }
  }
  return _mm_movemask_epi8(nan) == 0;
}

// Bytes that hold k and k + 1: those of k = 0..15 become low nibbles, those of 16..31 high ones; `even` gets even k.
struct Halves {
  __m128i even, odd;
};
Halves join(__m128i low, __m128i high) {
  const __m128i nibble = _mm_set1_epi8(15);
  return {_mm_or_si128(_mm_and_si128(low, nibble), _mm_slli_epi16(_mm_and_si128(high, nibble), 4)),
          _mm_or_si128(_mm_and_si128(_mm_srli_epi16(low, 4), nibble), _mm_andnot_si128(nibble, high))};
}

void put_nibbles(const uint8_t* from, size_t pitch, size_t ahead, uint8_t* lines) {
  if (ahead) fetch_pieces(kPanelRows, from + ahead, pitch);
  for (int half = 0; half < 2; ++half) {
    for (int n = 0; n < kPanelRows; n += 4) {
      __m128i q[4];
      KT_UNROLL
      for (int i = 0; i < 4; i += 2) {
        const __m128i a = load(from + static_cast<size_t>(n + i) * pitch + 16 * half);
        const __m128i b = load(from + static_cast<size_t>(n + i + 1) * pitch + 16 * half);
        const Halves both = join(_mm_unpacklo_epi64(a, b), _mm_unpackhi_epi64(a, b));
        q[i] = _mm_unpacklo_epi16(both.even, both.odd);
        q[i + 1] = _mm_unpackhi_epi16(both.even, both.odd);
      }
      put_square(q, lines + 4 * half * kLineBytes + 4 * n);
    }
  }
}

// An int32 holds the four bytes that row-major codes have there, so four rows are two lines without turning anything.
void put_gptq(const uint8_t* from, size_t pitch, size_t ahead, uint8_t* lines) {
  if (ahead) fetch_pieces(kStepDepth / 8, from + ahead, pitch);
  const __m128i lower = _mm_set1_epi32(0xffff);
  for (int half = 0; half < 2; ++half) {
    for (int n = 0; n < kPanelRows; n += 4) {
      for (int i = 0; i < 2; ++i) {
        const uint8_t* at = from + static_cast<size_t>(4 * half + i) * pitch + 4 * n;
        const Halves both = join(load(at), load(at + 2 * pitch));
        uint8_t* to = lines + (4 * half + 2 * i) * kLineBytes + 4 * n;
        store(to, _mm_or_si128(_mm_and_si128(both.even, lower), _mm_slli_epi32(both.odd, 16)));
        store(to + kLineBytes, _mm_or_si128(_mm_srli_epi32(both.even, 16), _mm_andnot_si128(lower, both.odd)));
      }
    }
  }
}

__m128i load_two(const uint8_t* first, const uint8_t* second) {
  return _mm_unpacklo_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(first)),
                            _mm_loadl_epi64(reinterpret_cast<const __m128i*>(second)));
}

// Eight bytes hold n in nibbles: 0 2 4 6 1 3 5 7, then the same of 8..15. In this order they stay until lanes are
// whole.
void put_awq(const uint8_t* from, size_t pitch, size_t ahead, uint8_t* lines) {
  if (ahead) fetch_pieces(kStepDepth, from + ahead, pitch);
  for (int line = 0; line < kStepDepth / 8; ++line) {
    const int k = line / 4 * 32 + line % 4 * 4;
    __m128i v[4];
    KT_UNROLL
    for (int i = 0; i < 4; i += 2) {
      const uint8_t* at = from + static_cast<size_t>(k + i) * pitch;
      const Halves both = join(load_two(at, at + pitch), load_two(at + 16 * pitch, at + 17 * pitch));
      v[i] = _mm_unpacklo_epi8(both.even, both.odd);
      v[i + 1] = _mm_unpackhi_epi8(both.even, both.odd);
    }
    const __m128i a = _mm_unpacklo_epi8(v[0], v[2]), b = _mm_unpackhi_epi8(v[0], v[2]);
    const __m128i c = _mm_unpacklo_epi8(v[1], v[3]), d = _mm_unpackhi_epi8(v[1], v[3]);
    uint8_t* to = lines + line * kLineBytes;
    const __m128i q0246 = _mm_unpacklo_epi16(a, c), q1357 = _mm_unpackhi_epi16(a, c);
    store(to, _mm_unpacklo_epi32(q0246, q1357));
    store(to + 16, _mm_unpackhi_epi32(q0246, q1357));
    const __m128i q8ace = _mm_unpacklo_epi16(b, d), q9bdf = _mm_unpackhi_epi16(b, d);
    store(to + 32, _mm_unpacklo_epi32(q8ace, q9bdf));
    store(to + 48, _mm_unpackhi_epi32(q8ace, q9bdf));
  }
}

}  // namespace

bool put_step(Codes codes, CodeOrder order, const uint8_t* from, size_t pitch, size_t ahead, uint8_t* lines) {
  if (codes == Codes::e4m3) return put_bytes(from, pitch, ahead, lines);
  switch (order) {
    case CodeOrder::rows:
      put_nibbles(from, pitch, ahead, lines);
      break;
    case CodeOrder::gptq:
      put_gptq(from, pitch, ahead, lines);
      break;
    case CodeOrder::awq:
      put_awq(from, pitch, ahead, lines);
      break;
  }
  return true;
}

template <class T>
T turn_scales(const uint8_t* from, size_t pitch, T mask, uint8_t* const* out) {
  constexpr bool kBytes = sizeof(T) == 1;
  const __m128i masks = kBytes ? _mm_set1_epi8(static_cast<char>(mask)) : _mm_set1_epi16(static_cast<short>(mask));
  __m128i rows[kPanelRows], largest = _mm_setzero_si128();
  KT_UNROLL
  for (int r = 0; r < kPanelRows; ++r) {
    rows[r] = load(from + static_cast<size_t>(r) * pitch);
    fetch(from + static_cast<size_t>(r + kPanelRows) * pitch);  // of the next panel
    const __m128i magnitude = _mm_and_si128(rows[r], masks);
    largest = kBytes ? _mm_max_epu8(largest, magnitude) : _mm_max_epi16(largest, magnitude);
  }
  // Each round joins element g of rows r and r + 8: after log2(16) rounds all 16 rows of a group lie side by side.
  constexpr int kRounds = kBytes ? 4 : 3;
  if constexpr (kBytes) {
    KT_UNROLL
    for (int round = 0; round < kRounds; ++round) {
      __m128i next[kPanelRows];
      KT_UNROLL
      for (int r = 0; r < 8; ++r) {
        next[2 * r] = _mm_unpacklo_epi8(rows[r], rows[r + 8]);
        next[2 * r + 1] = _mm_unpackhi_epi8(rows[r], rows[r + 8]);
      }
      KT_UNROLL
      for (int r = 0; r < kPanelRows; ++r) rows[r] = next[r];
    }
    KT_UNROLL
    for (int g = 0; g < kPanelRows; ++g) store(out[g], rows[g]);
  } else {
    KT_UNROLL
    for (int half = 0; half < 2; ++half) {
      __m128i* of = rows + 8 * half;
      KT_UNROLL
      for (int round = 0; round < kRounds; ++round) {
        __m128i next[8];
        KT_UNROLL
        for (int r = 0; r < 4; ++r) {
          next[2 * r] = _mm_unpacklo_epi16(of[r], of[r + 4]);
          next[2 * r + 1] = _mm_unpackhi_epi16(of[r], of[r + 4]);
        }
        KT_UNROLL
        for (int r = 0; r < 8; ++r) of[r] = next[r];
      }
      KT_UNROLL
      for (int g = 0; g < 8; ++g) store(out[g] + 16 * half, of[g]);
    }
  }
  T each[16 / sizeof(T)], most = 0;
  store(reinterpret_cast<uint8_t*>(each), largest);
  for (T one : each) most = one > most ? one : most;
  return most;
}
template uint8_t turn_scales(const uint8_t*, size_t, uint8_t, uint8_t* const*);
template uint16_t turn_scales(const uint8_t*, size_t, uint16_t, uint8_t* const*);

}  // namespace kt
