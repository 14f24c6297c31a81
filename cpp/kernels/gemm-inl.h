// The driver of every vector kernel: gathers activation rows into a small scratch, walks panels and depth, and hands
// register tiles of up to Core::kRows x 16 * Core::kPanels outputs to the core.
//
// A core is one operand kind on one vector trait (operand_*-inl.h):
//   kRows, kPanels   largest register tile
//   kChunk           depth of one pass, a multiple of kActGroup: chunk of A and of a panel fit L1 together
//   kElementBytes    of an activation in the scratch; row pitch is a constant so that one address register serves all
//                    rows
//   kInits           accumulator start values per kChunk
//   kDecodedBytes    of a weight that the blocked path has decoded; 0 where it reads packed lines
//   Decoder          decodes a chunk of a panel for the blocked path, and what lines the register tile then reads
//   gather(...)      copies rows x chunk of activations with their scales and start values
//   tile<R, P>(...)  the register tile
#pragma once

#include <cstring>
#include <type_traits>

#include "kernels/decode-inl.h"
#include "kernels/kernel.h"
#include "kernels/unroll.h"

namespace kt {
namespace {

// One depth chunk of gathered rows.
template <class Core>
struct Chunk {
  static constexpr int kGroups = Core::kChunk / kActGroup;
  // 64 bytes of padding spread the rows over the cache sets.
  static constexpr size_t kPitch = static_cast<size_t>(Core::kChunk) * Core::kElementBytes + 64;
  static constexpr size_t kRowBytes = kPitch + 4 * (kGroups + Core::kInits);
  static constexpr size_t bytes(int rows) { return (rows * kRowBytes + 63) / 64 * 64; }

  uint8_t* base;
  int rows;

