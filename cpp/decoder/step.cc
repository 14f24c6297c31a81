#include "decoder/step.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/bf16.h"

namespace kt {

void DecodeStep::work(const Worker& worker) {
  begin(worker);
  worker.barrier();
  for (int i = 0; i < static_cast<int>(config().blocks.size()); ++i) {
    attention(worker, i);
    if (config().blocks[i].experts) {
      experts(worker, i);
    } else {
      mlp(worker, i);
    }
  }
  head(worker);
}

// Rows of the embedding; and all counters back to 0, each worker some: their lines are on other cores.
void DecodeStep::begin(const Worker& worker) {
  const size_t counters = decoder.task_count();
  for (size_t i = worker.global; i < counters; i += worker.total_threads) decoder.tasks_[i].reset();
  const float scale = config().embedding_scale;
  for (int row = worker.global; row < args.count; row += worker.total_threads) {
    const uint16_t* from = config().embedding + args.tokens[row] * hidden();
    uint16_t* to = buffers().x + row * hidden();
    if (scale == 1) {
      std::memcpy(to, from, 2 * hidden());
    } else {
      for (size_t i = 0; i < hidden(); ++i) to[i] = f32_to_bf16(bf16_to_f32(from[i]) * scale);
    }
  }
}

// Every node norms all rows for itself, and quantises them where a reader wants that; readers have been checked to want
// the same. Whoever norms a row quantises it, which saves a barrier.
void DecodeStep::norm(const Worker& worker, const NormArgs& rows, std::initializer_list<const Linear*> readers) {
  const LinearArgs normed_rows = reads_normed(worker, rows.columns);
  const Linear* quantised = nullptr;
  for (const Linear* reader : readers) {
    if (reader && reader->act() != ActKind::bf16) quantised = reader;
  }
  uint16_t* normed = decoder.node_buffers_[worker.node].normed;
  for (int row = worker.index; row < args.count; row += worker.node_threads) {
    const size_t at = static_cast<size_t>(row) * rows.columns;
    const float mean = isa().sum_of_squares(rows.x + at, rows.columns) / static_cast<float>(rows.columns);
    isa().normalise(rows.x + at, 1 / std::sqrt(mean + rows.eps), rows.weight.data(), rows.columns, normed + at);
    if (quantised) quantised->quantise_piece(worker.node, normed_rows, row, 0, rows.columns);
  }
  worker.node_barrier();
}

LinearArgs DecodeStep::reads_normed(const Worker& worker, int columns) const {
  LinearArgs a;
  a.count = args.count;
  a.input = decoder.node_buffers_[worker.node].normed;
  a.input_pitch = static_cast<size_t>(columns);
  return a;
}

void DecodeStep::to_bf16(const Worker& worker, const Linear* linear, uint16_t* out, int block,
                         DecodePhase phase) const {
  LinearArgs a = reads_normed(worker, linear->config().columns);
  a.bf16 = out;
  a.output_pitch = static_cast<size_t>(linear->config().rows);
  linear->multiply(worker, a, tasks(block, phase, worker.node));
}

void DecodeStep::to_f32(const Worker& worker, const Linear* linear, float* out, size_t pitch, int block,
                        DecodePhase phase) const {
  LinearArgs a = reads_normed(worker, config().hidden);
  a.f32 = out;
  a.output_pitch = pitch;
  linear->multiply(worker, a, tasks(block, phase, worker.node));
}

void DecodeStep::project(const Worker& worker, int block) {
  const BlockConfig& b = config().blocks[block];
  const AttentionConfig& a = b.attention;
  norm(worker, residual(b.attention_norm), {a.q, a.k, a.v});
  to_bf16(worker, a.q, buffers().q, block, kQ);
  to_bf16(worker, a.k, buffers().k, block, kK);
  to_bf16(worker, a.v, buffers().v, block, kV);
  worker.barrier();
}

void DecodeStep::attention(const Worker& worker, int block) {
  const AttentionConfig& a = config().blocks[block].attention;
  a.is_latent() ? project_latents(worker, block) : project(worker, block);
  attend_tasks(worker, block);
  worker.barrier();
  if (is_split(a)) {
    merge_tasks(worker, block);
    worker.barrier();
  }
  if (a.is_latent()) expand_values(worker, block);
  LinearArgs o;
  o.count = args.count;
  o.input = a.is_latent() ? buffers().values : buffers().mixed;
  o.input_pitch = static_cast<size_t>(a.o->config().columns);
  o.bf16 = buffers().x;
  o.output_pitch = o.addend_pitch = hidden();
  o.addend = buffers().x;
  o.row_scales = buffers().residual_scales;
  if (a.o->act() != ActKind::bf16) {
    a.o->quantise(worker, o);
    worker.node_barrier();
  }
  a.o->multiply(worker, o, tasks(block, kO, worker.node));
  worker.barrier();
}

// Piece by piece, so that one row keeps several workers busy; of every node for itself, as in norm().
void DecodeStep::activate(const Worker& worker, const MlpConfig& mlp) {
  const LinearArgs rows = reads_activated(worker, mlp);
  const int columns = mlp.down->config().columns, pieces = div_up(columns, kMaxSpan);
  const size_t pitch = decoder.mlp_pitch_;
  uint16_t* out = decoder.node_buffers_[worker.node].mlp;
  for (int i = worker.index; i < args.count * pieces; i += worker.node_threads) {
    const int row = i / pieces, from = i % pieces * kMaxSpan, to = std::min(columns, from + kMaxSpan);
    const size_t at = row * pitch + from;
    isa().swiglu({buffers().gate + at, buffers().up + at, pitch, kPanelRows, nullptr}, 1, panel_count(to - from), {},
                 out + at, pitch);
    if (mlp.down->act() != ActKind::bf16) mlp.down->quantise_piece(worker.node, rows, row, from, to);
  }
}

LinearArgs DecodeStep::reads_activated(const Worker& worker, const MlpConfig& mlp) const {
  LinearArgs a;
  a.count = args.count;
  a.input = decoder.node_buffers_[worker.node].mlp;
  a.input_pitch = decoder.mlp_pitch_;
  a.bf16 = buffers().x;
  a.output_pitch = a.addend_pitch = hidden();
  a.addend = buffers().x;
  a.row_scales = mlp.scalar ? buffers().scalar : buffers().residual_scales;
  return a;
}

void DecodeStep::mlp(const Worker& worker, int block) {
  const BlockConfig& b = config().blocks[block];
  norm(worker, residual(b.ffn_norm), {b.mlp.gate, b.mlp.up});
  to_f32(worker, b.mlp.gate, buffers().gate, decoder.mlp_pitch_, block, kMlpGate);
  to_f32(worker, b.mlp.up, buffers().up, decoder.mlp_pitch_, block, kMlpUp);
  worker.barrier();
  activate(worker, b.mlp);
  worker.node_barrier();
  b.mlp.down->multiply(worker, reads_activated(worker, b.mlp), tasks(block, kMlpDown, worker.node));
  worker.barrier();
}

void DecodeStep::route_rows(const Worker& worker, const BlockConfig& b) {
  const RouterConfig& r = b.routing;
  for (int row = worker.global; row < args.count; row += worker.total_threads) {
    const size_t at = static_cast<size_t>(row) * r.top_k;
    route(r, buffers().router + static_cast<size_t>(row) * r.num_experts,
          decoder.thread_buffers_[worker.global].routing, buffers().ids + at, buffers().weights + at);
    if (b.mlp.scalar) {
      buffers().scalar[row] = config().residual_scale / (1 + std::exp(-buffers().scalar[row]));
    }
  }
}

void DecodeStep::experts(const Worker& worker, int block) {
  const BlockConfig& b = config().blocks[block];
  norm(worker, residual(b.ffn_norm), {b.mlp.gate, b.mlp.up, b.mlp.scalar});
  to_f32(worker, b.router, buffers().router, b.routing.num_experts, block, kRouter);
  if (b.mlp.scalar) to_f32(worker, b.mlp.scalar, buffers().scalar, 1, block, kScalar);
  if (b.mlp.gate) {
    to_f32(worker, b.mlp.gate, buffers().gate, decoder.mlp_pitch_, block, kMlpGate);
    to_f32(worker, b.mlp.up, buffers().up, decoder.mlp_pitch_, block, kMlpUp);
  }
  worker.barrier();
  route_rows(worker, b);
  if (b.mlp.gate) activate(worker, b.mlp);
  worker.barrier();
  if (worker.global == 0) {
    const Routing routing{buffers().ids, buffers().weights, args.count, b.routing.top_k, 4};
    decoder.experts_.plan(*b.experts, *decoder.workspace_,
                          {routing, decoder.node_buffers_[0].normed, buffers().x, buffers().x});
  }
  if (b.mlp.down) b.mlp.down->multiply(worker, reads_activated(worker, b.mlp), tasks(block, kMlpDown, worker.node));
  worker.barrier();
  decoder.experts_.work(worker);
  worker.barrier();
}

void DecodeStep::head(const Worker& worker) {
  norm(worker, residual(config().final_norm), {config().head});
  LinearArgs a = reads_normed(worker, config().hidden);
  a.f32 = args.logits;
  a.output_pitch = static_cast<size_t>(config().vocabulary);
  a.row_scales = buffers().logit_scales;
  config().head->multiply(worker, a, decoder.head_tasks(worker.node));
}

}  // namespace kt
