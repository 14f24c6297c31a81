// Attention of a decoder's step. A task is a part of the keys of one row and key head; its queries are all that share
// the key head, or some of those that share a latent (latent.cc).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "decoder/step.h"

namespace kt {
namespace {

float factor_of(float sum_of_squares, int n, float eps) {
  return 1 / std::sqrt(sum_of_squares / static_cast<float>(n) + eps);
}

}  // namespace

bool DecodeStep::is_split(const AttentionConfig& a) const {
  return std::any_of(args.positions, args.positions + args.count,
                     [&](int64_t position) { return KeySpan::of(a.window, static_cast<int>(position)).parts > 1; });
}

size_t DecodeStep::part_at(const AttentionConfig& a, int row, int kv_head, int part) const {
  return (static_cast<size_t>(row) * a.kv_heads + kv_head) * kMaxParts + part;
}

void DecodeStep::attend_tasks(const Worker& worker, int block) {
  const AttentionConfig& a = config().blocks[block].attention;
  const int together = a.is_latent() ? heads_together(worker, a) : a.heads / a.kv_heads;
  const int blocks = div_up(a.heads, together);
  TaskCounter& counter = tasks(block, kAttend, 0);
  int row = 0, first = 0;  // the first task of the row
  for (int task = counter.take(); row < args.count; task = counter.take()) {
    for (; row < args.count; ++row) {
      const int parts = KeySpan::of(a.window, static_cast<int>(args.positions[row])).parts;
      if (task < first + parts * blocks) {
        const int index = (task - first) % blocks, part = (task - first) / blocks, head = index * together;
        if (a.is_latent()) {
          attend_latents(worker, a, row, head, std::min(together, a.heads - head), part);
        } else {
          attend_part(worker, a, row, index, part);
        }
        break;
      }
      first += parts * blocks;
    }
  }
}

// q * rsqrt(mean square + eps) * weight, turned; the mean is of the head, or of the row where the norm is.
void DecodeStep::turn_queries(const AttentionConfig& a, int row, int kv_head, float* out) const {
  const int group = a.heads / a.kv_heads, all = a.heads * a.head_dim;
  const uint16_t* q = buffers().q + static_cast<size_t>(row) * all;
  const bool whole = a.q_norm.size() > static_cast<size_t>(a.head_dim);
  float factor = whole ? factor_of(isa().sum_of_squares(q, all), all, config().eps) : 1;
  const size_t at = static_cast<size_t>(args.positions[row]) * (a.rotary / 2);
  for (int h = 0; h < group; ++h) {
    const int head = kv_head * group + h;
    const uint16_t* x = q + static_cast<size_t>(head) * a.head_dim;
    if (!whole && !a.q_norm.empty()) factor = factor_of(isa().sum_of_squares(x, a.head_dim), a.head_dim, config().eps);
    const float* weight = a.q_norm.empty() ? nullptr : a.q_norm.data() + (whole ? head * a.head_dim : 0);
    isa().rotate({x, factor, weight, a.head_dim, a.cos + at, a.sin + at, a.rotary, a.pairs,
                  out + static_cast<size_t>(h) * a.head_dim});
  }
}

// The row's key and value go where the next tokens will find them.
void DecodeStep::append(const AttentionConfig& a, int row, int kv_head, float* scratch) const {
  const int all = a.kv_heads * a.head_dim;
  const size_t offset = static_cast<size_t>(kv_head) * a.head_dim;
  const uint16_t* k = buffers().k + static_cast<size_t>(row) * all;
  const bool whole = a.k_norm.size() > static_cast<size_t>(a.head_dim);
  const uint16_t* x = k + offset;
  float factor = 1;
  if (whole) {
    factor = factor_of(isa().sum_of_squares(k, all), all, config().eps);
  } else if (!a.k_norm.empty()) {
    factor = factor_of(isa().sum_of_squares(x, a.head_dim), a.head_dim, config().eps);
  }
  const float* weight = a.k_norm.empty() ? nullptr : a.k_norm.data() + (whole ? offset : 0);
  const size_t at = static_cast<size_t>(args.positions[row]) * (a.rotary / 2);
  isa().rotate({x, factor, weight, a.head_dim, a.cos + at, a.sin + at, a.rotary, a.pairs, scratch});
  const size_t to = args.slots[row] * a.slot_pitch + kv_head * a.head_pitch + args.positions[row] * a.position_pitch;
  isa().finish({scratch, nullptr, 1, nullptr, a.head_dim, a.keys + to, nullptr});
  std::memcpy(a.values + to, buffers().v + static_cast<size_t>(row) * all + offset,
              2 * static_cast<size_t>(a.head_dim));
}

void DecodeStep::attend_part(const Worker& worker, const AttentionConfig& a, int row, int kv_head, int part) {
  const int group = a.heads / a.kv_heads;
  const KeySpan span = KeySpan::of(a.window, static_cast<int>(args.positions[row]));
  const Decoder::ThreadBuffers& thread = decoder.thread_buffers_[worker.global];
  turn_queries(a, row, kv_head, thread.heads);
  // The row's own key is the last of its last part.
  if (part == span.parts - 1) append(a, row, kv_head, thread.heads + static_cast<size_t>(group) * a.head_dim);
  const bool alone = span.parts == 1;
  const size_t at = part_at(a, row, kv_head, part) * group, heads = static_cast<size_t>(group) * a.head_dim;
  float* mixed = alone ? thread.mixed : buffers().parts + at * a.head_dim;
  float* most = alone ? thread.mixed + heads : buffers().most + at;
  float* sum = alone ? thread.mixed + heads + group : buffers().sum + at;
  const int from = span.begin + part * span.length;
  const size_t key = args.slots[row] * a.slot_pitch + kv_head * a.head_pitch + from * a.position_pitch;
  isa().attend({thread.heads, group, a.head_dim, a.head_dim, a.keys + key, a.values + key, a.position_pitch,
                std::min(span.length, span.begin + span.count - from), a.scale, a.softcap, mixed, most, sum});
  if (!alone) return;
  for (int h = 0; h < group; ++h)
    finish_head(a, row, kv_head * group + h, mixed + static_cast<size_t>(h) * a.head_dim, most[h], sum[h]);
}

// Divides by the sum of the weights, of which a sink is one.
void DecodeStep::finish_head(const AttentionConfig& a, int row, int head, const float* mixed, float most,
                             float sum) const {
  float scale = 1 / sum;
  if (!a.sinks.empty()) {
    const float largest = std::max(most, a.sinks[head]), own = std::exp(most - largest);
    scale = own / (sum * own + std::exp(a.sinks[head] - largest));
  }
  const size_t to = (static_cast<size_t>(row) * a.heads + head) * a.mixed_dim();
  isa().finish({mixed, nullptr, scale, nullptr, a.mixed_dim(), buffers().mixed + to, nullptr});
}

void DecodeStep::merge_tasks(const Worker& worker, int block) {
  const AttentionConfig& a = config().blocks[block].attention;
  const int group = a.heads / a.kv_heads;
  float* mixed = decoder.thread_buffers_[worker.global].mixed;
  TaskCounter& counter = tasks(block, kMerge, 0);
  for (int task; (task = counter.take()) < args.count * a.heads;) {
    const int row = task / a.heads, head = task % a.heads, kv_head = head / group;
    const int parts = KeySpan::of(a.window, static_cast<int>(args.positions[row])).parts;
    if (parts == 1) continue;
    const auto at = [&](int part) { return part_at(a, row, kv_head, part) * group + head % group; };
    float most = buffers().most[at(0)], sum = 0;
    for (int p = 1; p < parts; ++p) most = std::max(most, buffers().most[at(p)]);
    std::fill_n(mixed, a.mixed_dim(), 0.0f);
    for (int p = 0; p < parts; ++p) {
      const float weight = std::exp(buffers().most[at(p)] - most);
      sum += weight * buffers().sum[at(p)];
      isa().accumulate(mixed, buffers().parts + at(p) * a.mixed_dim(), weight, a.mixed_dim());
    }
    finish_head(a, row, head, mixed, most, sum);
  }
}

}  // namespace kt