  uint8_t* row(int r) const { return base + r * kPitch; }
  float* scales(int r) const { return reinterpret_cast<float*>(base + rows * kPitch) + r * kGroups; }
  int32_t* inits(int r) const {
    return reinterpret_cast<int32_t*>(base + rows * (kPitch + 4 * kGroups)) + r * Core::kInits;
  }
  // Row r becomes the row of a chunk of one.
  KT_INLINE void copy(int r, const Chunk& one) const {
    std::memcpy(row(r), one.row(0), static_cast<size_t>(Core::kChunk) * Core::kElementBytes);
    std::memcpy(scales(r), one.scales(0), 4 * kGroups);
    std::memcpy(inits(r), one.inits(0), 4 * Core::kInits);
  }
};

// RowGather of a core: a row is its chunks one behind the other.
template <class Core>
struct GatheredRow {
  static constexpr size_t kChunkBytes = Chunk<Core>::bytes(1);
  static size_t row_bytes(int k) { return div_up(padded_depth(k), Core::kChunk) * kChunkBytes; }
  static KT_INLINE Chunk<Core> chunk(uint8_t* row, int k0) { return {row + k0 / Core::kChunk * kChunkBytes, 1}; }
  static void gather(const Acts& acts, int row, int k0, int k, uint8_t* gathered_row) {
    static_assert(Core::kChunk == kGatherDepth);
    const int kc = padded_depth(k) - k0 < Core::kChunk ? padded_depth(k) - k0 : Core::kChunk;
    const Chunk<Core> to = chunk(gathered_row, k0);
    Core::gather(acts, row, k0, kc, k, to.row(0), to.scales(0), to.inits(0));
  }
};
template <class Core>
constexpr RowGather row_gather() {
  return {GatheredRow<Core>::row_bytes, GatheredRow<Core>::gather};
}

struct TileArgs {
  const uint8_t* lines;    // first line of the chunk in the first panel
  size_t panel_stride;     // bytes to the next panel's chunk
  const float* scales[2];  // row scales of the panels; unused by float formats
  int kc;
  float* c;
  size_t c_pitch, c_step;
  bool first;  // c is written, not added to
  int group;
};

// The v-th vector of row r, counted over the panels of a tile, of which the first is even if there are several.
template <class V>
KT_INLINE float* c_vector(const TileArgs& t, int r, int v) {
  constexpr int kVectors = kPairColumns / V::kLanes;
  return t.c + v / kVectors * t.c_step + r * t.c_pitch + static_cast<size_t>(v % kVectors) * V::kLanes;
}

// Of a format that is told at run time; defined by the row of instruction sets.
Expandable expandable(Format format);

// Where things lie in the panels of a call.
template <class Format>
KT_INLINE Format layout_of(const GemmArgs& g) {
  if constexpr (std::is_same_v<Format, Expandable>) {
    return expandable(g.format);
  } else if constexpr (std::is_constructible_v<Format, int>) {
    return Format(g.group);
  } else {
    return Format{};
  }
}

constexpr int act_row(const GemmArgs& g, int i) { return g.rows ? g.rows[i] : g.first_row + i; }

// Of row i, if it is gathered.
template <class Core>
KT_INLINE Chunk<Core> gathered_chunk(const GemmArgs& g, int i, int k0) {
  uint8_t* row = const_cast<uint8_t*>(g.gathered) + act_row(g, i) * g.gathered_pitch;
  return GatheredRow<Core>::chunk(row, k0);
}

template <class Core>
KT_INLINE void gather_chunk(const GemmArgs& g, int i0, int rows, int k0, Chunk<Core> chunk) {
  const int kc = padded_depth(g.k) - k0 < Core::kChunk ? padded_depth(g.k) - k0 : Core::kChunk;
  for (int r = 0; r < rows; ++r) {
    if (g.gathered) {
      chunk.copy(r, gathered_chunk<Core>(g, i0 + r, k0));
    } else {
      Core::gather(g.acts, act_row(g, i0 + r), k0, kc, g.k, chunk.row(r), chunk.scales(r), chunk.inits(r));
    }
  }
}

// Of tiles that a core is asked for: fewer are none of its business.
template <class Core>
constexpr int least_rows() {
  if constexpr (requires { Core::kLeastRows; }) return Core::kLeastRows;
  return 1;
}

// Tiles of rows that pass over a panel before the next panel: where decoded panels are longer than rows, they then stay
// in L1.
template <class Core>
constexpr int tiles_together() {
  if constexpr (requires { Core::kTilesTogether; }) return Core::kTilesTogether;
  return 1;
}

template <class Core, class Source, int P>
KT_INLINE void tile_rows(int rows, const TileArgs& t, Chunk<Core> chunk) {
  static_assert(Core::kRows <= 8);
  switch (rows) {
    case 1:
      if constexpr (least_rows<Core>() <= 1) return Core::template tile<Source, 1, P>(t, chunk);
      break;
    case 2:
      if constexpr (least_rows<Core>() <= 2) return Core::template tile<Source, 2, P>(t, chunk);
      break;
    case 3:
      if constexpr (Core::kRows >= 3 && least_rows<Core>() <= 3) return Core::template tile<Source, 3, P>(t, chunk);
      break;
    case 4:
      if constexpr (Core::kRows >= 4) return Core::template tile<Source, 4, P>(t, chunk);
      break;
    case 5:
      if constexpr (Core::kRows >= 5) return Core::template tile<Source, 5, P>(t, chunk);
      break;
    case 6:
      if constexpr (Core::kRows >= 6) return Core::template tile<Source, 6, P>(t, chunk);
      break;
    case 7:
      if constexpr (Core::kRows >= 7) return Core::template tile<Source, 7, P>(t, chunk);
      break;
    default:
      if constexpr (Core::kRows >= 8) return Core::template tile<Source, 8, P>(t, chunk);
  }
}

// Where a panel's chunk starts: in the packed weights, or in the decoded copy.
struct PanelSpan {
  const uint8_t* lines;
  size_t stride;
  const uint8_t* headers;  // row scales, stride apart from panel to panel
  size_t header_stride;
};

template <class Core, class Source>
KT_INLINE void tile_panels(const GemmArgs& g, const PanelSpan& w, int p, int p_end, int i0, int rows, int k0, int kc,
                           Chunk<Core> chunk) {
  for (int step; p < p_end; p += step) {
    const int left = p_end - p;
    step = left >= Core::kPanels ? Core::kPanels : Core::kPanels > 2 && left >= 2 ? 2 : 1;
    TileArgs t;
    t.lines = w.lines + p * w.stride;
    t.panel_stride = w.stride;
    for (int j = 0; j < 2; ++j) t.scales[j] = reinterpret_cast<const float*>(w.headers + (p + j) * w.header_stride);
    t.kc = kc;
    t.c = g.c_at(i0, p);
    t.c_pitch = g.c_pitch;
    t.c_step = g.c_step;
    t.first = k0 == 0;
    t.group = g.group;
    if (step == Core::kPanels) {
      tile_rows<Core, Source, Core::kPanels>(rows, t, chunk);
    } else if (step == 1) {
      tile_rows<Core, Source, 1>(rows, t, chunk);
    } else if constexpr (Core::kPanels > 2) {
      tile_rows<Core, Source, 2>(rows, t, chunk);
    }
  }
}

// Rows of a stream: tiles of up to Core::kRows, gathered one behind the other over the whole depth. A single row that
// is gathered already stays where it is.
template <class Core>
struct StreamRows {
  const GemmArgs& g;
  int tiles = div_up(g.m, Core::kRows);
  int chunks = div_up(padded_depth(g.k), Core::kChunk);
  size_t chunk_bytes = Chunk<Core>::bytes(Core::kRows);

