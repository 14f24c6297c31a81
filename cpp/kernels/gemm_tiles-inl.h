// Matrix products by tiles: blocks of 16 rows x 2 panels, two tiles of sums.
//
// Only four of the eight tile registers are ever written, and that is what makes it fast beside a busy hyperthread: the
// two seem to share the registers behind the names, so that with eight in use few are left for what is under way, and
// products wait for each other and for loads. (A register not written since begin() takes none.) A chain of products
// into one tile runs at full speed, so more tiles of sums gain nothing. ns a product, 16 threads, tiles of bf16, panels
// of 24 KB in L1, rows from L2:
//                                        alone  beside a busy hyperthread
//   from registers, eight in use           7.2  17.5
//   from registers, four in use            7.5   7.7
//   2 x 2 tiles of sums, eight in use      7.2  29.0   (all from L2 9.1 and 31.9)
//   2 x 2, one register for panels         7.2  20.6
//   1 x 2, four in use                     7.9  16.7   this one; all from L2 14.3 and 20.6
// Layers of 2048 tokens in turns, beside busy hyperthreads, 2 x 2 and this: qwen3-30b FP8 32.0 -> 24.4 ms, bf16 30.1 ->
// 22.5, RAWINT4 31.4 -> 25.6, int8 17.5 -> 13.9; dsv3 FP8 224 -> 172.
//
// A step (2 products of 16 cycles) takes 3 tile loads, so
//   - depth slab (2 KB of every row): the rows' slab is gathered once into L2, the slab of two panels decoded once;
//   - then two panels, then depth steps, then all rows: the panels of a step (32 KB) stay in L1, and rows are loaded
//     past it (bf16, steps of 64 KB: 7 % slower; of 24 and 16 KB: as fast);
//   - a step of int8 is as long as one activation scale allows, so that c is touched as rarely as possible;
//   - the sums of one block are added to c while the tiles of the next one run (int8), a part after each tile step;
//   - the next two panels are prefetched from memory meanwhile.
#pragma once

#include "kernels/lines-inl.h"
#include "kernels/operand_int-inl.h"

namespace kt {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 1024;
static_assert(kTileRows == kRowUnit);
// Bytes of a row in one depth slab.
constexpr int kSlabBytes = 2048;
// Bytes of two panels in one depth step, at most.
constexpr int kStepBytes = 32 * 1024;
static_assert(kMaxSpan * 2 * kPanelRows <= kStepBytes);

// Rows of one slab as tiles read them: gathered into scratch, tile after tile, or in place when they are consecutive
// already.
struct TileRows {
  const uint8_t* data;
  size_t pitch;  // bytes from row to row in a tile
  size_t step;   // to the next tile of the same rows
  size_t block;  // to the next block of rows
  const float* scales;
  int group_pitch;
};

// One block: rows i.., panels p and p + 1, one depth step.
struct TileBlock {
  const uint8_t* a;
  size_t a_pitch, a_step;
  const uint8_t* b[2];
  // Operands of the block that follows: its first tiles are loaded behind the last products of this one.
  const uint8_t* next_a;
  const uint8_t* next_b[2];
  float* c;
  size_t c_pitch;
  int rows;
  int tile_steps;
  bool first;           // c is written, not added to
  bool last;            // c is complete behind it
  const float* scales;  // of the block's rows in this group, group_pitch apart
  int group_pitch;
  const float* offsets;  // of the block's rows
  const float* row_scales[2];
};

// What to fetch while the tiles work, a piece after each tile step.
struct Prefetch {
  const uint8_t* next;  // weights from memory
  const uint8_t* end;
  size_t second;  // from there to those of a second panel
  int lines_per_step;
  bool rows;  // activations of the next block, which this core has not read in this slab yet

