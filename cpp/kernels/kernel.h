// What one instruction set offers to the layers above: a table of functions, filled by instances.cc once per row of
// cmake/isa.cmake.
//
// Words: m rows of activations (tokens), n output rows of a weight matrix, k depth. Weights are packed panels
// (formats/panel.h). All functions are pure: no allocation, no errors; the callers check sizes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats/list.h"
#include "formats/panel.h"
#include "kernels/limits.h"

namespace kt {

// What the kernels of a format read as activations on an instruction set.
enum class ActKind : int {
  bf16,  // the bf16 rows themselves
  s8,    // q in -127..127, one scale per kActGroup
  s16,   // q in -32767..32767, one scale per kActGroup, quads stored as k0 k2 k1 k3
};

constexpr int act_bytes(ActKind kind) { return kind == ActKind::s8 ? 1 : 2; }

// Rows of activations. For s8 and s16, value = scales[row][k / kActGroup] * q, group_sums holds the sum of q per
// kActGroup and sums per kSumGroup; depth is padded to kDepthUnit with zeros.
struct Acts {
  const uint8_t* data;
  size_t pitch;  // bytes from row to row
  const float* scales;
  const int32_t* group_sums;
  const int32_t* sums;
  int group_pitch;  // entries from row to row in scales and group_sums
  int sum_pitch;
  int span;  // consecutive k whose groups share one scale; a multiple of kActGroup
};

// c[i][j] = sum_k a[row(i)][k] * w[j][k] for i < m, j < 16 * panels, with row(i) = rows ? rows[i] : first_row + i.
struct GemmArgs {
  const uint8_t* panels;  // n_panels packed panels of depth k, one behind the other
  int n_panels;
  int k;
  Acts acts;
  const int32_t* rows;
  int first_row;
  int m;
  float* c;             // room for m rounded up to kRowUnit rows
  size_t c_pitch;       // elements from row to row, at least 16 * n_panels
  uint8_t* scratch;     // IsaTable::gemm_scratch_bytes(k, n_panels)
  const uint8_t* next;  // where the caller will read weights next, for prefetching; may be null
  int group;            // of the panels, where the format has groups
  Format format;        // of the panels; only kernels that several formats share look at it
};

// Tile kernels work on whole blocks of rows: c, and activations without a row list, need room for so many.
constexpr int kRowUnit = 32;

// What a gate g and an up u make of each other; with a limit they are clamped before.
enum class ActivationKind : int {
  silu,          // silu(g) * u                     g to at most limit, u to -limit..limit
  swiglu_alpha,  // g * sigmoid(alpha g) * (u + 1)  g and u to -limit..limit: kt-kernel 0.4 to 0.7
  swigluoai,     // the same                        g to at most limit, u to -limit..limit: gpt-oss
  gelu_tanh,     // gelu(g) * u, gelu by tanh       g to at most limit, u to -limit..limit: Gemma
  relu2,         // max(u, 0)^2, without gates, limit and biases: Nemotron-H
};

struct Activation {
  ActivationKind kind = ActivationKind::silu;
  float limit = 0;  // 0: none
  float alpha = 0;  // of swiglu_alpha and swigluoai

  bool gated() const { return kind != ActivationKind::relu2; }
  bool sloped() const { return kind == ActivationKind::swiglu_alpha || kind == ActivationKind::swigluoai; }
};

// Products of gate and up: of row i and pair p the 16 at gate + i * pitch + p * step, and likewise of up. Biases, if
// not null, lie as 16 of gate and 16 of up for each pair and are added. An activation without gates looks at up only,
// and has no biases.
struct GateUp {
  const float* gate;
  const float* up;
  size_t pitch, step;
  const float* bias;
};

struct FormatKernels {
  ActKind act;
  void (*gemm)(const GemmArgs& args);
  // Packs rows (<= 16) x k bf16 values, row r at source + r * row_pitch (in elements), into one panel. Null for
  // formats that keep the codes of a file.
  using Pack = void (*)(const uint16_t* source, size_t row_pitch, int rows, int k, uint8_t* panel);
  Pack pack;
  // The same, with scales searched for the least error of each row. Null where there are no scales to choose.
  Pack pack_searched;
};

struct IsaTable {
  const char* name;
  FormatKernels formats[kFormatCount];

  // Quantises k bf16 values into data (padded depth), scales and sums. kind is s8 or s16. Groups within `span` k share
  // one scale. A row may be cut at multiples of span and quantised piece by piece.
  void (*quantise)(ActKind kind, const uint16_t* x, int k, int span, uint8_t* data, float* scales, int32_t* group_sums,
                   int32_t* sums);
  // h[i][16 p + j] = activation(gate, up) as bf16, for i < m, p < pairs; h_pitch in elements.
  void (*swiglu)(const GateUp& c, int m, int pairs, Activation activation, uint16_t* h, size_t h_pitch);
  // acc[j] += weight * c[j], n a multiple of 16.
  void (*accumulate)(float* acc, const float* c, float weight, int n);
  // out[j] = bf16(sum of parts[p][j] + addend[j]), any n; addend may be null, or out itself.
  void (*store)(const float* const* parts, int n_parts, int n, const uint16_t* addend, uint16_t* out);

  size_t (*gemm_scratch_bytes)(int k, int n_panels);
  // Largest n_panels and m a gemm call should be given, so that c and decoded weights stay in L2.
  int max_panels;
  int max_rows;
  // Best span for products of many rows. Vector kernels rescale for free in every group; tile kernels do not.
  int many_rows_span;
  LimitLoops limits;
};

}  // namespace kt
