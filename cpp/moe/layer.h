// One MoE layer: its experts packed on every node, and the forward pass.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "formats/codes.h"
#include "formats/format.h"
#include "formats/grouped_panel.h"
#include "kernels/kernel.h"
#include "moe/coded_expert.h"
#include "moe/grouped_expert.h"
#include "moe/packed_file.h"
#include "moe/workspace.h"
#include "moe/write_slices.h"
#include "threads/numa_buffer.h"
#include "threads/pool.h"

namespace kt {

enum Matrix : int { kGate, kUp, kDown };
constexpr const char* kMatrixNames[] = {"gate", "up", "down"};

struct LayerConfig {
  // Of gate, up and down. Only the types of GGUF may differ.
  Format formats[3] = {Format::bf16, Format::bf16, Format::bf16};
  int num_experts = 0;
  int top_k = 0;
  int hidden = 0;        // H
  int intermediate = 0;  // I, of the whole layer
  int max_tokens = 0;    // of one forward call
  Activation activation;
  bool biases = false;  // experts have biases, see ExpertBiases
  int group = 0;        // k that share a scale, of checkpoint formats that have group scales; else unused

  bool one_format() const { return formats[kGate] == formats[kUp] && formats[kGate] == formats[kDown]; }
  // Of layers that have one.
  Format format() const { return formats[kGate]; }
  void set_format(Format format) { formats[kGate] = formats[kUp] = formats[kDown] = format; }
};

// bf16 weights of one expert, row-major: gate and up [I, H], down [H, I]. Without gates, gate is null.
struct ExpertWeights {
  const uint16_t* gate;
  const uint16_t* up;
  const uint16_t* down;
};

// An expert of a GGUF file: rows of blocks (formats/gguf.h), `pitch` bytes apart.
struct GgufExpert {
  struct Rows {
    const uint8_t* data;
    size_t pitch;
  };
  Rows matrices[3];
};

// y = gate x + gate bias, and so on; f32 [I], [I], [H].
struct ExpertBiases {
  const float* gate;
  const float* up;
  const float* down;
};

// out[t] = addend[t] + sum over j of weights[t, j] * FFN_ids[t, j](x[t]), rounded once.
struct ForwardArgs {
  Routing routing;
  const uint16_t* input;             // bf16 [tokens][H]
  uint16_t* output;                  // bf16 [tokens][H]
  const uint16_t* addend = nullptr;  // bf16 [tokens][H]; null: nothing, output: its old content
  const uint8_t* skip = nullptr;  // [num_experts]; an expert whose byte is not 0 is skipped in this call; may be null
};

class Layer {
 public:
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  static Status create(std::shared_ptr<Workspace> workspace, const IsaTable* isa, const LayerConfig& config,
                       std::unique_ptr<Layer>* out);

  // Packs one expert with all workers. Blocking; waits for a forward that runs. This, fill_random and forward are
  // errors in a child forked after the pool was made.
  Status load_expert(int expert, const ExpertWeights& weights);
  // The same from codes of this layer's format, which are kept as they are (load_codes.cc tells the one exception).
  Status load_codes(int expert, const CodedExpert& coded);
  // Packs one expert from the codes and scales of a checkpoint, of this layer's format. After an error the expert has
  // no weights.
  Status load_grouped(int expert, const GroupedExpert& weights);
  // Packs one expert from the blocks of a GGUF file, of the types that are this layer's formats. After an error the
  // expert has no weights.
  Status load_gguf(int expert, const GgufExpert& weights);
  // Whether load_codes can take this layout in so many parts; looks at no address.
  Status check_cut(const CodedExpert& coded) const;
  // Of a layer that was made for them: each of its experts needs biases and weights, in any order. Without this rule an
  // expert whose biases were forgotten would compute something plausible.
  Status load_biases(int expert, const ExpertBiases& biases);
  // Random weights for measurements, about N(0, 1/K). Biases stay as they are; at first they are 0.
  Status fill_random(uint64_t seed);
  // Weights as the kernels see them, f32 row-major: gate and up [I, H], down [H, I]. Without gates, gate is not
  // written.
  Status decode_expert(int expert, float* gate, float* up, float* down) const;

  // Packed experts to a file and back (packed_file.cc), by all workers. Blocking; waits for a forward that runs.
  // checksums: of every expert in the list, part by part.
  Status write_packed(const PackedFile& file, const std::vector<PackedExpert>& experts,
                      std::vector<uint64_t>* checksums);
  // After an error the experts of the list count as not loaded. Invalid: the file is cut short or damaged.
  Status read_packed(const PackedFile& file, const std::vector<PackedExpert>& experts,
                     const std::vector<uint64_t>& checksums);
  std::vector<PackedPart> packed_parts() const;
  uint64_t packed_bytes(int experts) const;  // of a body with so many experts

  // Writes one expert for the ranks of a GPU, with all workers, whatever the mask says; write_slices.h tells what a
  // rank gets. Blocking, as load_expert. Allocates nothing.
  Status write_slices(int expert, const SliceBuffers* ranks, int rank_count);
  // The error that write_slices would return for its arguments; looks at no weights.
  Status check_slices(int expert, int ranks) const;
  // What a rank's buffers must have room for.
  Status slice_bytes(int expert, int ranks, int rank, SliceBytes* out) const;
  // Known of experts that load_grouped got; a file of packed experts has to keep it beside them.
  Status scale_rows(int expert, ScaleRows* out) const;
  Status set_scale_rows(int expert, const ScaleRows& rows);

  // Allocates nothing. One forward at a time runs per workspace; others wait. An error, before anything is computed,
  // where an expert that is needed has no weights.
  Status forward(const ForwardArgs& args);