  int first(int tile) const { return g.m * tile / tiles; }
  int count(int tile) const { return first(tile + 1) - first(tile); }
  bool in_place() const { return g.gathered && g.m == 1; }
  Chunk<Core> chunk(int tile, int k0) const {
    if (in_place()) return gathered_chunk<Core>(g, 0, k0);
    return {g.scratch + (static_cast<size_t>(tile) * chunks + k0 / Core::kChunk) * chunk_bytes, count(tile)};
  }
  uint8_t* end() const { return g.scratch + static_cast<size_t>(tiles) * chunks * chunk_bytes; }
  void gather() const {
    if (in_place()) return;
    for (int tile = 0; tile < tiles; ++tile) {
      for (int k0 = 0; k0 < padded_depth(g.k); k0 += Core::kChunk)
        gather_chunk<Core>(g, first(tile), count(tile), k0, chunk(tile, k0));
    }
  }
};
template <class Core>
constexpr size_t stream_scratch(int k, int m) {
  return Chunk<Core>::bytes(Core::kRows) * div_up(padded_depth(k), Core::kChunk) * div_up(m, Core::kRows);
}

// Fetches the beginning of what is read next into L2, a quarter behind each of the last four panels: a stream that has
// just begun is not yet fetched by the CPU itself, and streams of down are short (AVX2, 6 panels of 768, Q4_K: 25.7 ->
// 32.5 GB/s; all behind the last panel 28.5).
class NextStream {
 public:
  NextStream(const uint8_t* next, size_t bytes, int n_panels)
      : next_(next),
        bytes_(!next                ? 0
               : bytes < 4 * kPiece ? bytes
                                    : 4 * kPiece),
        first_(n_panels - 4) {}
  KT_INLINE void behind(int panel) {
    if (panel < first_) return;
    const size_t end = at_ + kPiece < bytes_ ? at_ + kPiece : bytes_;
    for (; at_ < end; at_ += kLineBytes) __builtin_prefetch(next_ + at_, 0, 2);
  }

