#include "formats/code_layouts.h"

#include <algorithm>
#include <cstring>

#include "formats/nibbles.h"

namespace kt {
namespace {

constexpr int kNibbleOffset = 8;

size_t row_bytes(int k, int code_bits) { return code_bits == 8 ? k : (static_cast<size_t>(k) + 1) / 2; }

size_t rows_int8_bytes(int rows, int k) { return rows * row_bytes(k, 8); }
size_t rows_int4_bytes(int rows, int k) { return rows * row_bytes(k, 4); }

void read_rows_int8(const uint8_t* data, int, int k, const CodeBlock& b, int8_t* out, size_t pitch) {
  for (int r = 0; r < b.rows; ++r) {
    std::memcpy(out + r * pitch, data + (b.row + r) * row_bytes(k, 8) + b.k0, static_cast<size_t>(b.k1 - b.k0));
  }
}

void read_rows_int4(const uint8_t* data, int, int k, const CodeBlock& b, int8_t* out, size_t pitch) {
  for (int r = 0; r < b.rows; ++r) {
    const uint8_t* row = data + (b.row + r) * row_bytes(k, 4);
    int8_t* to = out + r * pitch;
    int i = b.k0;
    for (; i + 8 <= b.k1; i += 8) {
      const uint64_t codes = offset_to_codes(spread_nibbles(load_u32(row + i / 2)));
      std::memcpy(to + i - b.k0, &codes, 8);
    }
    for (; i < b.k1; ++i) to[i - b.k0] = static_cast<int8_t>((row[i / 2] >> i % 2 * 4 & 15) - kNibbleOffset);
  }
}

// blocks: N is cut into blocks of 64 rows (8 bits) or 128 (4 bits), each of them into K blocks of 3584, those into 32
// rows, those into 64 k (128 for 4 bits), those into halves of 16 rows. A half is 1024 bytes: 16 lines of 4 k x 16
// rows; with 4 bits the low nibbles are the first 64 k and the high ones the second.
constexpr int kDepthBlock = 3584;
constexpr int kHalfRows = 16;
constexpr int kHalfBytes = 1024;
constexpr int kHalfDepth = 64;

// Where the half with `row` and `k` starts, in codes before halves and then in bytes.
size_t half_offset(int rows, int depth, int row, int k, int code_bits) {
  const int row_block = code_bits == 8 ? 64 : 128, depth_step = code_bits == 8 ? 64 : 128;
  const int nb = row / row_block * row_block, kb = k / kDepthBlock * kDepthBlock;
  const int block_rows = std::min(row_block, rows - nb), block_depth = std::min(kDepthBlock, depth - kb);
  const int ns = (row - nb) / 32 * 32, ks = (k - kb) / depth_step * depth_step;
  const size_t codes = static_cast<size_t>(nb) * depth + static_cast<size_t>(kb) * block_rows +
                       static_cast<size_t>(ns) * block_depth + static_cast<size_t>(32) * ks;
  return codes * code_bits / 8 + static_cast<size_t>((row - nb) % 32 / kHalfRows) * kHalfBytes;
}

size_t blocks_int8_bytes(int rows, int k) { return static_cast<size_t>(rows) * k; }
size_t blocks_int4_bytes(int rows, int k) { return static_cast<size_t>(rows) * k / 2; }

void read_blocks_int8(const uint8_t* data, int rows, int depth, const CodeBlock& b, int8_t* out, size_t pitch) {
  for (int k = b.k0; k < b.k1; k += kHalfDepth) {
    const uint8_t* half = data + half_offset(rows, depth, b.row, k, 8);
    for (int r = 0; r < b.rows; ++r) {
      int8_t* to = out + r * pitch + k - b.k0;
      for (int i = 0; i < kHalfDepth; i += 4) std::memcpy(to + i, half + 16 * i + 4 * r, 4);
    }
  }
}

void read_blocks_int4(const uint8_t* data, int rows, int depth, const CodeBlock& b, int8_t* out, size_t pitch) {
  for (int k = b.k0; k < b.k1; k += kHalfDepth) {
    const uint8_t* half = data + half_offset(rows, depth, b.row, k, 4);
    const int shift = k % 128 >= kHalfDepth ? 4 : 0;  // 3584 is a multiple of 128
    for (int r = 0; r < b.rows; ++r) {
      int8_t* to = out + r * pitch + k - b.k0;
      for (int i = 0; i < kHalfDepth; i += 4) {
        const uint64_t codes = twos_to_codes(load_u32(half + 16 * i + 4 * r) >> shift & each_byte(15));
        std::memcpy(to + i, &codes, 4);
      }
    }
  }
}

constexpr CodeLayout kLayouts[] = {
    {"rows", 8, 1, rows_int8_bytes, read_rows_int8},
    {"rows", 4, 1, rows_int4_bytes, read_rows_int4},
    {"blocks", 8, 64, blocks_int8_bytes, read_blocks_int8},
    {"blocks", 4, 128, blocks_int4_bytes, read_blocks_int4},
};

}  // namespace

const CodeLayout* code_layout(std::string_view name, int code_bits) {
  for (const CodeLayout& layout : kLayouts) {
    if (layout.name == name && layout.code_bits == code_bits) return &layout;
  }
  return nullptr;
}

void write_row_int4(const int8_t* codes, int k, uint8_t* out) {
  int i = 0;
  for (; i + 8 <= k; i += 8) {
    const uint32_t bytes = gather_nibbles(codes_to_offset(load_u64(codes + i)));
    std::memcpy(out + i / 2, &bytes, 4);
  }
  for (; i < k; i += 2) {
    const int low = codes[i] + kNibbleOffset, high = (i + 1 < k ? codes[i + 1] : 0) + kNibbleOffset;
    out[i / 2] = static_cast<uint8_t>(low | high << 4);
  }
}

}  // namespace kt