  KT_INLINE void step(int s, const TileBlock& t) {
    for (int i = 0; i < lines_per_step && next < end; ++i, next += kLineBytes) {
      __builtin_prefetch(next, 0, 2);
      __builtin_prefetch(next + second, 0, 2);
    }
    if (!rows) return;
    // A tile step consumes one line of every row.
    for (int r = 0; r < kTileRows; ++r) __builtin_prefetch(t.next_a + r * t.a_pitch + s * kLineBytes, 0, 3);
  }
};

template <class Tiles, bool kInt, int C, int A, int B>
KT_INLINE void tile_dot() {
  if constexpr (kInt) {
    Tiles::template dot_s8u8<C, A, B>();
  } else {
    Tiles::template dot_bf16<C, A, B>();
  }
}

// Tiles 0 and 1: sums; 2: rows; 3: panels.
template <class Tiles>
KT_INLINE void load_operands(const uint8_t* a, size_t a_pitch, const uint8_t* b) {
  Tiles::template load_once<2>(a, a_pitch);
  Tiles::template load<3>(b, kLineBytes);
}

// The sums += rows x N panels. Tiles 2 and 3 hold the first operands already; each is loaded for the next step right
// behind its last use, across the end of the block too. between(step) runs vector work behind each tile step.
template <class Tiles, bool kInt, int N, class Between>
KT_INLINE void tile_product(const TileBlock& block, Between between) {
  const uint8_t *a = block.a, *b0 = block.b[0], *b1 = block.b[1];
  for (int s = 0; s < block.tile_steps; ++s) {
    const bool last = s + 1 == block.tile_steps;
    a = last ? block.next_a : a + block.a_step;
    b0 = last ? block.next_b[0] : b0 + kTileBytes;
    tile_dot<Tiles, kInt, 0, 2, 3>();
    if constexpr (N == 2) {
      Tiles::template load<3>(b1, kLineBytes);
      b1 += kTileBytes;
      tile_dot<Tiles, kInt, 1, 2, 3>();
    }
    load_operands<Tiles>(a, block.a_pitch, b0);
    between(s);
  }
}

// bf16: the f32 accumulator tiles live in c between depth steps.
template <class V, class Tiles>
struct TileBf16 {
  static constexpr bool kInt = false;
  static constexpr int kElementBytes = 2;
  static constexpr int kTileDepth = 32;

  template <int N>
  KT_INLINE void block(const TileBlock& t, Prefetch& prefetch) {
    const size_t pitch = t.c_pitch * 4;
    if (t.first) {
      Tiles::template zero<0>();
      if constexpr (N == 2) Tiles::template zero<1>();
    } else {
      Tiles::template load<0>(t.c, pitch);
      if constexpr (N == 2) Tiles::template load<1>(t.c + kPanelRows, pitch);
    }
    tile_product<Tiles, kInt, N>(t, [&](int s) { prefetch.step(s, t); });
    Tiles::template store<0>(t.c, pitch);
    if constexpr (N == 2) Tiles::template store<1>(t.c + kPanelRows, pitch);
  }
  void finish() {}
};

// u8 x s8: int32 tiles over one span, added to c as float(sum) * activation scale. The offset of the weights and the
// row scales come in once, with the last span: c = (c - 128 * sum_g(scale_g * sum(a_g))) * d.
template <class V, class Tiles>
struct TileU8S8 {
  static constexpr bool kInt = true;
  static constexpr int kElementBytes = 1;
  static constexpr int kTileDepth = 64;
  static constexpr int kVectors = kPanelRows / V::kLanes;
  // int32 does not overflow.
  static_assert(255ll * 127 * kMaxSpan < 1ll << 31);

  // The block whose sums wait to be added to its c.
  TileBlock pending;
  int pending_panels = 0;
  alignas(64) int32_t sums[2][kTileRows * kPanelRows];

