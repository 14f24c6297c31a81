// Layer::load_codes: codes go into the panels as they are.
//
// The one exception: a node that holds columns of several parts of down has several scales for a row and room for one.
// int8 rows are then quantised again from code * scale in f32; int4 would lose too much and is refused.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "formats/codes.h"
#include "formats/int4g.h"
#include "moe/layer.h"

namespace kt {
namespace {

// A rectangle of a projection whose parts lie side by side along rows or columns.
struct PartView {
  const CodedPart* part;
  int rows;  // of the part
  int k;
  CodeBlock block;  // in the part
  int to_row;       // in the panel
  int to_k;
};

float scale_of(const CodedPart& part, int row) {
  float d;
  std::memcpy(&d, part.scales + static_cast<size_t>(row) * 4, 4);
  return d;
}

void read_view(Format format, const CodeLayout& layout, const PartView& view, PanelCodes* to) {
  const CodeBlock& b = view.block;
  layout.read(view.part->codes, view.rows, view.k, b, to->row(view.to_row) + view.to_k, to->pitch);
  for (int r = 0; r < b.rows; ++r) {
    to->scales[view.to_row + r] = scale_of(*view.part, b.row + r);
    if (!has_steps(format)) continue;
    const uint8_t* steps = view.part->steps + static_cast<size_t>(b.row + r) * div_up(view.k, Int4g::kGroup);
    std::copy(steps + b.k0 / Int4g::kGroup, steps + div_up(b.k1, Int4g::kGroup),
              to->row_steps(view.to_row + r) + view.to_k / Int4g::kGroup);
  }
}

// Row n of int8 codes, read from several views with a scale each, gets one scale.
void unite_scales(const std::vector<PartView>& views, int n, PanelCodes* panel) {
  const auto scale = [&](const PartView& view) { return scale_of(*view.part, view.block.row + n); };
  const auto same = [&](const PartView& view) { return scale(view) == scale(views.front()); };
  if (std::all_of(views.begin(), views.end(), same)) return;
  std::vector<float> w(panel->k);
  float largest = 0;
  bool finite = true;
  for (const PartView& view : views) {
    finite &= std::isfinite(scale(view));
    for (int i = 0; i < view.block.k1 - view.block.k0; ++i) {
      const int k = view.to_k + i;
      w[k] = scale(view) * static_cast<float>(panel->row(n)[k]);
      largest = std::max(largest, std::fabs(w[k]));
    }
  }
  const float d = finite ? largest / 127.0f : std::nanf("");
  const float inverse = d >= 1e-37f ? 1.0f / d : 0.0f;
  panel->scales[n] = d;
  for (int k = 0; k < panel->k; ++k) panel->row(n)[k] = static_cast<int8_t>(std::lrintf(w[k] * inverse));
}

// Rows row..row+rows of gate or up.
void read_rows(Format format, const CodeLayout& layout, const std::vector<CodedPart>& parts, int total_rows, int k,
               int row, int rows, PanelCodes* to) {
  const int part_rows = total_rows / static_cast<int>(parts.size());
  to->reset(k);
  for (int done = 0; done < rows;) {
    const int part = (row + done) / part_rows, local = (row + done) % part_rows;
    const int count = std::min(rows - done, part_rows - local);
    read_view(format, layout, {&parts[part], part_rows, k, {local, count, 0, k}, done, 0}, to);
    done += count;
  }
}

// Columns k0..k1 of rows row..row+rows of down.
void read_columns(Format format, const CodeLayout& layout, const std::vector<CodedPart>& parts, int total_rows,
                  int total_k, CodeBlock block, PanelCodes* to) {
  const int part_k = total_k / static_cast<int>(parts.size());
  std::vector<PartView> views;
  to->reset(block.k1 - block.k0);
  for (int k = block.k0; k < block.k1;) {
    const int part = k / part_k, local = k % part_k;
    const int count = std::min(block.k1 - k, part_k - local);
    views.push_back({&parts[part], total_rows, part_k, {block.row, block.rows, local, local + count}, 0, k - block.k0});
    read_view(format, layout, views.back(), to);
    k += count;
  }
  if (views.size() == 1) return;
  for (int n = 0; n < block.rows; ++n) unite_scales(views, n, to);
}

Status check_steps(const char* name, const std::vector<CodedPart>& parts, int rows, int k) {
  for (const CodedPart& part : parts) {
    const size_t count = static_cast<size_t>(rows) * div_up(k, Int4g::kGroup);
    const uint8_t* bad = std::find_if(part.steps, part.steps + count, [](uint8_t s) { return s < 1 || s > 16; });
    if (bad != part.steps + count) {
      return Status::invalid(std::string("a step of ") + name + " is " + std::to_string(*bad) +
                             "; steps are 1..16. The file is damaged: convert the weights again");
    }
  }
  return Status::ok();
}

}  // namespace

Status Layer::check_cut(const CodedExpert& coded) const {
  const int H = config_.hidden, I = config_.intermediate;
  const int parts = static_cast<int>(coded.gate.size()), unit = coded.layout->unit;
  const std::string name = format_name(config_.format());
  if (coded.layout->code_bits != code_bits(config_.format()) || (has_steps(config_.format()) && unit != 1)) {
    return Status::invalid("a layer of " + name + " cannot take codes of the layout '" + coded.layout->name + "'");
  }
  if (parts < 1 || coded.up.size() != coded.gate.size() || coded.down.size() != coded.gate.size()) {
    return Status::invalid("gate, up and down must have equally many parts, at least one");
  }
  if (unit == 1 && parts > 1) {
    return Status::invalid(std::string("codes of the layout '") + coded.layout->name +
                           "' are not cut: each projection is a list of one part");
  }
  if (I % parts || H % unit || I / parts % unit) {
    return Status::invalid(name + " codes in " + std::to_string(parts) + " part(s) of the layout '" +
                           coded.layout->name + "' need hidden_size (" + std::to_string(H) +
                           ") and intermediate_size / parts (" + std::to_string(I) + " / " + std::to_string(parts) +
                           ") to be multiples of " + std::to_string(unit) + "; convert the weights again");
  }
  if (code_bits(config_.format()) == 4) {
    for (const Shard& shard : shards_) {
      if (shard.begin / (I / parts) == (shard.begin + shard.size - 1) / (I / parts)) continue;
      const std::string n = std::to_string(parts);
      return Status::invalid("these " + name + " weights were converted for threadpool_count=" + n +
                             " and this pool has " + std::to_string(shards_.size()) +
                             " node(s): a row of down would have several scales on one node. Use threadpool_count=" +
                             n + ", or convert the weights again");
    }
  }
  return Status::ok();
}

void Layer::pack_coded_panel(const Shard& shard, int expert, const CodedExpert& coded, int position,
                             PanelCodes* codes) const {
  const Format format = config_.format();
  const int H = config_.hidden, I = config_.intermediate;
  int index;
  const Matrix matrix = panel_of(shard, position, &index);
  const int row = index * kPanelRows;
  if (matrix == kDown) {
    read_columns(format, *coded.layout, coded.down, H, I,
                 {row, std::min(kPanelRows, H - row), shard.begin, shard.begin + shard.size}, codes);
  } else {
    read_rows(format, *coded.layout, matrix == kUp ? coded.up : coded.gate, I, H, shard.begin + row,
              std::min(kPanelRows, shard.size - row), codes);
  }
  put_codes(format, *codes, panel(shard, expert, matrix, index));
}

Status Layer::load_codes(int expert, const CodedExpert& coded) {
  KT_RETURN_IF_ERROR(check_expert(expert));
  if (!gated()) return Status::invalid("experts without gates are made from bf16 weights, not from codes");
  KT_RETURN_IF_ERROR(check_cut(coded));
  if (has_steps(config_.format())) {
    KT_RETURN_IF_ERROR(check_steps("gate", coded.gate, config_.intermediate, config_.hidden));
    KT_RETURN_IF_ERROR(check_steps("up", coded.up, config_.intermediate, config_.hidden));
    KT_RETURN_IF_ERROR(check_steps("down", coded.down, config_.hidden, config_.intermediate));
  }
  struct Context {
    const Layer* layer;
    int expert;
    const CodedExpert* coded;
  } context{this, expert, &coded};
  KT_RETURN_IF_ERROR(workspace_->pool().usable());
  const std::lock_guard lock(workspace_->mutex());
  const Status packed = workspace_->pool().run(
      [](void* c, const Worker& worker) {
        const Context& job = *static_cast<Context*>(c);
        const Shard& shard = job.layer->shards_[worker.node];
        PanelCodes codes;
        for (int p = worker.index; p < job.layer->panel_total(shard); p += worker.node_threads)
          job.layer->pack_coded_panel(shard, job.expert, *job.coded, p, &codes);
      },
      &context);
  if (packed.is_ok()) set_loaded(expert);
  return packed;
}

}  // namespace kt
