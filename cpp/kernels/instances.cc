// Compiled once per row of cmake/isa.cmake with that row's flags; exports kt_isa_<row>() and nothing else. Everything
// it includes lives in unnamed namespaces, so that no code built for one CPU can be linked into another's path.
#include "kernels/kernel.h"

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
template <class Core, class TileCore, class Format, class FewRows = Core>
void gemm(const GemmArgs& g) {
  if (g.m <= FewRows::kRows) return gemm_stream<FewRows, Format>(g);
#if defined(KT_HAS_TILES)
  if (g.m > Core::kRows) return gemm_tiles<V, Tiles, TileCore, Format>(g);
#endif
  gemm_vector<Core, Format>(g);
}

// A few rows read the packed bytes once; more share a decoded copy.
#if defined(KT_HAS_VNNI)
using ByteSums = ByteQuads<V>;
#else
using ByteSums = BytePairs<V>;
#endif
template <class Format>
constexpr bool kIsE4m3 = Format::kKind.codes == Codes::e4m3;
template <class Format, bool = kIsE4m3<Format>>
struct FewRowsOf {
  using Core = GroupedIntCore<V, Format, ByteSums>;
};
template <class Format>
struct FewRowsOf<Format, true> {
#if defined(KT_HAS_BF16)
  using Core = GroupedBf16Core<V, Format>;
#else
  using Core = GroupedF32Core<V, Format>;
#endif
};

// Rows up to which decoding in registers, four rows at a time, beats a decoded copy (k = 2048: AVX2 and f32 cross at 16
// to 24 rows, bf16 at 12 to 15, tiles at 8).
#if defined(KT_HAS_TILES)
constexpr int kRegisterRows = 8;
#elif defined(KT_HAS_BF16)
constexpr int kRegisterRows = 12;
#else
constexpr int kRegisterRows = 16;
#endif

template <class TileCore, class Format>
void gemm_grouped(const GemmArgs& g) {
  using FewRows = typename FewRowsOf<Format>::Core;
  if (g.m > kRegisterRows) {
#if defined(KT_HAS_TILES)
    return gemm_tiles<V, Tiles, TileCore, Format>(g);
#else
    return gemm_blocked<FloatCore, Format>(g);
#endif
  }
  const int passes = div_up(g.m, FewRows::kRows);
  for (int pass = 0; pass < passes; ++pass) {
    const int i = g.m * pass / passes;
    GemmArgs part = g;
    part.m = g.m * (pass + 1) / passes - i;
    if (g.rows) part.rows = g.rows + i;
    part.first_row = g.first_row + i;
    part.c = g.c + static_cast<size_t>(i) * g.n_panels * kPanelRows;
    gemm_stream<FewRows, Format>(part);
  }
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
constexpr FormatKernels checkpoint_format() {
  return {ActKind::bf16, gemm_grouped<FloatTiles, Grouped<kKind>>, nullptr, nullptr};
}

size_t scratch_bytes(int k, int n_panels) {
  size_t bytes = gemm_scratch<FloatCore>(k, n_panels);
  const size_t others[] = {
      gemm_scratch<Int8Core>(k, n_panels),
      gemm_scratch<Int4Core>(k, n_panels),
      gemm_scratch<Int4gFewRows>(k, n_panels),
      gemm_scratch<typename FewRowsOf<Grouped<kFp8>>::Core>(k, n_panels),
      gemm_scratch<typename FewRowsOf<Grouped<kNvfp4>>::Core>(k, n_panels),
#if defined(KT_HAS_TILES)
      TileScratch<FloatTiles>::bytes(kMaxRows),
      TileScratch<IntTiles>::bytes(kMaxRows),
#endif
  };
  for (size_t other : others) bytes = other > bytes ? other : bytes;
  return bytes;
}

constexpr IsaTable kTable = {
    KT_ISA_NAME,
    {{ActKind::bf16, gemm<FloatCore, FloatTiles, Bf16>, pack_bf16, nullptr},
     {kInt8Act, gemm<Int8Core, IntTiles, Int8>, pack_int8<Scales::largest>, pack_int8<Scales::searched>},
     {ActKind::s8, gemm<Int4Core, IntTiles, Int4>, pack_int4<Scales::largest>, pack_int4<Scales::searched>},
     {ActKind::s8, gemm<Int4Core, IntTiles, Int4g, Int4gFewRows>, pack_int4g<Scales::largest>,
      pack_int4g<Scales::searched>},
     checkpoint_format<kFp8>(),
     checkpoint_format<kFp8c>(),
     checkpoint_format<kMxfp8>(),
     checkpoint_format<kMxfp4>(),
     checkpoint_format<kNvfp4>(),
     checkpoint_format<kRawint4>(),
     checkpoint_format<kInt4z>()},
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
