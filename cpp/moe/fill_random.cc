// Layer::fill_random: weights for measurements.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/bf16.h"
#include "formats/gguf.h"
#include "moe/layer.h"

namespace kt {
namespace {

uint16_t f16_of_power(int exponent) { return static_cast<uint16_t>(std::max(1, 15 + exponent) << 10); }

// About the deviation of random codes, in units of their values.
float spread_of(const GroupedKind& kind) {
  switch (kind.codes) {
    case Codes::e4m3:
      return 0.6f;
    case Codes::e2m1:
      return 3.0f;
    case Codes::iq4:
      return 70.0f;
    case Codes::f16:
    case Codes::f32:
      return 1.0f;
    default:
      return 0.29f * static_cast<float>(1 << grouped_code_bits(kind.codes));
  }
}

// One scale in every width, a power of two.
void put_scale(Scales scales, int exponent, uint8_t* at) {
  const float f32 = std::ldexp(1.0f, exponent);
  const uint16_t bf16 = f32_to_bf16(f32), f16 = f16_of_power(exponent);
  switch (scales) {
    case Scales::none:
      return;
    case Scales::f32:
      std::memcpy(at, &f32, 4);
      return;
    case Scales::bf16:
      std::memcpy(at, &bf16, 2);
      return;
    case Scales::f16:
      std::memcpy(at, &f16, 2);
      return;
    case Scales::e8m0:
      *at = static_cast<uint8_t>(127 + exponent);
      return;
    case Scales::e4m3:
      *at = 0x38;
      return;
    case Scales::u8:
    case Scales::s8:
      *at = 32;
      return;
    case Scales::u4:
      *at = 8;
      return;
  }
}
constexpr int kSubScaleExponent = 5;  // of 32

// Random codes, and one scale that makes their deviation about the one that is asked for.
template <class Next>
void random_panel(const GroupedKind& kind, int group, int k, float deviation, Next next, GroupedPanel* panel) {
  panel->reset(kind, k, group);
  const int bits = std::min(8, grouped_code_bits(kind.codes));
  const int exponent = std::ilogb(deviation / spread_of(kind));
  const int of_group = kind.row ? 0 : exponent;
  for (int n = 0; n < kPanelRows; ++n) {
    for (int i = 0; i < k; ++i) {
      uint8_t* code = panel->row(n) + i * panel->code_bytes;
      const float value = deviation * 0.01f * static_cast<float>(static_cast<int>(next() & 255) - 128);
      if (kind.codes == Codes::f32) {
        std::memcpy(code, &value, 4);
      } else if (kind.codes == Codes::f16) {
        const uint16_t half = static_cast<uint16_t>(f16_of_power(exponent) | (next() & 0x83ff));
        std::memcpy(code, &half, 2);
      } else {
        *code = static_cast<uint8_t>(next()) & static_cast<uint8_t>((1 << bits) - 1);
        if (kind.codes == Codes::e4m3) *code &= 0xbf;  // below 2: no NaN, few outliers
      }
    }
    panel->rows[n] = kind.row ? std::ldexp(1.0f, exponent) : 1.0f;
    for (int g = 0; g < panel->groups; ++g)
      put_scale(kind.scales, of_group, panel->row_scales(n) + static_cast<size_t>(g) * panel->width);
    const uint16_t super = f16_of_power(exponent - kSubScaleExponent);
    std::fill_n(panel->row_supers(n), panel->supers.empty() ? 0 : 2 * panel->blocks, super);
  }
}

template <class Next>
void random_raw_panel(Format format, int k, float deviation, Next next, uint8_t* panel) {
  const size_t bytes = static_cast<size_t>(gguf_block(format).bytes),
               blocks = static_cast<size_t>(k / 256) * kPanelRows;
  for (size_t b = 0; b < blocks; ++b, panel += bytes) {
    for (size_t i = 0; i < bytes; ++i) panel[i] = static_cast<uint8_t>(next());
    // Values with their scales are within 100 or so, ternary ones within 10, or 1.
    const bool ternary = format == Format::iq1_s || format == Format::iq1_m;
    const float spread = format == Format::tq1_0 ? 1.0f : ternary ? 8.0f : 64.0f;
    set_raw_scale(format, f16_of_power(std::ilogb(deviation / spread)), panel);
  }
}

}  // namespace

void Layer::fill_random_panel(Matrix matrix, int k, uint64_t* state, std::vector<uint16_t>* rows, GroupedPanel* codes,
                              uint8_t* panel) const {
  const auto next = [state] {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return static_cast<uint32_t>(*state >> 32);
  };
  const float deviation = 1.0f / __builtin_sqrtf(static_cast<float>(k));
  const WeightFormat of = format(matrix);
  if (is_raw(of.id)) return random_raw_panel(of.id, k, deviation, next, panel);
  if (const GroupedKind* kind = grouped_kind(of.id)) {
    random_panel(*kind, of.group, k, deviation, next, codes);
    put_grouped(*kind, of.group, *codes, panel);
    return;
  }
  const float scale = 3.4641f * deviation / 4294967296.0f;
  for (int i = 0; i < kPanelRows * k; ++i)
    (*rows)[i] = f32_to_bf16(static_cast<float>(static_cast<int32_t>(next())) * scale);
  kernels(matrix).pack(rows->data(), k, kPanelRows, k, panel);
}

Status Layer::fill_random(uint64_t seed) {
  struct Context {
    Layer* layer;
    uint64_t seed;
  } context{this, seed};
  KT_RETURN_IF_ERROR(workspace_->pool().usable());
  const std::lock_guard lock(workspace_->mutex());
  const Status packed = workspace_->pool().run(
      [](void* c, const Worker& worker) {
        const Context& job = *static_cast<Context*>(c);
        const Layer& layer = *job.layer;
        const Shard& shard = layer.shards_[worker.node];
        std::vector<uint16_t> rows(static_cast<size_t>(kPanelRows) * std::max(layer.config_.hidden, shard.size));
        GroupedPanel codes;
        uint64_t state = job.seed * 0x9e3779b97f4a7c15u + worker.global + 1;
        for (int e = 0; e < layer.config_.num_experts; ++e) {
          for (int p = worker.index; p < layer.panel_total(shard); p += worker.node_threads) {
            int index;
            const Matrix matrix = layer.panel_of(shard, p, &index);
            layer.fill_random_panel(matrix, layer.depth(matrix, shard), &state, &rows, &codes,
                                    layer.panel(shard, e, matrix, index));
          }
        }
      },
      &context);
  for (int e = 0; packed.is_ok() && e < config_.num_experts; ++e) {
    set_loaded(e);
    // One scale for all rows of a panel: they are those of square blocks where a checkpoint would have such.
    const int rows = config_.format() == Format::fp8 ? config_.group : 1;
    scale_rows_[e] = {rows, rows, rows};
    if (config_.biases) set_loaded(e, kBiases);
  }
  return packed;
}

}  // namespace kt