 private:
  static constexpr size_t kPiece = 2048;
  const uint8_t* next_;
  size_t bytes_, at_ = 0;
  int first_;
};

// A few rows: each panel is read from memory once, front to back; if there are several tiles of rows, those after the
// first find it in L2.
template <class Core, class Format>
void gemm_stream(const GemmArgs& g) {
  const int depth = padded_depth(g.k);
  const StreamRows<Core> rows{g};
  rows.gather();
  const Format layout = layout_of<Format>(g);
  const size_t stride = layout.panel_bytes(g.k);
  NextStream next(g.next, g.n_panels * stride, g.n_panels);
  for (int p = 0; p < g.n_panels; p += Core::kPanels) {
    const int p_end = p + Core::kPanels < g.n_panels ? p + Core::kPanels : g.n_panels;
    for (int i = p; i < p_end; ++i) next.behind(i);
    for (int tile = 0; tile < rows.tiles; ++tile) {
      for (int k0 = 0; k0 < depth; k0 += Core::kChunk) {
        const int kc = depth - k0 < Core::kChunk ? depth - k0 : Core::kChunk;
        const PanelSpan w{g.panels + layout.offset(k0), stride, g.panels, stride};
        tile_panels<Core, typename Core::template Lines<Format>>(g, w, p, p_end, rows.first(tile), rows.count(tile), k0,
                                                                 kc, rows.chunk(tile, k0));
      }
    }
  }
}

// The same for blocks that are expanded first: a chunk of the panels at hand, behind the rows in the scratch.
template <class Core>
void gemm_stream_expanded(const GemmArgs& g) {
  const int depth = padded_depth(g.k);
  const StreamRows<Core> rows{g};
  rows.gather();
  uint8_t* expanded = rows.end();
  const Expandable layout = layout_of<Expandable>(g);
  const size_t packed = layout.panel_bytes(g.k), stride = kExpandedLayout.panel_bytes(Core::kChunk);
  GemmArgs part = g;
  part.group = kExpanded.least_group;
  for (int p = 0; p < g.n_panels; p += Core::kPanels) {
    const int panels = g.n_panels - p < Core::kPanels ? g.n_panels - p : Core::kPanels;
    part.c = g.c_at(0, p);
    for (int k0 = 0; k0 < depth; k0 += Core::kChunk) {
      const int kc = depth - k0 < Core::kChunk ? depth - k0 : Core::kChunk;
      for (int j = 0; j < panels; ++j) {
        uint8_t* to = expanded + j * stride;
        const uint8_t* blocks = g.panels + (p + j) * packed + layout.offset(k0);
        for (int k = 0; k < kc; k += GroupedLayout::kBlock, blocks += layout.block_bytes()) {
          layout.expand(blocks, kc - k < GroupedLayout::kBlock ? kc - k : GroupedLayout::kBlock, to);
          to += kExpandedLayout.block_bytes();
        }
      }
      for (int tile = 0; tile < rows.tiles; ++tile) {
        tile_panels<Core, void>(part, {expanded, stride, expanded, stride}, 0, panels, rows.first(tile),
                                rows.count(tile), k0, kc, rows.chunk(tile, k0));
      }
    }
  }
}
template <class Core>
constexpr size_t expanded_scratch() {
  return Core::kPanels * kExpandedLayout.panel_bytes(Core::kChunk);
}

// Fetches the next chunk of every panel into L2, a few lines behind each register tile: without it the first rows of a
// chunk wait for memory and the rest leave it idle (avx2, 32 rows an expert: bf16 70 -> 77 % of the FMA peak, int8 99
// -> 113 %).
class ChunkPrefetch {
 public:
  ChunkPrefetch(const uint8_t* lines, size_t stride, size_t bytes, int n_panels, int steps)
      : panel_(lines), stride_(stride), bytes_(bytes), panels_left_(lines ? n_panels : 0) {
    lines_per_step_ = div_up(static_cast<int>(bytes / kLineBytes) * n_panels, steps);
  }
  KT_INLINE void step() {
    for (int i = 0; i < lines_per_step_ && panels_left_ > 0; ++i) {
      __builtin_prefetch(panel_ + at_, 0, 2);
      at_ += kLineBytes;
      if (at_ >= bytes_) {
        at_ = 0;
        panel_ += stride_;
        --panels_left_;
      }
    }
  }

 private:
  const uint8_t* panel_;
  size_t stride_, bytes_, at_ = 0;
  int panels_left_, lines_per_step_;
};

// Fetches gathered rows of the next tiles into L2, a few lines behind each register tile: pieces of a row are too short
// for the CPU to do so by itself.
template <class Core>
class RowPrefetch {
 public:
  // Rows [first, end) of the chunk at k0, behind `steps` tiles.
  RowPrefetch(const GemmArgs& g, int first, int end, int k0, int steps)
      : g_(g), k0_(k0), row_(first), end_(g.gathered ? end : first) {
    lines_per_step_ = div_up((end - first) * kLines, steps);
  }
  KT_INLINE void step() {
    for (int i = 0; i < lines_per_step_ && row_ < end_; ++i) {
      __builtin_prefetch(gathered_chunk<Core>(g_, row_, k0_).base + line_ * kLineBytes, 0, 2);
      if (++line_ == kLines) {
        line_ = 0;
        ++row_;
      }
    }
  }