  template <int N, bool kFirst, bool kLast>
  KT_INLINE void add_rows(int begin, int end) const {
    typename V::F32 d[N][kVectors];
    if constexpr (kLast) {
      KT_UNROLL
      for (int n = 0; n < N; ++n) {
        KT_UNROLL
        for (int v = 0; v < kVectors; ++v) d[n][v] = V::load_f32(pending.row_scales[n] + v * V::kLanes);
      }
    }
    for (int r = begin; r < end; ++r) {
      const auto scale = V::set1_f32(pending.scales[r * pending.group_pitch]);
      const auto offset = V::set1_f32(kLast ? pending.offsets[r] : 0.0f);
      float* c = pending.c + r * pending.c_pitch;
      KT_UNROLL
      for (int n = 0; n < N; ++n) {
        const int32_t* sum = sums[n] + r * kPanelRows;
        KT_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          float* at = c + n * kPanelRows + v * V::kLanes;
          const auto dot = V::to_f32(V::load(sum + v * V::kLanes));
          auto total = kFirst ? V::mul(dot, scale) : V::fma(dot, scale, V::load_f32(at));
          if constexpr (kLast) total = V::mul(V::sub(total, offset), d[n][v]);
          V::store_f32(at, total);
        }
      }
    }
  }

  template <int N>
  KT_INLINE void add_panels(int begin, int end) const {
    if (pending.first) {
      if (pending.last) return add_rows<N, true, true>(begin, end);
      return add_rows<N, true, false>(begin, end);
    }
    if (pending.last) return add_rows<N, false, true>(begin, end);
    add_rows<N, false, false>(begin, end);
  }

  // One of `parts` equal parts of the pending block.
  KT_INLINE void add_part(int part, int parts) const {
    const int begin = pending.rows * part / parts, end = pending.rows * (part + 1) / parts;
    if (pending_panels == 2) return add_panels<2>(begin, end);
    if (pending_panels == 1) add_panels<1>(begin, end);
  }

  template <int N>
  KT_INLINE void block(const TileBlock& t, Prefetch& prefetch) {
    Tiles::template zero<0>();
    if constexpr (N == 2) Tiles::template zero<1>();
    tile_product<Tiles, kInt, N>(t, [&](int s) {
      prefetch.step(s, t);
      add_part(s, t.tile_steps);
    });
    Tiles::template store<0>(sums[0], kLineBytes);
    if constexpr (N == 2) Tiles::template store<1>(sums[1], kLineBytes);
    pending = t;
    pending_panels = N;
  }

  void finish() {
    add_part(0, 1);
    pending_panels = 0;
  }
};

template <class Core>
struct TileScratch {
  static constexpr int kDepth = kSlabBytes / Core::kElementBytes;
  static constexpr int kGroups = kDepth / kActGroup;
  static constexpr size_t kPanelBytes = static_cast<size_t>(kSlabBytes) * kPanelRows;
  static constexpr size_t kRowBytes = kSlabBytes + 4 * kGroups + 4;
  static constexpr size_t bytes(int m) {
    return 2 * kPanelBytes + static_cast<size_t>(round_up(m, kTileRows)) * kRowBytes;
  }

  uint8_t* panels;
  uint8_t* rows;
  float* scales;
  float* offsets;  // 128 * sum over the whole depth, per row
  TileScratch(uint8_t* base, int m) : panels(base), rows(base + 2 * kPanelBytes) {
    const size_t padded = static_cast<size_t>(round_up(m, kTileRows));
    scales = reinterpret_cast<float*>(rows + padded * kSlabBytes);
    offsets = scales + padded * kGroups;
  }
};

