#include "moe/grouped_expert.h"

#include <algorithm>
#include <cstring>

namespace kt {
namespace {

// A part of a matrix that becomes a panel.
struct Source {
  const GroupedMatrix& matrix;
  int group, row, rows, k0, k1;

  // Where the codes of the step at depth k, counted from k0, begin.
  const uint8_t* step(Codes codes, int k) const {
    const size_t n = static_cast<size_t>(row), at = static_cast<size_t>(k0 + k), pitch = matrix.code_pitch;
    switch (matrix.order) {
      case CodeOrder::rows:
        return matrix.codes + n * pitch + at * grouped_code_bits(codes) / 8;
      case CodeOrder::gptq:
        return matrix.codes + at / 8 * pitch + 4 * n;
      case CodeOrder::awq:
        return matrix.codes + at * pitch + n / 2;
    }
    return nullptr;
  }
};

uint8_t two_codes_of_zero(Codes codes) { return codes == Codes::u4 ? 0x88 : 0; }

// A step that the matrix has only `depth` columns of, or fewer than 16 rows: what is missing has weights of 0.
void copy_step(Codes codes, const Source& source, int k, int depth, uint8_t* to) {
  const StepPieces pieces = step_pieces(codes, source.matrix.order);
  const bool by_row = source.matrix.order == CodeOrder::rows, gptq = source.matrix.order == CodeOrder::gptq;
  const int bits = grouped_code_bits(codes);
  const int count = by_row ? source.rows : gptq ? div_up(depth, 8) : depth;
  const int bytes = by_row ? div_up(depth * bits, 8) : gptq ? 4 * source.rows : 4 * div_up(source.rows, 8);
  std::memset(to, two_codes_of_zero(codes), kLargestStep);
  for (int i = 0; i < count; ++i)
    std::memcpy(to + i * pieces.bytes, source.step(codes, k) + i * source.matrix.code_pitch, bytes);
  const auto clear = [to](size_t nibble) {
    uint8_t& pair = to[nibble / 2];
    pair = nibble % 2 ? (pair & 15) | 0x80 : (pair & 0xf0) | 8;
  };
  if (bits == 4 && by_row && depth % 2) {
    uint8_t* last = to + depth / 2;
    for (int r = 0; r < count; ++r, last += pieces.bytes) *last = (*last & 15) | (two_codes_of_zero(codes) & 0xf0);
  }
  if (gptq && depth % 8) {
    for (int n = 0; n < source.rows; ++n) {
      for (int k_last = depth % 8; k_last < 8; ++k_last)
        clear(static_cast<size_t>(2 * (count - 1) * pieces.bytes + 8 * n + k_last));
    }
  }
  if (!by_row && !gptq && source.rows % 8) {
    constexpr int kPlace[] = {0, 4, 1, 5, 2, 6, 3, 7};  // the nibble of n % 8
    for (int i = 0; i < count; ++i) {
      for (int n = source.rows; n % 8; ++n)
        clear(static_cast<size_t>(2 * i * pieces.bytes + n / 8 * 8 + kPlace[n % 8]));
    }
  }
}

// How many bytes away the pieces are that come next, of the next panel or of the next block. 0 where a line that holds
// several steps or panels was fetched for the first of them.
size_t bytes_ahead(const GroupedKind& kind, const Source& source, int k) {
  const size_t pitch = source.matrix.code_pitch;
  switch (source.matrix.order) {
    case CodeOrder::rows:
      return k % (8 * kLineBytes / grouped_code_bits(kind.codes)) ? 0 : kPanelRows * pitch;
    case CodeOrder::gptq:
      return GroupedLayout::kBlock / 8 * pitch;
    case CodeOrder::awq:
      return source.row / kPanelRows % panels_together(CodeOrder::awq) ? 0 : GroupedLayout::kBlock * pitch;
  }
  return 0;
}

// The block of 256 k, or what there is of it, that begins at depth `block`.
bool put_block(const GroupedKind& kind, const GroupedLayout& layout, const Source& source, int block, uint8_t* panel) {
  const StepPieces pieces = step_pieces(kind.codes, source.matrix.order);
  const int depth = source.k1 - source.k0;
  uint8_t* lines = panel + layout.offset(block) + layout.head;
  bool good = true;
  for (int k = block; k < std::min(depth, block + GroupedLayout::kBlock); k += kStepDepth) {
    if (source.rows == kPanelRows && k + kStepDepth <= depth) {
      good &= put_step(kind.codes, source.matrix.order, source.step(kind.codes, k), source.matrix.code_pitch,
                       bytes_ahead(kind, source, k), lines);
    } else {
      uint8_t step[kLargestStep];
      copy_step(kind.codes, source, k, std::min(kStepDepth, depth - k), step);
      good &= put_step(kind.codes, source.matrix.order, step, pieces.bytes, 0, lines);
    }
    lines += kStepDepth * layout.line_bytes / GroupedLayout::kBlock;
  }
  return good;
}

// Where group g of a panel has its 16 scales or zeros, of `width` bytes.
size_t place_of(const GroupedLayout& layout, size_t at, size_t width, int g) {
  return layout.offset(g / layout.groups * GroupedLayout::kBlock) + at + g % layout.groups * kPanelRows * width;
}

// The group of the matrix that group g of the panel has its scale from.
size_t group_of(const GroupedLayout& layout, const Source& source, int g) {
  return static_cast<size_t>((source.k0 + g * layout.group) / source.group);
}

// Scales as bits of T; after `& magnitude` `least_fault` and above are faults.
template <class T>
unsigned put_scales(const GroupedLayout& layout, const Source& source, T magnitude, T least_fault, uint8_t* panel) {
  const GroupedMatrix& m = source.matrix;
  const int count = div_up(source.k1 - source.k0, layout.group);
  size_t row_at[kPanelRows];
  for (int r = 0; r < source.rows; ++r) row_at[r] = static_cast<size_t>((source.row + r) / m.block_rows) * m.scale_row;
  T largest = 0;
  int g = 0;
  if constexpr (sizeof(T) < 4) {
    constexpr int kAtOnce = 16 / sizeof(T);
    const bool side_by_side = m.scale_group == sizeof(T) && m.block_rows == 1 && layout.group == source.group;
    for (; side_by_side && source.rows == kPanelRows && g + kAtOnce <= count; g += kAtOnce) {
      uint8_t* out[kAtOnce];
      for (int i = 0; i < kAtOnce; ++i) out[i] = panel + place_of(layout, 0, sizeof(T), g + i);
      const uint8_t* from = m.scales + row_at[0] + group_of(layout, source, g) * sizeof(T);
      largest = std::max(largest, turn_scales<T>(from, m.scale_row, magnitude, out));
    }
  }
  for (; g < count; ++g) {
    const uint8_t* from = m.scales + group_of(layout, source, g) * m.scale_group;
    uint8_t* to = panel + place_of(layout, 0, sizeof(T), g);
    for (int r = 0; r < source.rows; ++r) {
      T scale;
      std::memcpy(&scale, from + row_at[r], sizeof(T));
      std::memcpy(to + r * sizeof(T), &scale, sizeof(T));
      largest = std::max(largest, static_cast<T>(scale & magnitude));
    }
  }
  return largest < least_fault ? 0 : kScaleFault;
}

constexpr uint32_t kMagnitude = 0x7fffffff;
constexpr uint32_t kLimitBits = static_cast<uint32_t>(127 + kScaleLimitExponent) << 23;

unsigned put_scales(const GroupedKind& kind, const GroupedLayout& layout, const Source& source, uint8_t* panel) {
  switch (kind.scales) {
    case Scales::none:
      return 0;
    case Scales::f32:
      return put_scales<uint32_t>(layout, source, kMagnitude, kLimitBits, panel);
    case Scales::bf16:
      return put_scales<uint16_t>(layout, source, 0x7fff, kLimitBits >> 16, panel);
    case Scales::f16:
      return put_scales<uint16_t>(layout, source, 0x7fff, 0x7c00, panel);
    case Scales::e8m0:
      return put_scales<uint8_t>(layout, source, 0xff, 127 + kScaleLimitExponent, panel);
    case Scales::e4m3:
      return put_scales<uint8_t>(layout, source, 0xff, 0x7f, panel);
    default:
      return 0;  // no checkpoint has them
  }
  return 0;
}

unsigned put_zeros(const GroupedLayout& layout, const Source& source, uint8_t* panel) {
  const GroupedMatrix& m = source.matrix;
  uint8_t largest = 0;
  for (int g = 0; g < div_up(source.k1 - source.k0, layout.group); ++g) {
    const uint8_t* from = m.zeros + static_cast<size_t>(source.row) * m.zero_row;
    from += group_of(layout, source, g) * m.zero_group;
    uint8_t* to = panel + place_of(layout, layout.mins_at, 1, g);
    for (int r = 0; r < source.rows; ++r) {
      to[r] = from[static_cast<size_t>(r) * m.zero_row];
      largest = std::max(largest, to[r]);
    }
  }
  return largest <= 16 ? 0 : kZeroFault;
}

unsigned put_rows(const GroupedKind& kind, const Source& source, uint8_t* panel) {
  const float absent = kind.row ? 0.0f : 1.0f;
  uint32_t largest = 0;
  for (int r = 0; r < kPanelRows; ++r) {
    float factor = absent;
    if (kind.row && r < source.rows)
      factor = source.matrix.rows[static_cast<ptrdiff_t>(source.row + r) * source.matrix.row_step];
    uint32_t bits;
    std::memcpy(&bits, &factor, 4);
    if (kind.row) std::memcpy(panel + 4 * r, &bits, 4);
    largest = std::max(largest, bits & kMagnitude);
  }
  return largest < kLimitBits ? 0 : kRowFault;
}

// All of a panel but its codes.
unsigned put_head(const GroupedKind& kind, const GroupedLayout& layout, const Source& source, uint8_t* panel) {
  const int depth = padded_depth(source.k1 - source.k0);
  for (int k = 0; k < depth; k += GroupedLayout::kBlock) {
    uint8_t* head = panel + layout.offset(k);
    const int groups = std::min(layout.groups, div_up(depth - k, layout.group));
    std::memset(head, 0, layout.head);
    if (kind.mins == Mins::zeros) std::memset(head + layout.mins_at, 8, static_cast<size_t>(groups) * kPanelRows);
  }
  const unsigned zeros = kind.mins == Mins::zeros && source.matrix.zeros ? put_zeros(layout, source, panel) : 0;
  return zeros | put_rows(kind, source, panel) | put_scales(kind, layout, source, panel);
}

}  // namespace

unsigned pack_matrix(const GroupedKind& kind, const GroupedMatrix& matrix, int group, int row, int rows, int k0, int k1,
                     int panel_group, uint8_t* panels, size_t stride) {
  const GroupedLayout layout(kind, panel_group);
  const auto source = [&](int r) {
    return Source{matrix, std::max(1, group), row + r, std::min(kPanelRows, rows - r), k0, k1};
  };
  unsigned faults = 0;
  for (int r = 0; r < rows; r += kPanelRows)
    faults |= put_head(kind, layout, source(r), panels + r / kPanelRows * stride);
  for (int block = 0; block < k1 - k0; block += GroupedLayout::kBlock) {
    for (int r = 0; r < rows; r += kPanelRows) {
      if (!put_block(kind, layout, source(r), block, panels + r / kPanelRows * stride)) faults |= kCodeFault;
    }
  }
  return faults;
}

}  // namespace kt
