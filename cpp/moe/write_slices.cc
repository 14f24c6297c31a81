#include "moe/write_slices.h"

#include <emmintrin.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "kernels/unroll.h"
#include "moe/forward.h"
#include "moe/layer.h"

namespace kt {
namespace {

// Of a row in a block; formats with groups of less than 32 have no slices.
constexpr int kMaxScales = GroupedLayout::kBlock / 32;

// [0, size) in equal parts, `block` of which share a scale.
struct Cut {
  int part;
  int block;

  int rank_of(int i) const { return i / part; }
  int begin(int rank) const { return rank * part; }
  int first_block(int rank) const { return begin(rank) / block; }
  int end_block(int rank) const { return (begin(rank) + part - 1) / block + 1; }
  int blocks(int rank) const { return end_block(rank) - first_block(rank); }
};

size_t row_bytes(Format format, int k) { return (static_cast<size_t>(k) * row_bits(format) + 7) / 8; }

// Bytes of a scale in a slice.
size_t slice_scale_bytes(const GroupedKind& kind) {
  if (kind.scales == Scales::none) return 4;
  return kind.codes == Codes::e2m1 ? 2 : scale_bytes(kind.scales);
}

__m128i load(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
void store(uint8_t* to, __m128i x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), x); }

// Whole lines go past the cache: the next reader is a GPU, and a line need not be fetched to be overwritten. One core
// (Zen 4) writes experts of 88 MB in bf16 at 14 GB/s, not at 6; of 44 MB in fp8 at 13, not at 5. The rest of a line
// belongs to another run, maybe of another worker.
void write_run(uint8_t* to, const uint8_t* from, size_t bytes) {
  const size_t head = std::min(bytes, -reinterpret_cast<uintptr_t>(to) % kLineBytes);
  if (head) std::memcpy(to, from, head);
  size_t at = head;
  for (; at + kLineBytes <= bytes; at += kLineBytes) {
    for (size_t i = at; i < at + kLineBytes; i += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), load(from + i));
    }
  }
  if (at < bytes) std::memcpy(to + at, from + at, bytes - at);
}

template <size_t element>
__m128i interleave(bool high, __m128i a, __m128i b) {
  if (element == 1) return high ? _mm_unpackhi_epi8(a, b) : _mm_unpacklo_epi8(a, b);
  return high ? _mm_unpackhi_epi16(a, b) : _mm_unpacklo_epi16(a, b);
}

// Eight rows of 16 bytes, `pitch` apart, to columns; elements of 1 or 2 bytes.
template <size_t element>
void turn(const uint8_t* from, size_t pitch, uint8_t* out) {
  __m128i x[8], y[8];
  KT_UNROLL
  for (int i = 0; i < 8; ++i) x[i] = load(from + i * pitch);
  KT_UNROLL
  for (int i = 0; i < 8; ++i) y[i] = interleave<element>(i % 2, x[i / 2], x[i / 2 + 4]);
  KT_UNROLL
  for (int i = 0; i < 8; ++i) x[i] = interleave<element>(i % 2, y[i / 2], y[i / 2 + 4]);
  KT_UNROLL
  for (int i = 0; i < 8; ++i) store(out + 16 * i, interleave<element>(i % 2, x[i / 2], x[i / 2 + 4]));
}

// 16 of e8m0 to bf16: 2^-127 is the subnormal 0x0040, NaN is 0x7fc0.
void widen(__m128i e8m0, uint8_t* out) {
  const __m128i zero = _mm_setzero_si128();
  const __m128i ends = _mm_or_si128(_mm_cmpeq_epi8(e8m0, zero), _mm_cmpeq_epi8(e8m0, _mm_set1_epi8(-1)));
  const __m128i bit = _mm_and_si128(ends, _mm_set1_epi8(0x40));
  for (int half = 0; half < 2; ++half) {
    const __m128i exponent = half ? _mm_unpackhi_epi8(e8m0, zero) : _mm_unpacklo_epi8(e8m0, zero);
    const __m128i extra = half ? _mm_unpackhi_epi8(bit, zero) : _mm_unpacklo_epi8(bit, zero);
    store(out + 16 * half, _mm_or_si128(_mm_slli_epi16(exponent, 7), extra));
  }
}

