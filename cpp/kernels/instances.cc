// Compiled once per row of cmake/isa.cmake with that row's flags; exports kt_isa_<row>() and nothing else. Everything
// it includes lives in unnamed namespaces, so that no code built for one CPU can be linked into another's path.
#include "kernels/kernel.h"

#include "formats/gguf_raw.h"
#include "kernels/elementwise-inl.h"
#include "kernels/gemm_tiles-inl.h"
#include "kernels/isa/row.h"
#include "kernels/limits-inl.h"
#include "kernels/operand_float-inl.h"
#include "kernels/operand_grouped-inl.h"
#include "kernels/operand_int-inl.h"
#include "kernels/pack-inl.h"

namespace kt {
namespace {

#if defined(KT_HAS_TILES) || defined(KT_ISA_AVX512_BF16) || defined(KT_ISA_EMU_AVX512_BF16)
using FloatCore = Bf16Core<V>;
#define KT_HAS_BF16 1
#define KT_HAS_VNNI 1
#else
using FloatCore = F32Core<V>;
#endif
#if defined(KT_ISA_AVX512_VNNI) || defined(KT_ISA_AVX512_VBMI) || defined(KT_ISA_EMU_AVX512_VNNI)
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

// Rows up to which decoding in registers, four rows at a time, beats a decoded copy (k = 2048: AVX2 and f32 cross at 16
// to 24 rows, bf16 at 12 to 15, tiles at 8).
#if defined(KT_HAS_TILES)
constexpr int kRegisterRows = 8;
#elif defined(KT_HAS_BF16)
constexpr int kRegisterRows = 12;
#else
constexpr int kRegisterRows = 16;
#endif

// As few passes over the panels as there are register tiles of rows.
template <class Core>
void in_passes(const GemmArgs& g, void (*stream)(const GemmArgs&)) {
  const int passes = div_up(g.m, Core::kRows);
  for (int pass = 0; pass < passes; ++pass) {
    const int i = g.m * pass / passes;
    GemmArgs part = g;
    part.m = g.m * (pass + 1) / passes - i;
    if (g.rows) part.rows = g.rows + i;
    part.first_row = g.first_row + i;
    part.c = g.c + i * g.c_pitch;
    stream(part);
  }
}

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
  in_passes<Core>(g, gemm_stream<Core, Format>);
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
// 16 threads, k = 7168: 9.8 TOPS with a scale per 256, 11.5 per 512, 14.5 per 1024, 17 with none. Activation error with
// outlier channels 2.5, 3.6, 4.9 and 9 %.
constexpr int kManyRowsSpan = kMaxSpan;
#else
constexpr int kManyRowsSpan = kActGroup;
#endif

template <GroupedKind kKind>
constexpr FormatKernels grouped() {
  return {ActKind::bf16, gemm_grouped<FloatTiles, Grouped<kKind>>, nullptr};
}

// Types of GGUF. The few rows of the most common ones are multiplied without expanding first (one core from cache, of
// packed bytes: FUSED_GAIN).
template <Format kFormat>
void expand(const uint8_t* block, int depth, uint8_t* out) {
  if constexpr (grouped_kind(kFormat)->codes == Codes::raw) {
    expand_raw(kFormat, block, out);
  } else {
    expand_block<V, *grouped_kind(kFormat)>(block, depth, out);
  }
}

Expandable expandable(Format format) {
  const GroupedKind& kind = *grouped_kind(format);
  switch (format) {
#define KT_EXPANDABLE(name) \
  case Format::name:        \
    return {{kind, kind.least_group}, expand<Format::name>};
    KT_EXPANDABLE(q4_0)
    KT_EXPANDABLE(q4_1)
    KT_EXPANDABLE(q5_0)
    KT_EXPANDABLE(q5_1)
    KT_EXPANDABLE(q8_0)
    KT_EXPANDABLE(q2_k)
    KT_EXPANDABLE(q3_k)
    KT_EXPANDABLE(q4_k)
    KT_EXPANDABLE(q5_k)
    KT_EXPANDABLE(q6_k)
    KT_EXPANDABLE(iq4_nl)
    KT_EXPANDABLE(iq4_xs)
    KT_EXPANDABLE(tq2_0)
    KT_EXPANDABLE(tq1_0)
    KT_EXPANDABLE(iq1_s)
    KT_EXPANDABLE(iq1_m)
    KT_EXPANDABLE(iq2_xxs)
    KT_EXPANDABLE(iq2_xs)
    KT_EXPANDABLE(iq2_s)
    KT_EXPANDABLE(iq3_xxs)
    KT_EXPANDABLE(iq3_s)
#undef KT_EXPANDABLE
    default:
      return {{kExpanded, kExpanded.least_group}, nullptr};
  }
}

void gemm_many_expanded(const GemmArgs& g) {
#if defined(KT_HAS_TILES)
  gemm_tiles<V, Tiles, FloatTiles, Expandable>(g);
#else
  gemm_blocked<FloatCore, Expandable>(g);
#endif
}

void gemm_expanded(const GemmArgs& g) {
  using Core = FewRows<Grouped<kExpanded>>;
  if (g.m > kRegisterRows) return gemm_many_expanded(g);
  in_passes<Core>(g, gemm_stream_expanded<Core>);
}

template <GroupedKind kKind>
void gemm_fused(const GemmArgs& g) {
  using Core = FewRows<Grouped<kKind>>;
  if (g.m > kRegisterRows) return gemm_many_expanded(g);
  in_passes<Core>(g, gemm_stream<Core, Grouped<kKind>>);
}

constexpr FormatKernels expanded() { return {ActKind::bf16, gemm_expanded, nullptr}; }
template <GroupedKind kKind>
constexpr FormatKernels fused() {
  return {ActKind::bf16, gemm_fused<kKind>, nullptr};
}

size_t scratch_bytes(int k, int n_panels) {
  size_t bytes = gemm_scratch<FloatCore>(k, n_panels);
  const size_t others[] = {
      gemm_scratch<Int8Core>(k, n_panels),         gemm_scratch<Int4Core>(k, n_panels),
      gemm_scratch<Int4gFewRows>(k, n_panels),     stream_scratch<FewRows<Grouped<kFp8>>>(k),
      stream_scratch<FewRows<Grouped<kNvfp4>>>(k), stream_scratch<F32Core<V>>(k),
#if defined(KT_HAS_TILES)
      TileScratch<FloatTiles>::bytes(kMaxRows),    TileScratch<IntTiles>::bytes(kMaxRows),
#endif
  };
  for (size_t other : others) bytes = other > bytes ? other : bytes;
  return bytes + expanded_scratch<FewRows<Grouped<kExpanded>>>();
}

constexpr IsaTable kTable = {
    KT_ISA_NAME,
    {{ActKind::bf16, gemm<FloatCore, FloatTiles, Bf16>, pack_bf16},
     {kInt8Act, gemm<Int8Core, IntTiles, Int8>, pack_int8},
     {ActKind::s8, gemm<Int4Core, IntTiles, Int4>, pack_int4},
     {ActKind::s8, gemm<Int4Core, IntTiles, Int4g, Int4gFewRows>, pack_int4g},
     grouped<kFp8>(),
     grouped<kFp8c>(),
     grouped<kMxfp8>(),
     grouped<kMxfp4>(),
     grouped<kNvfp4>(),
     grouped<kRawint4>(),
     grouped<kInt4z>(),
     grouped<kF32>(),
     grouped<kF16>(),
     fused<kQ4_0>(),
     expanded(),
     expanded(),
     expanded(),
     fused<kQ8_0>(),
     expanded(),
     expanded(),
     fused<kQ4_K>(),
     fused<kQ5_K>(),
     fused<kQ6_K>(),
     expanded(),
     expanded(),
     expanded(),
     expanded(),
     expanded(),
     expanded(),
     expanded(),
     expanded(),
     expanded(),
     expanded(),
     expanded()},
    quantise<V>,
    swiglu<V>,
    accumulate<V>,
    store<V>,
    scratch_bytes,
    kMaxPanels,
    kMaxRows,
    kManyRowsSpan,
    kLimitLoops,
};

}  // namespace
}  // namespace kt

#define KT_CONCAT(a, b) a##b
#define KT_EXPORT(isa)  KT_CONCAT(kt_isa_, isa)
extern "C" const kt::IsaTable* KT_EXPORT(KT_ISA)() { return &kt::kTable; }
