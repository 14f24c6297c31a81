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

// Tile kernels work on whole blocks of rows: c, and activations without a row list, need room for so many.
constexpr int kRowUnit = 16;

// Columns of c that lie side by side: those of two panels.
constexpr int kPairColumns = 2 * kPanelRows;

// c[i][j] = sum_k a[row(i)][k] * w[j][k] for i < m, j < 16 * panels, with row(i) = rows ? rows[i] : first_row + i.
struct GemmArgs {
  const uint8_t* panels;  // n_panels packed panels of depth k, one behind the other
  int n_panels;
  int k;
  Acts acts;
  const int32_t* rows;
  int first_row;
  int m;
  // c[i][j] at c + j / kPairColumns * c_step + i * c_pitch + j % kPairColumns; room for m rounded up to kRowUnit rows.
  float* c;
  size_t c_pitch;
  size_t c_step;
  uint8_t* scratch;     // IsaTable::gemm_scratch_bytes(k, n_panels)
  const uint8_t* next;  // where the caller will read weights next, for prefetching; may be null
  int group;            // of the panels, where the format has groups
  Format format;        // of the panels; only kernels that several formats share look at it
  // Rows as RowGather makes them, gathered_pitch bytes apart, for a product of as many rows; null: made from acts.
  const uint8_t* gathered;
  size_t gathered_pitch;

  // Whole rows.
  void lay_out_rows() {
    c_pitch = static_cast<size_t>(n_panels) * kPanelRows;
    c_step = kPairColumns;
  }
  // All rows of a pair of panels, then those of the next. A pass over two panels then walks through c in its order and
  // not in steps of up to 2 KB. Gate and up by tiles, 16 threads: int8 7 to 15 % faster, bf16 2 to 5 %; rows padded by
  // one to three lines: no gain. Whole layers in turns, T = 2048: dsv3 5 to 9 %, qwen3-30b 2 %.
  void lay_out_pairs() {
    c_pitch = kPairColumns;
    c_step = c_columns(m);
  }
  // Elements of a pair of m rows, and a row more: a row of all pairs would lie in few sets of the cache otherwise.
  static constexpr size_t c_columns(int m) { return (static_cast<size_t>(round_up(m, kRowUnit)) + 1) * kPairColumns; }
  float* c_at(int row, int panel) const {
    return c + panel / 2 * c_step + row * c_pitch + static_cast<size_t>(panel % 2) * kPanelRows;
  }
};

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

// out[j] = sum over i < n of weights[i] * c[rows[i]][j] (+ addend[j]) for j < columns, rows of c kPairColumns long, the
// first products first. One of the outputs is null; f32 has room for kPairColumns and gets no addend.
struct CombineArgs {
  const float* c;
  const int32_t* rows;
  const float* weights;
  int n;
  int columns;             // at most kPairColumns
  const uint16_t* addend;  // may be null, or bf16 itself
  uint16_t* bf16;
  float* f32;
};

// out[j] = scale * (c[j] + bias[j]) + addend[j] for j < n; bias and addend may be null. One of the outputs is null.
struct FinishArgs {
  const float* c;
  const float* bias;
  float scale;
  const uint16_t* addend;
  int n;
  uint16_t* bf16;
  float* f32;
};

// Which elements a rotary embedding turns together, of the first `rotary`.
enum class RotaryPairs : int {
  halves,      // i and i + rotary / 2
  neighbours,  // 2 i and 2 i + 1
  gathered,    // neighbours, which become halves
};

// y[i] = x[i] * factor * weight[i], weight may be null; pairs (a, b) are turned: (a cos - b sin, b cos + a sin).
struct RotateArgs {
  const uint16_t* x;
  float factor;
  const float* weight;
  int n;
  const float* cos;  // [rotary / 2]
  const float* sin;
  int rotary;
  RotaryPairs pairs;
  float* out;  // [n]
};

// Softmax attention of a few heads over the same keys, without the division by the sum of the weights:
//   out[h] = sum_j e^(s[h, j] - most[h]) values[j],  sum[h] = sum_j e^(s[h, j] - most[h]),  most[h] = max_j s[h, j]
// with s[h, j] = scale * q[h] . keys[j], or softcap * tanh of that / softcap where softcap is not 0.
struct AttendArgs {
  const float* q;  // [heads][head_dim]
  int heads;
  int head_dim;            // of queries and keys, a multiple of 16
  int value_dim;           // likewise
  const uint16_t* keys;    // bf16 [count][head_dim], rows `pitch` elements apart
  const uint16_t* values;  // bf16 [count][value_dim], as far apart; may be the keys
  size_t pitch;
  int count;
  float scale;
  float softcap;
  float* out;   // [heads][value_dim]
  float* most;  // [heads]
  float* sum;
};

// Calls of up to so many rows give every row the bits that it would get alone, if gemm is handed at most
// IsaTable::steady_rows of them at a time. It holds for bf16, int8, int4 and int4g.
constexpr int kSteadyRows = 32;

// Makes rows of activations what a kernel multiplies, once for all products that take them. Null: each does so itself.
struct RowGather {
  size_t (*row_bytes)(int k) = nullptr;
  // The kGatherDepth columns from k0 on, or what is left of k.
  void (*gather)(const Acts& acts, int row, int k0, int k, uint8_t* gathered_row) = nullptr;
};
constexpr int kGatherDepth = 512;

struct FormatKernels {
  ActKind act;
  void (*gemm)(const GemmArgs& args);
  // Packs rows (<= 16) x k bf16 values, row r at source + r * row_pitch (in elements), into one panel. Null for
  // formats that keep the codes of a file.
  using Pack = void (*)(const uint16_t* source, size_t row_pitch, int rows, int k, uint8_t* panel);
  Pack pack;
  // The same, with scales searched for the least error of each row. Null where there are no scales to choose.
  Pack pack_searched;
  // Products of up to few_rows rows, and of up to many_rows; more take rows as they are.
  RowGather few{}, many{};
  int few_rows = 0, many_rows = 0;
  RowGather gather_of(int m) const { return m <= few_rows ? few : m <= many_rows ? many : RowGather{}; }
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
  void (*combine)(const CombineArgs& args);
  // out[j] = bf16(sum of parts[p][j] + addend[j]), any n; addend may be null, or out itself.
  void (*store)(const float* const* parts, int n_parts, int n, const uint16_t* addend, uint16_t* out);

  void (*finish)(const FinishArgs& args);
  // sum of x[i]^2; out[i] = bf16(x[i] * factor * weight[i]); any n.
  float (*sum_of_squares)(const uint16_t* x, int n);
  void (*normalise)(const uint16_t* x, float factor, const float* weight, int n, uint16_t* out);
  void (*rotate)(const RotateArgs& args);
  void (*attend)(const AttendArgs& args);

  size_t (*gemm_scratch_bytes)(int k, int n_panels);
  // Largest n_panels and m a gemm call should be given, so that c and decoded weights stay in L2.
  int max_panels;
  int max_rows;
  // See kSteadyRows: vector kernels sum in the same order whatever m is, tile kernels in another.
  int steady_rows;
  // Best span for products of many rows. Vector kernels rescale for free in every group; tile kernels do not.
  int many_rows_span;
  LimitLoops limits;
};

}  // namespace kt