// Scales of `count` groups of a block, `step` groups of the panel apart, turned from [group][16] to [16][kMaxScales].
template <class T>
void turn_scales(const uint8_t* head, int first, int step, int count, uint8_t* out) {
  if (sizeof(T) <= 2 && step == 1 && count == kMaxScales) {  // groups of 32: one by one they take half as long as codes
    for (size_t half = 0; half < sizeof(T); ++half)
      turn<sizeof(T)>(head + 16 * half, kPanelRows * sizeof(T), out + 128 * half);
    return;
  }
  for (int j = 0; j < count; ++j) {
    const uint8_t* from = head + static_cast<size_t>(first + j * step) * kPanelRows * sizeof(T);
    for (int n = 0; n < kPanelRows; ++n)
      std::memcpy(out + (n * kMaxScales + j) * sizeof(T), from + n * sizeof(T), sizeof(T));
  }
}

}  // namespace

// One job of the pool: panels of an expert to the buffers of the ranks.
struct SliceWriter {
  struct alignas(64) Counter {
    std::atomic<int> next{0};
  };

  const Layer& layer;
  int expert;
  const SliceBuffers* ranks;
  int rank_count;
  Counter counters[kMaxNodes];

  const LayerConfig& config() const { return layer.config_; }
  const GroupedKind* kind() const { return grouped_kind(config().format()); }
  int part() const { return config().intermediate / rank_count; }
  bool has_group_scales() const { return kind() && kind()->scales != Scales::none; }

  // A block of a panel in L1: codes and scales of 16 rows over 256 k, as the slices have them.
  struct Block {
    alignas(64) uint8_t codes[kUnpackBytes];
    uint8_t scales[kPanelRows * kMaxScales * 4];
    size_t code_pitch, scale_pitch, scale_bytes;
    int first_group, end_group;  // of the matrix; those that begin in this block
    const uint8_t* row(int n) const { return codes + n * code_pitch; }
    const uint8_t* row_scales(int n) const { return scales + n * scale_pitch; }
  };

  // Depth kb.. of a panel that is packed with depth k and begins at column `column` of its matrix.
  void read(const uint8_t* panel, int k, int kb, int column, Block* block) const {
    block->code_pitch = row_bytes(config().format(), kUnpackDepth);
    unpack_block(layer.format(kGate), panel, k, kb, block->codes, block->code_pitch);
    if (!has_group_scales()) return;
    const int group = config().group, begin = column + kb, end = column + std::min(k, kb + kUnpackDepth);
    block->first_group = begin / group + (begin % group != 0);
    block->end_group = (end - 1) / group + 1;
    const int count = block->end_group - block->first_group;
    if (count <= 0) return;
    const GroupedLayout layout(*kind(), layer.panel_groups_[kGate]);
    const uint8_t* head = panel + layout.offset(kb);
    const int first = (block->first_group * group - begin) / layout.group, step = group / layout.group;
    block->scale_bytes = slice_scale_bytes(*kind());
    block->scale_pitch = kMaxScales * block->scale_bytes;
    switch (scale_bytes(kind()->scales)) {
      case 4:
        return turn_scales<uint32_t>(head, first, step, count, block->scales);
      case 2:
        return turn_scales<uint16_t>(head, first, step, count, block->scales);
      default:
        turn_scales<uint8_t>(head, first, step, count, block->scales);
        if (block->scale_bytes == 1) return;
        for (int i = kPanelRows * kMaxScales - 16; i >= 0; i -= 16)
          widen(load(block->scales + i), block->scales + 2 * i);
    }
  }

