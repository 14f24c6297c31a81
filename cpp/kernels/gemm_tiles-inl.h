// Matrix products by tiles: 32 rows x 2 panels as 2 x 2 accumulator tiles.
//
// Order: depth chunk, pair of panels, rows. The two panels' chunk (16 or 32 KB, decoded there if the format needs it)
// sits in L1 while all rows pass over it; the rows' chunk, gathered once, streams from L2.
#pragma once

#include "kernels/lines-inl.h"
#include "kernels/operand_int-inl.h"

namespace kt {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 1024;

// Rows of activations as tiles read them: gathered into scratch, or in place when they are consecutive already.
struct TileRows {
  const uint8_t* data;
  size_t pitch;
};

template <class Tiles>
struct TilePrefetch {
  const uint8_t* next;
  const uint8_t* end;
  int lines_per_step;
  // Spreads the fetch of the next weights over the steps of this product, so that DRAM works while the tiles do.
  KT_INLINE void step() {
    for (int i = 0; i < lines_per_step && next < end; ++i, next += kLineBytes) __builtin_prefetch(next, 0, 2);
  }
};

// acc tiles 0..3 += A (tiles 4, 5) x B (tiles 6, 7) over `steps` tile depths. M, N: 1 or 2 tiles of rows and panels.
template <class Tiles, bool kInt, int M, int N>
KT_INLINE void tile_product(const uint8_t* a, size_t a_pitch, const uint8_t* b0, const uint8_t* b1, int steps, TilePrefetch<Tiles>& prefetch) {
  for (int s = 0; s < steps; ++s, a += 64, b0 += kTileBytes, b1 += kTileBytes) {
    prefetch.step();
    Tiles::template load<4>(a, a_pitch);
    Tiles::template load<6>(b0, kLineBytes);
    if constexpr (kInt) {
      Tiles::template dot_s8u8<0, 4, 6>();
    } else {
      Tiles::template dot_bf16<0, 4, 6>();
    }
    if constexpr (N == 2) {
      Tiles::template load<7>(b1, kLineBytes);
      if constexpr (kInt) {
        Tiles::template dot_s8u8<1, 4, 7>();
      } else {
        Tiles::template dot_bf16<1, 4, 7>();
      }
    }
    if constexpr (M == 2) {
      Tiles::template load<5>(a + kTileRows * a_pitch, a_pitch);
      if constexpr (kInt) {
        Tiles::template dot_s8u8<2, 5, 6>();
      } else {
        Tiles::template dot_bf16<2, 5, 6>();
      }
      if constexpr (N == 2) {
        if constexpr (kInt) {
          Tiles::template dot_s8u8<3, 5, 7>();
        } else {
          Tiles::template dot_bf16<3, 5, 7>();
        }
      }
    }
  }
}

// bf16: the f32 accumulator tiles live in c between chunks.
template <class V, class Tiles>
struct TileBf16 {
  static constexpr bool kInt = false;
  static constexpr int kChunk = 512;
  static constexpr int kElementBytes = 2;
  static constexpr int kStep = 32;
  using Gather = Bf16Core<V>;

  template <int M, int N>
  static void block(const TileArgs& t, TileRows a, const uint8_t* b0, const uint8_t* b1, const float*, const int32_t*, int, TilePrefetch<Tiles>& prefetch) {
    const size_t pitch = t.c_pitch * 4;
    float* low = t.c + kTileRows * t.c_pitch;
    if (t.first) {
      Tiles::template zero<0>();
      if constexpr (N == 2) Tiles::template zero<1>();
      if constexpr (M == 2) Tiles::template zero<2>();
      if constexpr (M == 2 && N == 2) Tiles::template zero<3>();
    } else {
      Tiles::template load<0>(t.c, pitch);
      if constexpr (N == 2) Tiles::template load<1>(t.c + kPanelRows, pitch);
      if constexpr (M == 2) Tiles::template load<2>(low, pitch);
      if constexpr (M == 2 && N == 2) Tiles::template load<3>(low + kPanelRows, pitch);
    }
    tile_product<Tiles, false, M, N>(a.data, a.pitch, b0, b1, t.kc / kStep, prefetch);
    Tiles::template store<0>(t.c, pitch);
    if constexpr (N == 2) Tiles::template store<1>(t.c + kPanelRows, pitch);
    if constexpr (M == 2) Tiles::template store<2>(low, pitch);
    if constexpr (M == 2 && N == 2) Tiles::template store<3>(low + kPanelRows, pitch);
  }
};

// u8 x s8: int32 tiles per kActGroup, then the same float step as the vector kernels, to the bit.
template <class V, class Tiles>
struct TileU8S8 {
  static constexpr bool kInt = true;
  static constexpr int kChunk = 512;
  static constexpr int kElementBytes = 1;
  static constexpr int kStep = 64;
  static constexpr int kGroups = kChunk / kActGroup;
  using Gather = U8S8Core<V>;

