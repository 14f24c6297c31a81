// Layer::load_grouped: codes and scales of a checkpoint go into the panels as they are.
#include <algorithm>
#include <atomic>
#include <string>

#include "moe/layer.h"
#include "moe/map_part.h"

namespace kt {
namespace {

// A worker's part of the codes of a matrix.
void map_codes(const GroupedMatrix& m, int rows, int k, int part, int parts) {
  const int pieces = m.order == CodeOrder::rows ? rows : m.order == CodeOrder::gptq ? div_up(k, 8) : k;
  map_part(m.codes, static_cast<size_t>(pieces) * m.code_pitch, part, parts);
}

Status status_of(const GroupedKind& kind, unsigned faults) {
  if (!faults) return Status::ok();
  const int first = __builtin_ctz(faults) / kFaultBits;
  const unsigned fault = faults >> first * kFaultBits;
  const std::string name = kMatrixNames[first];
  const std::string hint = ": the file is damaged, or encoded in another way";
  if (fault & kCodeFault) return Status::invalid("codes of " + name + " mean NaN (0x7F) in places" + hint);
  if (fault & kZeroFault) return Status::invalid("zeros of " + name + " are above 16 in places" + hint);
  const bool e4m3 = !(fault & kRowFault) && kind.scales == Scales::e4m3;
  return Status::invalid((fault & kRowFault ? "factors of the rows of " : "scales of ") + name +
                         (e4m3 ? " are negative or NaN in places" : " are NaN, infinite, or 2^90 and more in places") +
                         hint);
}

}  // namespace

int Layer::grouped_units(const Shard& shard, const GroupedExpert& weights) const {
  return div_up(panel_count(shard.size), panels_together(weights.gate.order)) +
         div_up(panel_count(shard.size), panels_together(weights.up.order)) +
         div_up(panel_count(config_.hidden), panels_together(weights.down.order));
}

unsigned Layer::pack_grouped_unit(const Shard& shard, int expert, const GroupedExpert& weights, int unit) const {
  const GroupedKind& kind = *grouped_kind(config_.format());
  const int H = config_.hidden, pairs = panel_count(shard.size);
  const GroupedMatrix* gate_up[] = {&weights.gate, &weights.up};
  for (const Matrix matrix : {kGate, kUp}) {
    const int together = panels_together(gate_up[matrix]->order), units = div_up(pairs, together);
    if (unit < units) {
      const int row = unit * together * kPanelRows;
      return pack_matrix(kind, *gate_up[matrix], config_.group, shard.begin + row,
                         std::min(together * kPanelRows, shard.size - row), 0, H, panel_groups_[matrix],
                         panel(shard, expert, matrix, unit * together), 2 * panel_size(matrix, shard))
             << matrix * kFaultBits;
    }
    unit -= units;
  }
  const int together = panels_together(weights.down.order), row = unit * together * kPanelRows;
  return pack_matrix(kind, weights.down, config_.group, row, std::min(together * kPanelRows, H - row), shard.begin,
                     shard.begin + shard.size, panel_groups_[kDown], panel(shard, expert, kDown, unit * together),
                     panel_size(kDown, shard))
         << 2 * kFaultBits;
}

Status Layer::load_grouped(int expert, const GroupedExpert& weights) {
  KT_RETURN_IF_ERROR(check_expert(expert));
  if (!config_.one_format() || !is_checkpoint(config_.format())) {
    return Status::invalid(std::string("a layer of ") + format_name(config_.format()) +
                           " cannot take the codes of a checkpoint");
  }
  struct Context {
    const Layer* layer;
    int expert;
    const GroupedExpert* weights;
    std::atomic<unsigned> faults;
  } context{this, expert, &weights, 0};
  KT_RETURN_IF_ERROR(workspace_->pool().usable());
  if (weights.columns) {
    has_columns_.store(true, std::memory_order_relaxed);
    KT_RETURN_IF_ERROR(workspace_->ensure(needs()));
  }
  const std::lock_guard lock(workspace_->mutex());
  unset_loaded(expert, kWeights);
  KT_RETURN_IF_ERROR(workspace_->pool().run(
      [](void* c, const Worker& worker) {
        Context& job = *static_cast<Context*>(c);
        const Shard& shard = job.layer->shards_[worker.node];
        const LayerConfig& config = job.layer->config_;
        map_codes(job.weights->gate, config.intermediate, config.hidden, worker.global, worker.total_threads);
        map_codes(job.weights->up, config.intermediate, config.hidden, worker.global, worker.total_threads);
        map_codes(job.weights->down, config.hidden, config.intermediate, worker.global, worker.total_threads);
        const int units = job.layer->grouped_units(shard, *job.weights);
        unsigned faults = 0;
        // Neighbours, so that a worker finds the next unit in L2 and the pages of a file have one reader.
        const int begin = units * worker.index / worker.node_threads;
        const int end = units * (worker.index + 1) / worker.node_threads;
        for (int unit = begin; unit < end; ++unit)
          faults |= job.layer->pack_grouped_unit(shard, job.expert, *job.weights, unit);
        if (faults) job.faults.fetch_or(faults, std::memory_order_relaxed);
      },
      &context));
  KT_RETURN_IF_ERROR(status_of(*grouped_kind(config_.format()), context.faults.load(std::memory_order_relaxed)));
  if (weights.columns) columns_[expert].assign(weights.columns, weights.columns + config_.hidden);
  scale_rows_[expert] = {weights.gate.block_rows, weights.up.block_rows, weights.down.block_rows};
  set_loaded(expert);
  return Status::ok();
}

}  // namespace kt