  // Where a row of gate or up goes. Found once for a panel: for each block the divisions would take as long as codes.
  struct Target {
    uint8_t* weight;
    uint8_t* scale;  // null: an earlier row of its block has brought it
    int rank;
    bool shared;  // the next rank needs the scale too
  };

  Target target(int n, bool is_up) const {
    const ScaleRows& rows = layer.scale_rows_[expert];
    const Cut cut{part(), is_up ? rows.up : rows.gate};
    const int rank = cut.rank_of(n), local = n - cut.begin(rank) + (is_up ? cut.part : 0);
    Target to{ranks[rank].w13_weight + local * row_bytes(config().format(), config().hidden), nullptr, rank, false};
    if (!kind()) return to;
    if (!has_group_scales()) {
      to.scale = ranks[rank].w13_scale + 4 * static_cast<size_t>(local);
    } else if (n % cut.block == 0) {
      to.scale = scale_row(cut, rank, n / cut.block, is_up);
      to.shared = rank + 1 < rank_count && cut.first_block(rank + 1) <= n / cut.block;
    }
    return to;
  }

  // Row `at` of the scales of gate or up, in the slice of a rank; up lies behind gate.
  uint8_t* scale_row(const Cut& cut, int rank, int at, bool is_up) const {
    const int before = is_up ? Cut{cut.part, layer.scale_rows_[expert].gate}.blocks(rank) : 0;
    const size_t row_groups = (config().hidden - 1) / config().group + 1;
    return ranks[rank].w13_scale + (at - cut.first_block(rank) + before) * row_groups * slice_scale_bytes(*kind());
  }

  // Rows row.. of gate or up.
  void write_gate_up(const uint8_t* panel, int row, int rows, bool is_up, Block* block) const {
    const int H = config().hidden;
    Target targets[kPanelRows];
    for (int r = 0; r < rows; ++r) targets[r] = target(row + r, is_up);
    for (int kb = 0; kb < H; kb += kUnpackDepth) {
      read(panel, H, kb, 0, block);
      const size_t at = row_bytes(config().format(), kb);
      const size_t bytes = row_bytes(config().format(), std::min(kUnpackDepth, H - kb));
      for (int r = 0; r < rows; ++r) write_run(targets[r].weight + at, block->row(r), bytes);
      if (!has_group_scales() || block->end_group <= block->first_group) continue;
      for (int r = 0; r < rows; ++r) {
        if (!targets[r].scale) continue;
        write_row_scales(targets[r].scale, *block, r);
        if (targets[r].shared) write_shared(row + r, targets[r].rank + 1, is_up, *block, r);
      }
    }
    if (!kind() || has_group_scales()) return;
    for (int r = 0; r < rows; ++r) std::memcpy(targets[r].scale, panel + 4 * r, 4);
  }

  // Groups first..first+count of row r of a block.
  static void write_scales(uint8_t* to, const Block& block, int r, int first, int count) {
    const uint8_t* from = block.row_scales(r) + (first - block.first_group) * block.scale_bytes;
    const size_t bytes = count * block.scale_bytes;
    if (bytes == 16) {
      std::memcpy(to, from, 16);  // two instructions where the size is known; else a call
    } else if (bytes == 8) {
      std::memcpy(to, from, 8);
    } else {
      std::memcpy(to, from, bytes);
    }
  }

  // All of them, to a row that has those of a whole matrix.
  static void write_row_scales(uint8_t* row, const Block& block, int r) {
    write_scales(row + block.first_group * block.scale_bytes, block, r, block.first_group,
                 block.end_group - block.first_group);
  }

  // Row n is the first of a block that reaches into `rank`, and maybe further.
  void write_shared(int n, int rank, bool is_up, const Block& block, int r) const {
    const ScaleRows& rows = layer.scale_rows_[expert];
    const Cut cut{part(), is_up ? rows.up : rows.gate};
    for (; rank < rank_count && cut.first_block(rank) <= n / cut.block; ++rank)
      write_row_scales(scale_row(cut, rank, n / cut.block, is_up), block, r);
  }