 private:
  static constexpr int kLines = static_cast<int>(Chunk<Core>::bytes(1) / kLineBytes);
  const GemmArgs& g_;
  int k0_, row_, end_, line_ = 0, lines_per_step_;
};

// m > kRows: depth outermost, so that the chunk of all panels stays in L2 while the rows pass over it.
template <class Core, class Format>
void gemm_blocked(const GemmArgs& g) {
  const int depth = padded_depth(g.k);
  const Format layout = layout_of<Format>(g);
  const size_t packed_stride = layout.panel_bytes(g.k);
  const int tiles = div_up(g.m, Core::kRows);
  using Decoder = typename Core::template Decoder<Format>;
  constexpr int kTogether = tiles_together<Core>();
  uint8_t* decoded = g.scratch + kTogether * Chunk<Core>::bytes(Core::kRows);
  for (int k0 = 0; k0 < depth; k0 += Core::kChunk) {
    const int kc = depth - k0 < Core::kChunk ? depth - k0 : Core::kChunk;
    PanelSpan w{g.panels + layout.offset(k0), packed_stride, g.panels, packed_stride};
    const uint8_t* ahead = k0 + kc < depth ? g.panels + layout.offset(k0 + kc) : g.next;
    const int next_kc = depth - k0 - kc < Core::kChunk && k0 + kc < depth ? depth - k0 - kc : Core::kChunk;
    ChunkPrefetch prefetch(ahead, packed_stride, layout.offset(next_kc) - layout.offset(0), g.n_panels,
                           tiles * g.n_panels);
    if constexpr (Decoder::kNeeded) {
      const size_t stride = static_cast<size_t>(Core::kChunk) * kPanelRows * Core::kDecodedBytes;
      for (int p = 0; p < g.n_panels; ++p) {
        const size_t at = p * packed_stride;
        Decoder::decode(layout, g.panels + at, w.lines + at, kc, decoded + p * stride);
      }
      w.lines = decoded;
      w.stride = stride;
    }
    // Even tiles: 7 rows are 4 + 3, not 6 + 1.
    const auto first_row = [&](int tile) { return static_cast<int>(static_cast<int64_t>(g.m) * tile / tiles); };
    for (int from = 0; from < tiles; from += kTogether) {
      const int to = from + kTogether < tiles ? from + kTogether : tiles;
      const auto rows_of = [&](int tile) {
        return Chunk<Core>{g.scratch + (tile - from) * Chunk<Core>::bytes(Core::kRows),
                           first_row(tile + 1) - first_row(tile)};
      };
      for (int tile = from; tile < to; ++tile)
        gather_chunk<Core>(g, first_row(tile), rows_of(tile).rows, k0, rows_of(tile));
      const int after = to + kTogether < tiles ? to + kTogether : tiles;
      RowPrefetch<Core> next_rows(g, first_row(to), first_row(after), k0,
                                  (to - from) * div_up(g.n_panels, Core::kPanels));
      for (int p = 0; p < g.n_panels; p += Core::kPanels) {
        const int p_end = p + Core::kPanels < g.n_panels ? p + Core::kPanels : g.n_panels;
        for (int tile = from; tile < to; ++tile) {
          for (int j = 0; j < Core::kPanels; ++j) prefetch.step();
          next_rows.step();
          tile_panels<Core, typename Decoder::Lines>(g, w, p, p_end, first_row(tile), rows_of(tile).rows, k0, kc,
                                                     rows_of(tile));
        }
      }
    }
  }
}

template <class Core, class Format>
void gemm_vector(const GemmArgs& g) {
  if (g.m <= Core::kRows) {
    gemm_stream<Core, Format>(g);
  } else {
    gemm_blocked<Core, Format>(g);
  }
}

template <class Core>
constexpr size_t gemm_scratch(int k, int n_panels) {
  const size_t stream = stream_scratch<Core>(k, Core::kRows);
  const size_t blocked = tiles_together<Core>() * Chunk<Core>::bytes(Core::kRows) +
                         static_cast<size_t>(n_panels) * Core::kChunk * kPanelRows * Core::kDecodedBytes;
  return stream > blocked ? stream : blocked;
}

}  // namespace
}  // namespace kt
