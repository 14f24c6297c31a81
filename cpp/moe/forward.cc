#include "moe/forward.h"

#include <optional>

#include "moe/forward_pass.h"

namespace kt {

ForwardPass::ForwardPass(Layer& l, Workspace& w, const ForwardArgs& a)
    : layer(l),
      workspace(w),
      args(a),
      isa(*l.isa_),
      act(l.act()),
      plan(w.plan()),
      quantised(act != ActKind::bf16),
      hidden(l.config_.hidden),
      input_rows(l.kernels(kUp), plan, GatheredRows::Rows::tokens, tokens()),
      hidden_rows(l.kernels(kDown), plan, GatheredRows::Rows::pairs, plan.pairs()),
      blocks(down_blocks()),
      regions(many_rows() ? lay_out_regions() : Regions{}) {
  for (int i = 0; i < w.pool().node_count(); ++i) {
    if (!quantised) continue;
    const int span = many_rows() ? isa.many_rows_span : kActGroup;
    w.node(i).input.layout(act, tokens(), hidden, span);
    w.node(i).hidden_quantised.layout(act, plan.pairs() + kRowUnit, l.shards_[i].size, span);
  }
}

int ForwardPass::most_threads() const {
  int threads = 1;
  for (int i = 0; i < workspace.pool().node_count(); ++i) {
    threads = std::max(threads, workspace.pool().node(i).threads);
  }
  return threads;
}

void ForwardPass::work(const Worker& worker) {
  Workspace::Node& n = node(worker);
  if (quantised) {
    quantise_rows(isa, act, worker, args.input, hidden, tokens(), hidden, n.input);
    worker.node_barrier();
  } else if (gathers_input()) {
    input_rows.gather(worker, input_acts(), hidden, n);
    worker.node_barrier();
  }
  gate_up(worker);
  if (!follows()) {
    worker.node_barrier();
    make_hidden_rows(worker);
  }
  if (regions.count > 0) {
    down_by_region(worker);
  } else {
    down_by_block(worker);
  }
  if (!alone()) {
    worker.barrier();
    add_nodes(worker);
  }
}

// All intermediate rows as down takes them.
void ForwardPass::make_hidden_rows(const Worker& worker) const {
  const int size = shard(worker).size;
  if (quantised) {
    quantise_rows(isa, act, worker, hidden_data(worker), hidden_pitch(size), plan.pairs(), size,
                  node(worker).hidden_quantised);
    worker.node_barrier();
  } else if (hidden_rows.any()) {
    hidden_rows.gather(worker, hidden_acts(worker), size, node(worker));
    worker.node_barrier();
  }
}

Status run_forward(Layer& layer, Workspace& workspace, const ForwardArgs& args) {
  workspace.plan().build(args.routing);
  ForwardPass pass(layer, workspace, args);
  return workspace.pool().run(
      [](void* context, const Worker& worker) { static_cast<ForwardPass*>(context)->work(worker); }, &pass);
}

struct PlannedForward::Impl {
  ForwardArgs args;
  std::optional<ForwardPass> pass;
};

PlannedForward::PlannedForward() : impl_(std::make_unique<Impl>()) {}
PlannedForward::~PlannedForward() = default;

void PlannedForward::plan(Layer& layer, Workspace& workspace, const ForwardArgs& args) {
  impl_->args = args;
  workspace.plan().leave_out(layer.config().num_experts, layer.mask(), args.skip);
  workspace.plan().build(args.routing);
  impl_->pass.emplace(layer, workspace, impl_->args);
}

void PlannedForward::work(const Worker& worker) { impl_->pass->work(worker); }

}  // namespace kt
