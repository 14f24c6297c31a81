#include "moe/act_rows.h"

#include <algorithm>

namespace kt {
namespace {

constexpr size_t align64(size_t bytes) { return (bytes + 63) / 64 * 64; }

// 64 bytes of padding spread the rows over the cache sets.
size_t act_pitch(ActKind kind, int k) { return static_cast<size_t>(padded_depth(k)) * act_bytes(kind) + 64; }

// Depth of one piece: spans are not cut.
constexpr int kPiece = kMaxSpan;

}  // namespace

size_t ActRows::bytes(ActKind kind, int rows, int k) {
  const size_t n = static_cast<size_t>(rows);
  const size_t groups = div_up(k, kActGroup), fine = padded_depth(k) / kSumGroup;
  return n * act_pitch(kind, k) + 2 * align64(4 * n * groups) + align64(4 * n * fine);
}

ActRows ActRows::at(uint8_t* memory, ActKind kind, int rows, int k, int span) {
  const size_t n = static_cast<size_t>(rows);
  ActRows r;
  r.span = span;
  r.pitch = act_pitch(kind, k);
  r.group_pitch = div_up(k, kActGroup);
  r.sum_pitch = padded_depth(k) / kSumGroup;
  r.data = memory;
  uint8_t* at = memory + n * r.pitch;
  r.scales = reinterpret_cast<float*>(at);
  at += align64(4 * n * r.group_pitch);
  r.group_sums = reinterpret_cast<int32_t*>(at);
  at += align64(4 * n * r.group_pitch);
  r.sums = reinterpret_cast<int32_t*>(at);
  return r;
}

void quantise_columns(const IsaTable& isa, ActKind kind, const uint16_t* x, int row, int from, int to,
                      const ActRows& to_rows) {
  const size_t r = static_cast<size_t>(row), group = r * to_rows.group_pitch + from / kActGroup;
  isa.quantise(kind, x + from, to - from, to_rows.span,
               to_rows.data + r * to_rows.pitch + static_cast<size_t>(from) * act_bytes(kind), to_rows.scales + group,
               to_rows.group_sums + group, to_rows.sums + r * to_rows.sum_pitch + from / kSumGroup);
}

void quantise_range(const IsaTable& isa, ActKind kind, const uint16_t* rows, size_t pitch, int begin, int end, int k,
                    const ActRows& to) {
  for (int row = begin; row < end; ++row) quantise_columns(isa, kind, rows + row * pitch, row, 0, k, to);
}

void quantise_rows(const IsaTable& isa, ActKind kind, const Worker& worker, const uint16_t* rows, size_t pitch,
                   int count, int k, const ActRows& to) {
  const int pieces = div_up(k, kPiece);
  const int64_t all = static_cast<int64_t>(count) * pieces;
  for (int64_t i = all * worker.index / worker.node_threads; i < all * (worker.index + 1) / worker.node_threads; ++i) {
    const int row = static_cast<int>(i / pieces), from = static_cast<int>(i % pieces) * kPiece;
    quantise_columns(isa, kind, rows + row * pitch, row, from, std::min(k, from + kPiece), to);
  }
}

}  // namespace kt
