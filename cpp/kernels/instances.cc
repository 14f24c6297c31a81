// Compiled once per row of cmake/isa.cmake with that row's flags; exports kt_isa_<row>() and nothing else. Everything
// it includes lives in unnamed namespaces, so that no code built for one CPU can be linked into another's path.
#include "kernels/kernel.h"

#include <climits>

#include "formats/gguf_raw.h"
#include "kernels/attention-inl.h"
#include "kernels/elementwise-inl.h"
#include "kernels/gemm_tiles-inl.h"
#include "kernels/isa/row.h"
#include "kernels/limits-inl.h"
#include "kernels/operand_bytes-inl.h"
#include "kernels/operand_float-inl.h"
#include "kernels/operand_grouped-inl.h"
#include "kernels/operand_int-inl.h"
#include "kernels/pack-inl.h"

namespace kt {
namespace {

// A CPU with tiles has vdpbf16ps too, slower than its FMAs (Emerald Rapids, 16 threads: 0.6
// to 1.1 TFLOPS against 1.4 to 2.2). Few rows that tiles leave, two builds in turns, 1, 8 and 16 tokens of qwen3-30b:
// bf16 700, 4689, 7938 -> 728, 4583, 7461 us, fp8 332, 2425, 4010 -> 326, 2283, 3644; dsv3, 16 tokens, fp8 21.1 -> 17.5
// ms.
#if defined(KT_ISA_AVX512_BF16) || defined(KT_ISA_EMU_AVX512_BF16)
using FloatCore = Bf16Core<V>;
#define KT_HAS_BF16 1
#else
using FloatCore = F32Core<V>;
#endif
#if defined(KT_HAS_TILES) || defined(KT_HAS_BF16) || defined(KT_ISA_AVX512_VNNI) || defined(KT_ISA_AVX512_VBMI) || \
    defined(KT_ISA_EMU_AVX512_VNNI)
#define KT_HAS_VNNI 1
#endif

#if defined(KT_HAS_VNNI)
using Int8Core = U8S8Core<V>;
using Int4Core = U8S8Core<V>;
using Int4gFewRows = U4S8Core<V, QuadSums<V>>;
constexpr ActKind kInt8Act = ActKind::s8;
#else
using Int8Core = U8S16Core<V>;
using Int4Core = U4S8Core<V>;
using Int4gFewRows = Int4Core;
constexpr ActKind kInt8Act = ActKind::s16;
#endif

// Tiles pay off as soon as a vector tile of rows is exceeded.
template <class Core, class TileCore, class Format, class FewRowsCore = Core>
void gemm(const GemmArgs& g) {
  if (g.m <= FewRowsCore::kRows) return gemm_stream<FewRowsCore, Format>(g);
#if defined(KT_HAS_TILES)
  if (g.m > Core::kRows) return gemm_tiles<V, Tiles, TileCore, Format>(g);
#endif
  gemm_vector<Core, Format>(g);
}

// A few rows read the packed bytes once; more share a decoded copy.
#if defined(KT_HAS_VNNI)
template <int kCode, int kDepth>
using IntSums = ByteQuads<V>;
#else
template <int kCode, int kDepth>
using IntSums = std::conditional_t<BytePairs<V>::holds(kCode, kDepth), BytePairs<V>, WordPairs<V>>;
#endif
#if defined(KT_HAS_BF16)
template <class Format>
using E4m3Core = GroupedBf16Core<V, Format>;
#else
template <class Format>
using E4m3Core = GroupedF32Core<V, Format>;
#endif
template <class Format>
constexpr auto few_rows() {
  if constexpr (kIsFloat<Format>) {
    return F32Core<V>{};
  } else if constexpr (kIsE4m3<Format>) {
    return E4m3Core<Format>{};
  } else {
    using Sums = IntSums<CodeBytes<V, Format::kKind>::kMost, kStepDepth / Format::kHalves>;
    return GroupedIntCore<V, Format, Sums>{};
  }
}
template <class Format>
using FewRows = decltype(few_rows<Format>());

// Rows up to which decoding in registers, a few rows at a time, beats a decoded copy (k = 2048: AVX2 and f32 cross at
// 16 to 24 rows, bf16 at 12 to 15, tiles at 8).
#if defined(KT_HAS_TILES)
constexpr int kRegisterRows = 8;
#elif defined(KT_HAS_BF16)
constexpr int kRegisterRows = 12;
#else
constexpr int kRegisterRows = 16;
#endif

template <class TileCore, class Format>
void gemm_grouped(const GemmArgs& g) {
  using Core = FewRows<Format>;
  if (g.m > kRegisterRows) {
#if defined(KT_HAS_TILES)
    return gemm_tiles<V, Tiles, TileCore, Format>(g);
#else
    return gemm_blocked<FloatCore, Format>(g);
#endif
  }
  gemm_stream<Core, Format>(g);
}

#if defined(KT_HAS_TILES)
using FloatTiles = TileBf16<V, Tiles>;
using IntTiles = TileU8S8<V, Tiles>;
constexpr int kMaxPanels = 32;
#else
using FloatTiles = void;
using IntTiles = void;
constexpr int kMaxPanels = 16;
#endif
constexpr int kMaxRows = 256;
#if defined(KT_HAS_TILES)
constexpr int kSteadyCall = FloatCore::kRows < Int8Core::kRows ? FloatCore::kRows : Int8Core::kRows;
// 16 threads, k = 7168: 9.8 TOPS with a scale per 256, 11.5 per 512, 14.5 per 1024, 17 with none. Activation error with
// outlier channels 2.5, 3.6, 4.9 and 9 %.
constexpr int kManyRowsSpan = kMaxSpan;
#else
constexpr int kSteadyCall = kMaxRows;
constexpr int kManyRowsSpan = kActGroup;
#endif

// Rows that kernels for a few rows make integers of; floats are only widened, which is as cheap as copying.
template <class Format>
constexpr RowGather gather_few() {
  if constexpr (kIsFloat<Format> || kIsE4m3<Format>) return {};
  return row_gather<FewRows<Format>>();
}

template <GroupedKind kKind>
constexpr FormatKernels grouped() {
  using Format = Grouped<kKind>;
  return {ActKind::bf16, gemm_grouped<FloatTiles, Format>, nullptr, nullptr, gather_few<Format>(), {}, kRegisterRows};
}

// Types of GGUF.
template <Format kFormat>
constexpr GroupedKind kKindOf = *grouped_kind(kFormat);
template <Format kFormat>
constexpr bool kIsRaw = kKindOf<kFormat>.codes == Codes::raw;

// Many rows: blocks become bytes, or what pmaddubsw takes of K-quants.
#if defined(KT_HAS_VNNI)
template <Format kFormat>
constexpr bool kSubScales = false;
template <Format kFormat>
using BytesSums = QuadsOfBytes<V>;
#else
template <Format kFormat>
constexpr bool kSubScales = has_super(kKindOf<kFormat>.scales) && kKindOf<kFormat>.codes != Codes::iq4;
// Small codes in pairs, if int16 holds eight quads of them.
template <Format kFormat>
using BytesSums = std::conditional_t<kIsRaw<kFormat> || CodeBytes<V, kKindOf<kFormat>>::kMost * 127 * 16 >= 32768,
                                     PairsOfWords<V>, PairsOfBytes<V, 8>>;
#endif
template <Format kFormat>
constexpr GroupedKind bytes_of() {
  constexpr GroupedKind kKind = kKindOf<kFormat>;
  constexpr bool kSixteen = kIsRaw<kFormat> || kKind.least_group == 16;
  if constexpr (kKind.mins != Mins::none || BytesSums<kFormat>::kSmall) return kSixteen ? kBytes16 : kBytes32;
  return kSixteen ? kSigned16 : kSigned32;
}
template <Format kFormat>
constexpr auto many_rows() {
  if constexpr (kSubScales<kFormat>) {
    return KCore<V, kKindOf<kFormat>>{};
  } else {
    return BytesCore<V, bytes_of<kFormat>(), BytesSums<kFormat>>{};
  }
}
template <Format kFormat>
using ManyRows = decltype(many_rows<kFormat>());

template <Format kFormat>
void expand(const uint8_t* block, int, uint8_t* out) {
  expand_raw(kFormat, block, false, out);
}
template <Format kFormat>
void type_to_bytes(const uint8_t* block, int depth, uint8_t* out) {
  if constexpr (kIsRaw<kFormat>) {
    expand_raw(kFormat, block, true, out);
  } else if constexpr (kSubScales<kFormat>) {
    expand_k<V, kKindOf<kFormat>>(block, depth, out);
  } else {
    expand_block<V, kKindOf<kFormat>, bytes_of<kFormat>()>(block, depth, out);
  }
}
#if defined(KT_HAS_TILES)
template <Format kFormat>
void type_to_bf16(const uint8_t* block, int depth, uint8_t* out) {
  if constexpr (kIsRaw<kFormat>) {
    alignas(64) uint8_t expanded[kExpandedLayout.block_bytes()];
    expand_raw(kFormat, block, false, expanded);
    decode_bf16<V>(Grouped<kExpanded>(kExpanded.least_group), nullptr, expanded, depth, out);
  } else {
    decode_bf16<V>(Grouped<kKindOf<kFormat>>(kKindOf<kFormat>.least_group), nullptr, block, depth, out);
  }
}
#else
template <Format kFormat>
constexpr Expandable::Expand type_to_bf16 = nullptr;
#endif
template <Format kFormat>
constexpr Expandable::Expand expand_of() {
  if constexpr (kIsRaw<kFormat>) return expand<kFormat>;
  return nullptr;
}

// KT_TYPES(X): X(type), in the order of KT_FORMATS.
// clang-format off
#define KT_TYPES(X) \
  X(q4_0) X(q4_1) X(q5_0) X(q5_1) X(q8_0) X(q2_k) X(q3_k) X(q4_k) X(q5_k) X(q6_k) X(iq4_nl) X(iq4_xs) X(tq2_0) \
  X(tq1_0) X(iq1_s) X(iq1_m) X(iq2_xxs) X(iq2_xs) X(iq2_s) X(iq3_xxs) X(iq3_s)
// clang-format on

Expandable expandable(Format format) {
  const GroupedKind& kind = *grouped_kind(format);
  switch (format) {
#define KT_EXPANDABLE(name) \
  case Format::name:        \
    return {                \
        {kind, kind.least_group}, expand_of<Format::name>(), type_to_bytes<Format::name>, type_to_bf16<Format::name>};
    KT_TYPES(KT_EXPANDABLE)
#undef KT_EXPANDABLE
    default:
      return {{kind, kind.least_group}, nullptr, nullptr, nullptr};
  }
}

// Few rows of all but raw blocks are multiplied without expanding first (one core of Zen 4 from cache, GB/s of packed
// bytes, AVX2 and AVX-512: IQ4_XS 14 -> 19 and 17 -> 31, Q2_K 8 -> 12 and 10 -> 16).
template <Format kFormat>
constexpr bool kFused = !kIsRaw<kFormat>;

// Rows up to which types of GGUF do without a copy that rows share. Bytes are cheap to make and to multiply: with 16
// rows AVX2 does Q4_K at 92 GFLOPS in registers and at 205 by way of bytes, AVX-512 at 148 and 240.
constexpr int kTypeRegisterRows = 4;
// And up to which bytes beat tiles, which take blocks as bf16 (qwen3-30b, Q4_K, 16 threads: with 8 rows in registers
// or as bytes, 64 tokens 7.2 and 5.8 ms; with 8 or 24 rows as bytes, 128 tokens 8.8 and 6.9, 256 12.0 and 10.2; with up
// to 32 rows 512 tokens are 5 % slower than with 24).
#if defined(KT_HAS_TILES)
constexpr int kTypeBytesRows = 24;
#else
constexpr int kTypeBytesRows = INT_MAX;
#endif

template <Format kFormat>
using TypeFewRows = Grouped<kFused<kFormat> ? kKindOf<kFormat> : kExpanded, true>;

template <Format kFormat>
void gemm_type(const GemmArgs& g) {
#if defined(KT_HAS_TILES)
  if (g.m > kTypeBytesRows) return gemm_tiles<V, Tiles, FloatTiles, Expandable>(g);
#endif
  if (g.m > kTypeRegisterRows) return gemm_blocked<ManyRows<kFormat>, Expandable>(g);
  using Few = TypeFewRows<kFormat>;
  if constexpr (kFused<kFormat>) {
    gemm_stream<FewRows<Few>, Few>(g);
  } else {
    gemm_stream_expanded<FewRows<Few>>(g);
  }
}

template <Format kFormat>
constexpr FormatKernels type() {
  constexpr RowGather kMany = row_gather<ManyRows<kFormat>>();
  constexpr RowGather kFew = gather_few<TypeFewRows<kFormat>>();
  return {ActKind::bf16, gemm_type<kFormat>, nullptr, nullptr, kFew, kMany, kTypeRegisterRows, kTypeBytesRows};
}

size_t scratch_bytes(int k, int n_panels) {
  size_t bytes = gemm_scratch<FloatCore>(k, n_panels);
  const size_t others[] = {gemm_scratch<Int8Core>(k, n_panels),
                           gemm_scratch<Int4Core>(k, n_panels),
                           gemm_scratch<Int4gFewRows>(k, n_panels),
                           stream_scratch<FewRows<Grouped<kFp8>>>(k, kRegisterRows),
                           stream_scratch<FewRows<Grouped<kNvfp4>>>(k, kRegisterRows),
                           stream_scratch<F32Core<V>>(k, kRegisterRows),
#if defined(KT_HAS_TILES)
                           TileScratch<FloatTiles>::bytes(kMaxRows),
                           TileScratch<IntTiles>::bytes(kMaxRows),
#endif
#define KT_SCRATCH(name) gemm_scratch<ManyRows<Format::name>>(k, n_panels),
                           KT_TYPES(KT_SCRATCH)
#undef KT_SCRATCH
  };
  for (size_t other : others) bytes = other > bytes ? other : bytes;
  return bytes + expanded_scratch<FewRows<Grouped<kExpanded, true>>>();
}

constexpr IsaTable kTable = {
    KT_ISA_NAME,
    {{ActKind::bf16, gemm<FloatCore, FloatTiles, Bf16>, pack_bf16, nullptr},
     {kInt8Act, gemm<Int8Core, IntTiles, Int8>, pack_int8<ScaleChoice::largest>, pack_int8<ScaleChoice::searched>},
     {ActKind::s8, gemm<Int4Core, IntTiles, Int4>, pack_int4<ScaleChoice::largest>, pack_int4<ScaleChoice::searched>},
     {ActKind::s8, gemm<Int4Core, IntTiles, Int4g, Int4gFewRows>, pack_int4g<ScaleChoice::largest>,
      pack_int4g<ScaleChoice::searched>},
     grouped<kFp8>(),
     grouped<kFp8c>(),
     grouped<kMxfp8>(),
     grouped<kMxfp4>(),
     grouped<kNvfp4>(),
     grouped<kRawint4>(),
     grouped<kInt4z>(),
     grouped<kF32>(),
     grouped<kF16>(),
#define KT_TYPE(name) type<Format::name>(),
     KT_TYPES(KT_TYPE)
#undef KT_TYPE
    },
    quantise<V>,
    swiglu<V>,
    accumulate<V>,
    combine<V>,
    store<V>,
    finish<V>,
    sum_of_squares<V>,
    normalise<V>,
    rotate<V>,
    attend<V>,
    scratch_bytes,
    kMaxPanels,
    kMaxRows,
    kSteadyCall,
    kManyRowsSpan,
    kLimitLoops,
};

}  // namespace
}  // namespace kt

#define KT_CONCAT(a, b) a##b
#define KT_EXPORT(isa)  KT_CONCAT(kt_isa_, isa)
extern "C" const kt::IsaTable* KT_EXPORT(KT_ISA)() { return &kt::kTable; }