  // mask()[e] != 0: expert e is skipped. Read at the start of every forward.
  uint8_t* mask() { return mask_.data(); }
  const LayerConfig& config() const { return config_; }
  Pool& pool() const { return workspace_->pool(); }
  size_t expert_bytes() const;
  // Whether an expert takes the columns of the input in an order of its own, which packed files do not hold.
  bool has_columns() const { return has_columns_.load(std::memory_order_relaxed); }
  // Experts that were given all they need.
  int loaded_experts() const { return loaded_count_.load(std::memory_order_relaxed); }

 private:
  friend struct ForwardPass;
  friend struct SliceWriter;

  // The part of the intermediate dimension that one node holds.
  struct Shard {
    int begin = 0;
    int size = 0;
    size_t gate_up_bytes = 0;  // of an expert: see Layer::panel
    size_t down_bytes = 0;
    NumaBuffer weights;
    // f32 of an expert: gate and up in the order of the panels' rows, then down, on the first node only, so that it is
    // added once. Rows are padded to whole panels with 0. Empty without biases.
    size_t gate_up_biases = 0;
    size_t down_biases = 0;
    NumaBuffer biases;

    uint8_t* expert(int e) const { return weights.data() + static_cast<size_t>(e) * (gate_up_bytes + down_bytes); }
    // Null where there is none.
    float* gate_up_bias(int e) const { return gate_up_biases ? bias(e) : nullptr; }
    float* down_bias(int e) const { return down_biases ? bias(e) + gate_up_biases : nullptr; }
    float* bias(int e) const { return reinterpret_cast<float*>(biases.data()) + e * (gate_up_biases + down_biases); }
  };

  Layer(std::shared_ptr<Workspace> workspace, const IsaTable* isa, const LayerConfig& config);
  Status split();
  int panel_group(Format format) const;
  WorkspaceNeeds needs() const;
  // Of the panels; their group may be smaller than that of the checkpoint.
  WeightFormat format(Matrix matrix) const { return {config_.formats[matrix], panel_groups_[matrix]}; }
  const FormatKernels& kernels(Matrix matrix) const { return isa_->formats[static_cast<int>(config_.formats[matrix])]; }
  // All formats of a layer read the same activations.
  ActKind act() const { return kernels(kGate).act; }
  int depth(Matrix matrix, const Shard& shard) const { return matrix == kDown ? shard.size : config_.hidden; }
  int panels(Matrix matrix, const Shard& shard) const {
    return panel_count(matrix == kDown ? config_.hidden : shard.size);
  }
  size_t panel_size(Matrix matrix, const Shard& shard) const {
    return panel_bytes(format(matrix), depth(matrix, shard));
  }
  // Without gates an expert has no gate matrix.
  bool gated() const { return config_.activation.gated(); }
  // Whether each panel of gate lies before its panel of up, so that a task reads one stream; else, with different
  // formats, all of gate lie before all of up.
  bool paired() const { return config_.formats[kGate] == config_.formats[kUp]; }
  uint8_t* panel(const Shard& shard, int expert, Matrix matrix, int index) const;
  // Panels of an expert on a node are counted through gate, up and down.
  int panel_total(const Shard& shard) const {
    return (gated() ? 2 : 1) * panel_count(shard.size) + panel_count(config_.hidden);
  }
  Matrix panel_of(const Shard& shard, int position, int* index) const;
  Status check_expert(int expert) const;
  Status check_scale_rows(int expert) const;
  Status allocate_biases(int node);
  enum Part : uint8_t { kWeights = 1, kBiases = 2 };
  void set_loaded(int expert, Part part = kWeights);
  void unset_loaded(int expert, uint8_t parts = kWeights | kBiases);
  Status check_packed(const PackedFile& file, const std::vector<PackedExpert>& experts) const;
  Status copy_packed(const PackedFile& file, const std::vector<PackedExpert>& experts, bool to_file,
                     std::vector<uint64_t>* checksums);
  Status check_loaded(const Routing& routing) const;
  void pack_panel(const Shard& shard, int expert, const ExpertWeights& weights, int position) const;
  // Whether all scales are finite.
  bool pack_gguf_panel(const Shard& shard, int expert, Matrix matrix, int index, const GgufExpert::Rows& rows,
                       GroupedPanel* scratch) const;
  // A unit is a few panels of one matrix, see panels_together. Faults of gate, up and down have kFaultBits each.
  int grouped_units(const Shard& shard, const GroupedExpert& weights) const;
  unsigned pack_grouped_unit(const Shard& shard, int expert, const GroupedExpert& weights, int unit) const;
  void fill_random_panel(Matrix matrix, int k, uint64_t* state, std::vector<uint16_t>* rows, GroupedPanel* codes,
                         uint8_t* panel) const;
  void pack_coded_panel(const Shard& shard, int expert, const CodedExpert& coded, int position,
                        PanelCodes* codes) const;

  std::shared_ptr<Workspace> workspace_;
  const IsaTable* isa_;
  LayerConfig config_;
  int panel_groups_[3] = {};
  int chunk_tokens_;  // tokens of one pass; longer inputs take several
  std::vector<Shard> shards_;
  // Of each expert, see GroupedExpert::columns; empty: in order. Guarded by the workspace's mutex.
  std::vector<std::vector<int32_t>> columns_;
  std::atomic<bool> has_columns_{false};
  std::vector<uint8_t> mask_;
  // Of each expert; guarded by the workspace's mutex.
  std::vector<uint8_t> loaded_;
  std::vector<uint8_t> parts_;  // what it was given
  std::vector<ScaleRows> scale_rows_;
  std::atomic<int> loaded_count_{0};
};

}  // namespace kt
