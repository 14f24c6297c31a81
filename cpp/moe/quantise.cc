#include "moe/quantise.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/bf16.h"
#include "formats/code_layouts.h"
#include "formats/codes.h"
#include "formats/format.h"
#include "formats/int4.h"
#include "formats/int4g.h"

namespace kt {
namespace {

struct Job {
  FormatKernels::Pack pack;
  Format format;
  const uint16_t* matrix;
  int rows;
  int k;
  size_t row_bytes;
  QuantisedRows out;

  void store(const PanelCodes& codes, int row, int count) const {
    const int groups = div_up(k, Int4g::kGroup);
    for (int n = 0; n < count; ++n) {
      uint8_t* to = out.codes + (row + n) * row_bytes;
      if (code_bits(format) == 8) {
        std::copy_n(codes.row(n), k, reinterpret_cast<int8_t*>(to));
      } else {
        write_row_int4(codes.row(n), k, to);
      }
      out.scales[row + n] = codes.scales[n];
      if (has_steps(format)) std::copy_n(codes.row_steps(n), groups, out.steps + static_cast<size_t>(row + n) * groups);
    }
  }

  void run(int worker, int workers) const {
    std::vector<uint8_t> panel(panel_bytes(format, k));
    PanelCodes codes;
    for (int p = worker; p < panel_count(rows); p += workers) {
      const int row = p * kPanelRows, count = std::min(kPanelRows, rows - row);
      pack(matrix + static_cast<size_t>(row) * k, k, count, k, panel.data());
      get_codes(format, panel.data(), k, &codes);
      store(codes, row, count);
    }
  }
};

constexpr int kLanes = 16;

// Adds a row whose codes are rows of integers times a scale for every kGroup k.
void add_row(const uint16_t* row, const int8_t* codes, const float* group_scales, int k, SquaredError* sum) {
  for (int k0 = 0; k0 < k; k0 += Int4g::kGroup) {
    const float scale = group_scales[k0 / Int4g::kGroup];
    const int count = std::min(Int4g::kGroup, k - k0);
    float error[kLanes] = {}, weight[kLanes] = {};
    const auto add = [&](int i, int lane) {
      const float w = bf16_to_f32(row[k0 + i]), e = w - scale * static_cast<float>(codes[k0 + i]);
      error[lane] += e * e;
      weight[lane] += w * w;
    };
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) add(i + lane, lane);
    }
    for (; i < count; ++i) add(i, i % kLanes);
    for (int lane = 0; lane < kLanes; ++lane) {
      sum->error += error[lane];
      sum->weight += weight[lane];
    }
  }
}

}  // namespace

Status quantise(Pool* pool, const IsaTable& isa, Format format, bool search, const uint16_t* matrix, int rows, int k,
                const QuantisedRows& out) {
  if (code_bits(format) == 0) {
    return Status::invalid(std::string("weights of ") + format_name(format) + " are not quantised");
  }
  const FormatKernels& kernels = isa.formats[static_cast<int>(format)];
  Job job{search ? kernels.pack_searched : kernels.pack,       format, matrix, rows, k,
          code_layout("rows", code_bits(format))->bytes(1, k), out};
  if (!pool) {
    job.run(0, 1);
    return {};
  }
  const auto run = [](void* c, const Worker& w) { static_cast<const Job*>(c)->run(w.global, w.total_threads); };
  return pool->run(run, &job);
}

SquaredError squared_error(Format format, const uint16_t* matrix, int rows, int k, const CodedPart& coded) {
  const int bits = code_bits(format), groups = div_up(k, Int4g::kGroup);
  const size_t row_bytes = code_layout("rows", bits)->bytes(1, k);
  std::vector<int8_t> nibbles(bits == 4 ? round_up(k, 2) : 0);
  std::vector<float> scales(groups);
  SquaredError sum{};
  for (int n = 0; n < rows; ++n) {
    const uint8_t* bytes = coded.codes + n * row_bytes;
    const int8_t* codes = reinterpret_cast<const int8_t*>(bytes);
    if (bits == 4) {
      for (size_t i = 0; i < row_bytes; ++i) {
        nibbles[2 * i] = static_cast<int8_t>((bytes[i] & 15) - Int4::kOffset);
        nibbles[2 * i + 1] = static_cast<int8_t>((bytes[i] >> 4) - Int4::kOffset);
      }
      codes = nibbles.data();
    }
    float d;
    std::memcpy(&d, coded.scales + sizeof(d) * n, sizeof(d));
    for (int g = 0; g < groups; ++g) {
      const int step = has_steps(format) ? coded.steps[static_cast<size_t>(n) * groups + g]
                       : bits == 4       ? Int4::kStep
                                         : 1;
      scales[g] = d * static_cast<float>(step);
    }
    add_row(matrix + static_cast<size_t>(n) * k, codes, scales.data(), k, &sum);
  }
  return sum;
}

}  // namespace kt