template <class Core>
TileRows tile_rows_of_slab(const GemmArgs& g, const TileScratch<Core>& scratch, int k0, int kc) {
  constexpr int kGroups = TileScratch<Core>::kGroups;
  const size_t at = static_cast<size_t>(k0) * Core::kElementBytes;
  // bf16 rows are as long as k says; quantised ones are padded.
  if (!g.rows && (Core::kInt || g.k == padded_depth(g.k))) {
    const size_t group = static_cast<size_t>(g.first_row) * g.acts.group_pitch + k0 / kActGroup;
    return {g.acts.data + g.first_row * g.acts.pitch + at,
            g.acts.pitch,
            kLineBytes,
            kTileRows * g.acts.pitch,
            g.acts.scales + group,
            g.acts.group_pitch};
  }
  // The rows lie anywhere, so the hardware prefetcher has to be started on the next one. Fetching all of it fills the
  // buffers that the copy needs itself: gate and up of qwen3 in 8.7 to 9.3 ms against 8.2 to 9.0; nothing: 9.4 to 10.0.
  constexpr int kAhead = 4, kLinesAhead = 4;
  constexpr size_t kStep = kTileBytes, kBlock = static_cast<size_t>(kTileRows) * kSlabBytes;
  const int lines = kc * Core::kElementBytes / kLineBytes;
  const int valid = (Core::kInt || g.k - k0 >= kc ? kc : g.k - k0) * Core::kElementBytes;
  for (int i = 0; i < g.m; ++i) {
    if (i + kAhead < g.m) {
      const uint8_t* next = g.acts.data + act_row(g, i + kAhead) * g.acts.pitch + at;
      for (int b = 0; b < kLinesAhead * kLineBytes; b += kLineBytes) __builtin_prefetch(next + b, 0, 2);
    }
    const int row = act_row(g, i);
    const uint8_t* from = g.acts.data + row * g.acts.pitch + at;
    uint8_t* to = scratch.rows + i / kTileRows * kBlock + i % kTileRows * kLineBytes;
    const int whole = valid / kLineBytes;
    for (int line = 0; line < whole; ++line) std::memcpy(to + line * kStep, from + line * kLineBytes, kLineBytes);
    for (int line = whole; line < lines; ++line) {
      std::memset(to + line * kStep, 0, kLineBytes);
      if (line == whole) std::memcpy(to + line * kStep, from + line * kLineBytes, valid % kLineBytes);
    }
    if constexpr (Core::kInt) gather_scales(g.acts, row, k0, kc, scratch.scales + i * kGroups);
  }
  return {scratch.rows, kLineBytes, kStep, kBlock, scratch.scales, kGroups};
}

// What the offset of the weights adds to each row, before the row scales of the weights.
inline void tile_offsets(const GemmArgs& g, float* offsets) {
  const int groups = div_up(g.k, kActGroup);
  for (int i = 0; i < g.m; ++i) {
    const size_t row = static_cast<size_t>(act_row(g, i)) * g.acts.group_pitch;
    float total = 0;
    for (int j = 0; j < groups; ++j)
      total += g.acts.scales[row + j] * static_cast<float>(Int8::kOffset * g.acts.group_sums[row + j]);
    offsets[i] = total;
  }
}

// All rows over one slab of one or two panels.
template <class Tiles, class Core>
KT_INLINE void tile_panels_slab(Core& core, const GemmArgs& g, TileRows rows, int p, int panels,
                                const uint8_t* const (&b)[2], size_t panel_stride, int k0, int kc, const float* offsets,
                                Prefetch prefetch) {
  // bf16 keeps its sums in c between steps.
  const int step = Core::kInt ? g.acts.span : kStepBytes / (2 * kPanelRows * Core::kElementBytes);
  TileBlock t{};
  t.a_pitch = rows.pitch;
  t.a_step = rows.step;
  t.c_pitch = g.c_pitch;
  t.group_pitch = rows.group_pitch;
  for (int j = 0; j < 2; ++j)
    t.row_scales[j] = reinterpret_cast<const float*>(g.panels + (p + (panels == 2 ? j : 0)) * panel_stride);
  const int blocks = div_up(g.m, kTileRows);
  prefetch.lines_per_step =
      div_up(static_cast<int>((prefetch.end - prefetch.next) / kLineBytes), blocks * (kc / Core::kTileDepth));
  const auto place = [&](int block, int k) {
    t.next_a = rows.data + block * rows.block + k / Core::kTileDepth * rows.step;
    for (int j = 0; j < 2; ++j) t.next_b[j] = b[j] + static_cast<size_t>(k) * kPanelRows * Core::kElementBytes;
  };
  place(0, 0);
  load_operands<Tiles>(t.next_a, t.a_pitch, t.next_b[0]);
  for (int k = 0; k < kc; k += step) {
    t.tile_steps = (kc - k < step ? kc - k : step) / Core::kTileDepth;
    t.first = k0 + k == 0;
    for (int block = 0; block < blocks; ++block) {
      const int i0 = block * kTileRows;
      t.a = t.next_a;
      for (int j = 0; j < 2; ++j) t.b[j] = t.next_b[j];
      if (block + 1 < blocks) {
        place(block + 1, k);
      } else {
        place(0, k + step < kc ? k + step : 0);
      }
      t.c = g.c_at(i0, p);
      t.rows = g.m - i0 < kTileRows ? g.m - i0 : kTileRows;
      if constexpr (Core::kInt) {
        t.scales = rows.scales + i0 * rows.group_pitch + k / kActGroup;
        t.offsets = offsets + i0;
        t.last = k0 + k + step >= padded_depth(g.k);
      }
      if (panels == 2) {
        core.template block<2>(t, prefetch);
      } else {
        core.template block<1>(t, prefetch);
      }
    }
  }
}

