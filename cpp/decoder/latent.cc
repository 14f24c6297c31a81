// Attention of a decoder's step over latents: LatentConfig says what is computed.
#include <algorithm>
#include <cmath>

#include "decoder/step.h"

namespace kt {

// Queries as latents see them, and the row's own latent where the next tokens will find it.
void DecodeStep::project_latents(const Worker& worker, int block) {
  const BlockConfig& b = config().blocks[block];
  const AttentionConfig& a = b.attention;
  const LatentConfig& l = a.latent;
  norm(worker, residual(b.attention_norm), {l.q_a ? l.q_a : a.q, l.kv_a});
  if (l.q_a) {
    to_bf16(worker, l.q_a, buffers().q_a, block, kQA);
  } else {
    to_bf16(worker, a.q, buffers().q, block, kQ);
  }
  to_bf16(worker, l.kv_a, buffers().k, block, kK);
  worker.barrier();
  if (l.q_a) {
    norm(worker, {buffers().q_a, l.q_a->config().rows, l.q_norm, l.eps}, {a.q});
    to_bf16(worker, a.q, buffers().q, block, kQ);
    worker.barrier();
  }
  LinearArgs up;
  up.count = args.count;
  up.groups = a.heads;
  up.input = buffers().q;
  up.input_step = static_cast<size_t>(a.query_dim());
  up.input_pitch = a.heads * up.input_step;
  up.f32 = buffers().queries;
  up.output_step = static_cast<size_t>(a.head_dim);
  up.output_pitch = a.heads * up.output_step;
  l.k_up->multiply(worker, up, tasks(block, kKUp, worker.node));
  for (int i = worker.global; i < args.count * a.heads; i += worker.total_threads)
    turn_latent_query(a, i / a.heads, i % a.heads);
  for (int row = worker.global; row < args.count; row += worker.total_threads) append_latent(worker, a, row);
  worker.barrier();
}

void DecodeStep::turn_latent_query(const AttentionConfig& a, int row, int head) const {
  const size_t index = static_cast<size_t>(row) * a.heads + head;
  const size_t at = static_cast<size_t>(args.positions[row]) * (a.rotary / 2);
  isa().rotate({buffers().q + index * a.query_dim() + a.latent.nope, 1, nullptr, a.rotary, a.cos + at, a.sin + at,
                a.rotary, a.pairs, buffers().queries + index * a.head_dim + a.latent.rank});
}

void DecodeStep::append_latent(const Worker& worker, const AttentionConfig& a, int row) const {
  const LatentConfig& l = a.latent;
  const uint16_t* x = buffers().k + static_cast<size_t>(row) * a.head_dim;
  uint16_t* to = a.keys + args.slots[row] * a.slot_pitch + args.positions[row] * a.position_pitch;
  const float mean = isa().sum_of_squares(x, l.rank) / static_cast<float>(l.rank);
  isa().normalise(x, 1 / std::sqrt(mean + l.eps), l.kv_norm.data(), l.rank, to);
  const size_t at = static_cast<size_t>(args.positions[row]) * (a.rotary / 2);
  float* turned = decoder.thread_buffers_[worker.global].heads;
  isa().rotate({x + l.rank, 1, nullptr, a.rotary, a.cos + at, a.sin + at, a.rotary, a.pairs, turned});
  isa().finish({turned, nullptr, 1, nullptr, a.rotary, to + l.rank, nullptr});
}

// As many as leave every worker a few tasks: each block of heads reads the latents of its part again. A head's sums are
// the same in every block.
int DecodeStep::heads_together(const Worker& worker, const AttentionConfig& a) const {
  int parts = 0;
  for (int row = 0; row < args.count; ++row)
    parts += KeySpan::of(a.window, static_cast<int>(args.positions[row])).parts;
  const int wanted = div_up(worker.total_threads * kTasksPerWorker, parts);
  return round_up(div_up(a.heads, std::min(wanted, div_up(a.heads, kLeastHeads))), kLeastHeads);
}

void DecodeStep::attend_latents(const Worker& worker, const AttentionConfig& a, int row, int head, int count,
                                int part) {
  const KeySpan span = KeySpan::of(a.window, static_cast<int>(args.positions[row]));
  const int dim = a.mixed_dim();
  const bool alone = span.parts == 1;
  float* own = decoder.thread_buffers_[worker.global].mixed;
  const size_t at = part_at(a, row, 0, part) * a.heads + head;
  float* mixed = alone ? own : buffers().parts + at * dim;
  float* most = alone ? own + static_cast<size_t>(count) * dim : buffers().most + at;
  float* sum = alone ? most + count : buffers().sum + at;
  const int from = span.begin + part * span.length;
  const uint16_t* keys = a.keys + args.slots[row] * a.slot_pitch + from * a.position_pitch;
  isa().attend({buffers().queries + (static_cast<size_t>(row) * a.heads + head) * a.head_dim, count, a.head_dim, dim,
                keys, keys, a.position_pitch, std::min(span.length, span.begin + span.count - from), a.scale, a.softcap,
                mixed, most, sum});
  if (!alone) return;
  for (int h = 0; h < count; ++h) finish_head(a, row, head + h, mixed + static_cast<size_t>(h) * dim, most[h], sum[h]);
}

void DecodeStep::expand_values(const Worker& worker, int block) {
  const AttentionConfig& a = config().blocks[block].attention;
  LinearArgs up;
  up.count = args.count;
  up.groups = a.heads;
  up.input = buffers().mixed;
  up.input_step = static_cast<size_t>(a.mixed_dim());
  up.input_pitch = a.heads * up.input_step;
  up.bf16 = buffers().values;
  up.output_step = static_cast<size_t>(a.value_dim());
  up.output_pitch = a.heads * up.output_step;
  a.latent.v_up->multiply(worker, up, tasks(block, kVUp, worker.node));
  worker.barrier();
}

}  // namespace kt