  template <int M, int N>
  static void block(const TileArgs& t, TileRows a, const uint8_t* b0, const uint8_t* b1, const float* scales, const int32_t* inits, int rows,
                    TilePrefetch<Tiles>& prefetch) {
    alignas(64) int32_t sums[M * N][kTileRows * kPanelRows];
    for (int kb = 0, group = 0; kb < t.kc; kb += kActGroup, ++group) {
      const int kc = t.kc - kb < kActGroup ? t.kc - kb : kActGroup;
      Tiles::template zero<0>();
      if constexpr (N == 2) Tiles::template zero<1>();
      if constexpr (M == 2) Tiles::template zero<2>();
      if constexpr (M == 2 && N == 2) Tiles::template zero<3>();
      const size_t offset = static_cast<size_t>(kb) * kPanelRows;
      tile_product<Tiles, true, M, N>(a.data + kb, a.pitch, b0 + offset, b1 + offset, kc / kStep, prefetch);
      Tiles::template store<0>(sums[0], kLineBytes);
      if constexpr (N == 2) Tiles::template store<1>(sums[1], kLineBytes);
      if constexpr (M == 2) Tiles::template store<2>(sums[N], kLineBytes);
      if constexpr (M == 2 && N == 2) Tiles::template store<3>(sums[3], kLineBytes);
      const bool first = t.first && group == 0;
      for (int r = 0; r < rows; ++r) {
        KT_UNROLL
        for (int n = 0; n < N; ++n) {
          const int32_t* sum = sums[r / kTileRows * N + n] + r % kTileRows * kPanelRows;
          KT_UNROLL
          for (int v = 0; v < kPanelRows; v += V::kLanes) {
            float* c = t.c + r * t.c_pitch + n * kPanelRows + v;
            const auto scale = V::mul(V::set1_f32(scales[r * kGroups + group]), V::load_f32(t.scales[n] + v));
            const auto dot = V::to_f32(V::add_32(V::load(sum + v), V::set1_32(inits[r * kGroups + group])));
            V::store_f32(c, V::fma(dot, scale, first ? V::zero_f32() : V::load_f32(c)));
          }
        }
      }
    }
  }
};

template <class Core>
struct TileScratch {
  // 64 bytes of padding spread the rows over the cache sets.
  static constexpr size_t kPitch = static_cast<size_t>(Core::kChunk) * Core::kElementBytes + 64;
  static constexpr size_t kPanelChunk = static_cast<size_t>(Core::kChunk) * kPanelRows * Core::kElementBytes;
  static constexpr int kGroups = Core::kChunk / kActGroup;
  static constexpr size_t bytes(int rows) { return 2 * kPanelChunk + static_cast<size_t>(round_up(rows, 2 * kTileRows)) * (kPitch + 8 * kGroups) + 64; }