  // Rows row.. of down, of the columns of a shard that begins at `column`.
  void write_down(const uint8_t* panel, int row, int rows, int column, int size, Block* block) const {
    const Format format = config().format();
    const Cut cut{part(), has_group_scales() ? config().group : 1};
    const size_t pitch = row_bytes(format, cut.part);
    for (int kb = 0; kb < size; kb += kUnpackDepth) {
      read(panel, size, kb, column, block);
      const int begin = column + kb, end = column + std::min(size, kb + kUnpackDepth);
      for (int rank = cut.rank_of(begin); rank <= cut.rank_of(end - 1); ++rank) {
        const int first = std::max(begin, cut.begin(rank)), last = std::min(end, cut.begin(rank) + cut.part);
        uint8_t* to = ranks[rank].w2_weight + row * pitch + row_bytes(format, first - cut.begin(rank));
        const size_t at = row_bytes(format, first - begin), bytes = row_bytes(format, last - first);
        for (int r = 0; r < rows; ++r, to += pitch) write_run(to, block->row(r) + at, bytes);
      }
      if (has_group_scales()) write_down_scales(cut, row, rows, *block);
    }
    if (!kind() || has_group_scales() || column) return;
    for (int rank = 0; rank < rank_count; ++rank) std::memcpy(ranks[rank].w2_scale + 4 * row, panel, 4 * rows);
  }

  void write_down_scales(const Cut& cut, int row, int rows, const Block& block) const {
    if (block.end_group <= block.first_group) return;
    const int shared = layer.scale_rows_[expert].down;
    for (int rank = cut.rank_of(block.first_group * cut.block); rank < rank_count; ++rank) {
      const int first = std::max(block.first_group, cut.first_block(rank));
      const int count = std::min(block.end_group, cut.end_block(rank)) - first;
      if (count <= 0) return;
      const int skipped = (shared - row % shared) % shared;
      const size_t pitch = cut.blocks(rank) * block.scale_bytes;
      uint8_t* to =
          ranks[rank].w2_scale + (row + skipped) / shared * pitch + (first - cut.first_block(rank)) * block.scale_bytes;
      for (int r = skipped; r < rows; r += shared, to += pitch) write_scales(to, block, r, first, count);
    }
  }

  void run(const Worker& worker) {
    const Layer::Shard& shard = layer.shards_[worker.node];
    Block block;
    for (int p; (p = counters[worker.node].next.fetch_add(1, std::memory_order_relaxed)) < layer.panel_total(shard);) {
      int index;
      const Matrix matrix = layer.panel_of(shard, p, &index);
      const uint8_t* panel = layer.panel(shard, expert, matrix, index);
      const int row = index * kPanelRows;
      if (matrix == kDown) {
        write_down(panel, row, std::min(kPanelRows, config().hidden - row), shard.begin, shard.size, &block);
      } else {
        write_gate_up(panel, shard.begin + row, std::min(kPanelRows, shard.size - row), matrix == kUp, &block);
      }
    }
    _mm_sfence();  // of the stores past the cache, before the pool tells that this worker has ended
  }
};

Status Layer::check_slices(int expert, int ranks) const {
  if (!gated()) return Status::unsupported("experts without gates cannot be written for a GPU");
  if (!config_.one_format() || !has_slices(config_.format())) {
    std::string formats;
    for (int i = 0; i < kFormatCount; ++i) {
      const auto format = static_cast<Format>(i);
      if (has_slices(format)) formats += std::string(formats.empty() ? "" : ", ") + format_name(format);
    }
    return Status::unsupported(std::string("a layer of ") + format_name(config_.format()) +
                               " has not the bytes of a checkpoint to write; formats that have are " + formats);
  }
  KT_RETURN_IF_ERROR(check_expert(expert));
  const int I = config_.intermediate;
  const int unit = row_bits(config_.format()) == 4 ? 2 : 1;  // columns of a whole byte
  if (ranks >= 1 && I % ranks == 0 && (I / ranks % unit == 0 || ranks == 1)) return Status::ok();
  std::string legal;
  for (int g = 1; g <= 16; ++g) {
    if (I % g == 0 && (I / g % unit == 0 || g == 1)) legal += (g > 1 ? ", " : "") + std::to_string(g);
  }
  return Status::invalid("intermediate_size " + std::to_string(I) + " cannot be cut into " + std::to_string(ranks) +
                         (unit == 1 ? " equal parts" : " equal parts of whole bytes") + "; it can into " + legal);
}

