// SSE2, because this is built for the baseline: 56, 37 and 22 GB/s of rows in 16, 8 and 4 bits on a core (Zen 4), of
// which memory gives 13 GB/s of copies.
#include "formats/unpack.h"

#include <emmintrin.h>

#include <algorithm>

#include "formats/bf16.h"

namespace kt {
namespace {

__m128i load(const uint8_t* from) { return _mm_load_si128(reinterpret_cast<const __m128i*>(from)); }
void store(uint8_t* to, __m128i x) { _mm_store_si128(reinterpret_cast<__m128i*>(to), x); }

// How four lines, which hold 16 bytes of each row, become rows.
struct Pairs {  // bf16, 8 k
  static __m128i line(__m128i x) { return x; }
  static void turn(__m128i a, __m128i b, __m128i c, __m128i d, uint8_t* out, size_t pitch) {
    const __m128i ab01 = _mm_unpacklo_epi32(a, b), ab23 = _mm_unpackhi_epi32(a, b);
    const __m128i cd01 = _mm_unpacklo_epi32(c, d), cd23 = _mm_unpackhi_epi32(c, d);
    store(out, _mm_unpacklo_epi64(ab01, cd01));
    store(out + pitch, _mm_unpackhi_epi64(ab01, cd01));
    store(out + 2 * pitch, _mm_unpacklo_epi64(ab23, cd23));
    store(out + 3 * pitch, _mm_unpackhi_epi64(ab23, cd23));
  }
};

// The low halves of a row's four lanes, then the high ones.
template <class Code>
void turn_halves(__m128i a, __m128i b, __m128i c, __m128i d, uint8_t* out, size_t pitch) {
  const __m128i ac01 = _mm_unpacklo_epi16(a, c), ac23 = _mm_unpackhi_epi16(a, c);
  const __m128i bd01 = _mm_unpacklo_epi16(b, d), bd23 = _mm_unpackhi_epi16(b, d);
  store(out, Code::row(_mm_unpacklo_epi16(ac01, bd01)));
  store(out + pitch, Code::row(_mm_unpackhi_epi16(ac01, bd01)));
  store(out + 2 * pitch, Code::row(_mm_unpacklo_epi16(ac23, bd23)));
  store(out + 3 * pitch, Code::row(_mm_unpackhi_epi16(ac23, bd23)));
}

struct Quads {  // 8 bits, 16 k: a lane is k0 k2 k1 k3, so its halves are the even k and the odd ones
  static __m128i line(__m128i x) { return x; }
  static __m128i row(__m128i halves) { return _mm_unpacklo_epi8(halves, _mm_srli_si128(halves, 8)); }
  static constexpr auto turn = turn_halves<Quads>;
};
struct Nibbles {  // 4 bits, 32 k: the low nibbles of a lane are k0 k2 k1 k3, the high ones those of 16 k further
  // k1 and k3 of the low nibbles change places with k0 and k2 of the high ones: the low half of a lane is then four k
  // of a row, and the high half the four that are 16 further.
  static __m128i line(__m128i x) {
    const __m128i differ = _mm_and_si128(_mm_xor_si128(x, _mm_srli_epi32(x, 12)), _mm_set1_epi32(0x0000f0f0));
    return _mm_xor_si128(x, _mm_xor_si128(differ, _mm_slli_epi32(differ, 12)));
  }
  static __m128i row(__m128i halves) { return halves; }
  static constexpr auto turn = turn_halves<Nibbles>;
};

template <class Code>
void unpack_lines(const uint8_t* lines, size_t line_bytes, uint8_t* out, size_t pitch) {
  for (size_t at = 0; at < line_bytes; at += 4 * kLineBytes, out += 16) {
    for (int n = 0; n < kPanelRows; n += 4) {
      const uint8_t* from = lines + at + 4 * n;
      Code::turn(Code::line(load(from)), Code::line(load(from + kLineBytes)), Code::line(load(from + 2 * kLineBytes)),
                 Code::line(load(from + 3 * kLineBytes)), out + n * pitch, pitch);
    }
  }
}

}  // namespace

void unpack_block(WeightFormat format, const uint8_t* panel, int k, int kb, uint8_t* out, size_t pitch) {
  const size_t depth = static_cast<size_t>(std::min(kUnpackDepth, padded_depth(k) - kb));
  const GroupedKind* kind = grouped_kind(format.id);
  if (!kind) return unpack_lines<Pairs>(panel + Bf16::offset(kb), depth * 32, out, pitch);
  const GroupedLayout layout(*kind, format.group);
  const uint8_t* lines = panel + layout.offset(kb) + layout.head;
  if (grouped_code_bits(kind->codes) == 8) return unpack_lines<Quads>(lines, depth * 16, out, pitch);
  unpack_lines<Nibbles>(lines, depth * 8, out, pitch);
}

}  // namespace kt