  uint8_t* panels;
  uint8_t* rows;
  float* scales;
  int32_t* inits;
  TileScratch(uint8_t* base, int m)
      : panels(base),
        rows(base + 2 * kPanelChunk),
        scales(reinterpret_cast<float*>(rows + static_cast<size_t>(round_up(m, 2 * kTileRows)) * kPitch)),
        inits(reinterpret_cast<int32_t*>(scales + static_cast<size_t>(round_up(m, 2 * kTileRows)) * kGroups)) {}
};

template <class Core, class Tiles>
KT_INLINE void tile_block(int rows, int panels, const TileArgs& t, TileRows a, const uint8_t* b0, const uint8_t* b1, const float* scales,
                          const int32_t* inits, TilePrefetch<Tiles>& prefetch) {
  if (rows > kTileRows) {
    if (panels == 2) return Core::template block<2, 2>(t, a, b0, b1, scales, inits, rows, prefetch);
    return Core::template block<2, 1>(t, a, b0, b1, scales, inits, rows, prefetch);
  }
  if (panels == 2) return Core::template block<1, 2>(t, a, b0, b1, scales, inits, rows, prefetch);
  return Core::template block<1, 1>(t, a, b0, b1, scales, inits, rows, prefetch);
}

// c must have room for m rounded up to 32 rows, and so must activations that are read in place.
template <class V, class Tiles, class Core, class Format>
void gemm_tiles(const GemmArgs& g) {
  using Scratch = TileScratch<Core>;
  constexpr bool kDecode = Core::kInt && !kIsInt8<Format>;
  constexpr int kRows = 2 * kTileRows;
  const int depth = padded_depth(g.k);
  const size_t stride = Format::panel_bytes(g.k);
  const size_t c_pitch = static_cast<size_t>(g.n_panels) * kPanelRows;
  const Scratch scratch(g.scratch, g.m);
  const int row_blocks = div_up(g.m, kRows);
  // bf16 rows are the caller's own: behind k lies the next row, or nothing.
  const bool in_place = !g.rows && (Core::kInt || g.k % kDepthUnit == 0);
  Tiles::begin();
  for (int k0 = 0; k0 < depth; k0 += Core::kChunk) {
    const int kc = depth - k0 < Core::kChunk ? depth - k0 : Core::kChunk;
    TileRows a{scratch.rows, Scratch::kPitch};
    for (int i = 0; i < g.m; ++i) {
      float* scales = scratch.scales + i * Scratch::kGroups;
      int32_t* inits = scratch.inits + i * Scratch::kGroups;
      if (!in_place) {
        Core::Gather::gather(g.acts, act_row(g, i), k0, kc, g.k, scratch.rows + i * Scratch::kPitch, scales, inits);
      } else if constexpr (Core::kInt) {
        gather_scales(g.acts, g.first_row + i, k0, kc, scales);
        gather_inits(g.acts, g.first_row + i, k0, kc, Int8::kOffset, inits);
      }
    }
    if (in_place) a = {g.acts.data + g.first_row * g.acts.pitch + static_cast<size_t>(k0) * Core::kElementBytes, g.acts.pitch};
    for (int p = 0; p < g.n_panels; p += 2) {
      const int panels = g.n_panels - p < 2 ? 1 : 2;
      const uint8_t* packed = g.panels + p * stride;
      const uint8_t* b[2];
      for (int j = 0; j < panels; ++j) {
        b[j] = packed + j * stride + Format::offset(k0);
        if constexpr (kDecode) {
          decode_u8<V, typename LinesOf<V, Format>::U8>(b[j], kc, scratch.panels + j * Scratch::kPanelChunk);
          b[j] = scratch.panels + j * Scratch::kPanelChunk;
        }
      }
      // The chunk two panels on, or of the next depth.
      const uint8_t* ahead = packed + 2 * stride + Format::offset(k0);
      if (p + 2 >= g.n_panels) ahead = k0 + kc < depth ? g.panels + Format::offset(k0 + kc) : g.next;
      const size_t chunk_bytes = Format::offset(Core::kChunk) - Format::offset(0);
      TileArgs t{};
      for (int j = 0; j < 2; ++j) t.scales[j] = reinterpret_cast<const float*>(packed + j * stride);
      t.kc = kc;
      t.c_pitch = c_pitch;
      t.first = k0 == 0;
      TilePrefetch<Tiles> prefetch[2] = {};
      const int steps = row_blocks * (kc / Core::kStep);
      if (ahead) {
        for (int j = 0; j < 2; ++j) {
          const uint8_t* from = ahead + j * stride;
          prefetch[j] = {from, from + chunk_bytes, div_up(static_cast<int>(chunk_bytes / kLineBytes), steps > 1 ? steps / 2 : 1)};
        }
      }
      for (int block = 0; block < row_blocks; ++block) {
        const int i0 = block * kRows;
        t.c = g.c + i0 * c_pitch + static_cast<size_t>(p) * kPanelRows;
        const TileRows rows{a.data + i0 * a.pitch, a.pitch};
        tile_block<Core, Tiles>(g.m - i0 < kRows ? g.m - i0 : kRows, panels, t, rows, b[0], b[panels - 1], scratch.scales + i0 * Scratch::kGroups,
                                scratch.inits + i0 * Scratch::kGroups, prefetch[2 * block < row_blocks ? 0 : 1]);
      }
    }
  }
  Tiles::end();
}

}  // namespace
}  // namespace kt
