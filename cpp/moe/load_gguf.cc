// Layer::load_gguf: blocks of a GGUF file go into the panels as they are.
#include <algorithm>
#include <atomic>
#include <string>

#include "formats/gguf.h"
#include "moe/layer.h"
#include "moe/map_part.h"

namespace kt {

bool Layer::pack_gguf_panel(const Shard& shard, int expert, Matrix matrix, int index, const GgufExpert::Rows& rows,
                            GroupedPanel* scratch) const {
  const bool down = matrix == kDown;
  const int row = index * kPanelRows, count = std::min(kPanelRows, (down ? config_.hidden : shard.size) - row);
  const int k0 = down ? shard.begin : 0, k1 = k0 + depth(matrix, shard);
  const uint8_t* from = rows.data + static_cast<size_t>(row + (down ? 0 : shard.begin)) * rows.pitch;
  uint8_t* out = panel(shard, expert, matrix, index);
  if (config_.formats[matrix] != Format::bf16)
    return pack_gguf(config_.formats[matrix], from, rows.pitch, count, k0, k1, scratch, out);
  kernels(matrix).pack(reinterpret_cast<const uint16_t*>(from) + k0, rows.pitch / 2, count, k1 - k0, out);
  return true;
}

Status Layer::load_gguf(int expert, const GgufExpert& weights) {
  KT_RETURN_IF_ERROR(check_expert(expert));
  for (const Format format : config_.formats) {
    if (gguf_block(format).weights) continue;
    return Status::invalid(std::string("a layer of ") + format_name(format) + " cannot take blocks of GGUF");
  }
  struct Context {
    const Layer* layer;
    int expert;
    const GgufExpert* weights;
    std::atomic<unsigned> faults;  // a bit for each matrix
  } context{this, expert, &weights, 0};
  KT_RETURN_IF_ERROR(workspace_->pool().usable());
  const std::lock_guard lock(workspace_->mutex());
  unset_loaded(expert, kWeights);
  KT_RETURN_IF_ERROR(workspace_->pool().run(
      [](void* c, const Worker& worker) {
        Context& job = *static_cast<Context*>(c);
        const Layer& layer = *job.layer;
        const Shard& shard = layer.shards_[worker.node];
        for (const Matrix matrix : {kGate, kUp, kDown}) {
          const GgufExpert::Rows& rows = job.weights->matrices[matrix];
          const int count = matrix == kDown ? layer.config_.hidden : layer.config_.intermediate;
          map_part(rows.data, static_cast<size_t>(count) * rows.pitch, worker.global, worker.total_threads);
        }
        GroupedPanel scratch;
        // Neighbours, so that the pages of a file have one reader.
        const int total = layer.panel_total(shard);
        const int begin = total * worker.index / worker.node_threads;
        const int end = total * (worker.index + 1) / worker.node_threads;
        for (int p = begin; p < end; ++p) {
          int index;
          const Matrix matrix = layer.panel_of(shard, p, &index);
          if (!layer.pack_gguf_panel(shard, job.expert, matrix, index, job.weights->matrices[matrix], &scratch))
            job.faults.fetch_or(1u << matrix, std::memory_order_relaxed);
        }
      },
      &context));
  if (const unsigned faults = context.faults.load(std::memory_order_relaxed)) {
    return Status::invalid(std::string("scales of ") + kMatrixNames[__builtin_ctz(faults)] +
                           " are NaN or infinite in places: the file is damaged");
  }
  set_loaded(expert);
  return Status::ok();
}

}  // namespace kt