// c, and activations that are read in place, must have room for m rounded up to kRowUnit rows.
template <class V, class Tiles, class Core, class Format>
void gemm_tiles(const GemmArgs& g) {
  using Scratch = TileScratch<Core>;
  constexpr bool kDecode = Core::kInt ? !kIsInt8<Format> : !std::is_same_v<Format, Bf16>;
  const Format layout = layout_of<Format>(g);
  const int depth = padded_depth(g.k);
  const size_t stride = layout.panel_bytes(g.k);
  const Scratch scratch(g.scratch, g.m);
  if constexpr (Core::kInt) tile_offsets(g, scratch.offsets);
  Core core;
  Tiles::begin();
  for (int k0 = 0; k0 < depth; k0 += Scratch::kDepth) {
    const int kc = depth - k0 < Scratch::kDepth ? depth - k0 : Scratch::kDepth;
    const TileRows rows = tile_rows_of_slab<Core>(g, scratch, k0, kc);
    for (int p = 0; p < g.n_panels; p += 2) {
      const int panels = g.n_panels - p < 2 ? 1 : 2;
      const uint8_t* packed = g.panels + p * stride + layout.offset(k0);
      const uint8_t* b[2] = {packed, packed + (panels - 1) * stride};
      if constexpr (kDecode) {
        for (int j = 0; j < panels; ++j) {
          uint8_t* out = scratch.panels + j * Scratch::kPanelBytes;
          if constexpr (Core::kInt) {
            decode_u8<V, typename LinesOf<V, Format>::U8>(b[j], kc, out);
          } else {
            decode_bf16<V>(layout, g.panels + (p + j) * stride, b[j], kc, out);
          }
          b[j] = out;
        }
        b[1] = b[panels - 1];
      }
      // The slab of the next two panels; behind the last, the next slab of the first two, or what the caller reads
      // next. (Of one panel only: qwen3-30b, T = 2048, bf16 10 % slower, FP8 9, int8 6, other formats 2 to 5.)
      const uint8_t* ahead = packed + 2 * stride;
      if (p + 2 >= g.n_panels) ahead = k0 + kc < depth ? g.panels + layout.offset(k0 + kc) : g.next;
      const size_t slab_bytes = layout.offset(Scratch::kDepth) - layout.offset(0);
      const Prefetch prefetch{ahead, ahead ? ahead + slab_bytes : nullptr, stride, 0,
                              p == 0 && rows.data != scratch.rows};
      tile_panels_slab<Tiles>(core, g, rows, p, panels, b, stride, k0, kc, scratch.offsets, prefetch);
    }
    core.finish();
  }
  Tiles::end();
}

}  // namespace
}  // namespace kt