Status Layer::check_scale_rows(int expert) const {
  const GroupedKind* kind = grouped_kind(config_.format());
  const ScaleRows& rows = scale_rows_[expert];
  if (!kind || kind->scales == Scales::none || (rows.gate > 0 && rows.up > 0 && rows.down > 0)) return Status::ok();
  return Status::invalid(
      "how many rows of expert " + std::to_string(expert) +
      " share a scale is not known: its file of packed weights did not tell; load it from its source");
}

Status Layer::scale_rows(int expert, ScaleRows* out) const {
  KT_RETURN_IF_ERROR(check_expert(expert));
  const std::lock_guard lock(workspace_->mutex());
  *out = scale_rows_[expert];
  return Status::ok();
}

Status Layer::set_scale_rows(int expert, const ScaleRows& rows) {
  KT_RETURN_IF_ERROR(check_expert(expert));
  if (rows.gate < 1 || rows.up < 1 || rows.down < 1) return Status::invalid("at least 1 row has a scale");
  const std::lock_guard lock(workspace_->mutex());
  scale_rows_[expert] = rows;
  return Status::ok();
}

Status Layer::slice_bytes(int expert, int ranks, int rank, SliceBytes* out) const {
  KT_RETURN_IF_ERROR(check_slices(expert, ranks));
  const int H = config_.hidden, part = config_.intermediate / ranks;
  const GroupedKind* kind = grouped_kind(config_.format());
  out->w13_weight = 2 * static_cast<size_t>(part) * row_bytes(config_.format(), H);
  out->w2_weight = static_cast<size_t>(H) * row_bytes(config_.format(), part);
  out->w13_scale = out->w2_scale = 0;
  if (!kind) return Status::ok();
  const size_t bytes = slice_scale_bytes(*kind);
  if (kind->scales == Scales::none) {
    out->w13_scale = 2 * part * bytes;
    out->w2_scale = H * bytes;
    return Status::ok();
  }
  const std::lock_guard lock(workspace_->mutex());
  KT_RETURN_IF_ERROR(check_scale_rows(expert));
  const ScaleRows& shared = scale_rows_[expert];
  const int rows = Cut{part, shared.gate}.blocks(rank) + Cut{part, shared.up}.blocks(rank);
  out->w13_scale = static_cast<size_t>(rows) * ((H - 1) / config_.group + 1) * bytes;
  out->w2_scale = static_cast<size_t>((H - 1) / shared.down + 1) * Cut{part, config_.group}.blocks(rank) * bytes;
  return Status::ok();
}

Status Layer::write_slices(int expert, const SliceBuffers* ranks, int rank_count) {
  KT_RETURN_IF_ERROR(check_slices(expert, rank_count));
  KT_RETURN_IF_ERROR(workspace_->pool().usable());
  const std::lock_guard lock(workspace_->mutex());
  if (!(parts_[expert] & kWeights)) {
    return Status::invalid("expert " + std::to_string(expert) + " of this layer has no weights to write; load them");
  }
  KT_RETURN_IF_ERROR(check_scale_rows(expert));
  SliceWriter writer{*this, expert, ranks, rank_count, {}};
  return workspace_->pool().run([](void* w, const Worker& worker) { static_cast<SliceWriter*>(w)->run(worker); },
                                &writer);
}

}  // namespace kt
