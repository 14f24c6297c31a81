#include "runtime/call.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace kt {
namespace {

constexpr uint16_t kNan = 0x7fc0;

int64_t id_at(const Call& call, size_t i) {
  if (call.id_bytes == 4) return reinterpret_cast<const int32_t*>(call.stage->ids())[i];
  return reinterpret_cast<const int64_t*>(call.stage->ids())[i];
}

Status forward(const Call& call, const uint8_t* skip, const uint16_t* addend, uint16_t* output) {
  const Stage& stage = *call.stage;
  const Routing routing{stage.ids(), stage.weights(), call.tokens, stage.size().top_k, call.id_bytes};
  Status status = call.layer->forward({routing, stage.input(), output, addend, skip});
  if (!status.is_ok()) std::fill_n(output, static_cast<size_t>(call.tokens) * stage.size().hidden, kNan);
  return status;
}

}  // namespace

void split_experts(const Call& call) {
  CallScratch& scratch = *call.scratch;
  const int experts = call.layer->config().num_experts, top_k = call.stage->size().top_k;
  const int kept = std::max(0, top_k - call.deferred_experts);
  std::fill_n(scratch.now.begin(), experts, uint8_t{1});
  std::fill_n(scratch.later.begin(), experts, uint8_t{0});
  for (int t = 0; t < call.tokens; ++t) {
    const size_t row = static_cast<size_t>(t) * top_k;
    const float* weights = call.stage->weights() + row;
    const auto begin = scratch.order.begin(), end = begin + top_k;
    std::iota(begin, end, 0);
    // Ties go to the earlier slot; a NaN counts as largest, so that it is not put off.
    const auto key = [&](int slot) {
      return std::isnan(weights[slot]) ? std::numeric_limits<float>::infinity() : weights[slot];
    };
    std::partial_sort(begin, begin + kept, end,
                      [&](int a, int b) { return key(a) != key(b) ? key(a) > key(b) : a < b; });
    for (auto slot = begin; slot != begin + kept; ++slot) {
      const int64_t id = id_at(call, row + *slot);
      if (id < 0 || id >= experts) continue;
      scratch.now[id] = 0;
      scratch.later[id] = 1;
    }
  }
}

Status run_due(const Call& call) {
  if (call.deferred_experts > 0) split_experts(call);
  const uint8_t* skip = call.deferred_experts > 0 ? call.scratch->now.data() : nullptr;
  const uint16_t* addend = call.taken_over ? call.taken_over->deferred() : nullptr;
  return call.stage->status = forward(call, skip, addend, call.stage->output());
}

void tell(const Call& call) {
  call.stage->done().store(1, std::memory_order_release);
  call.stage->finished.advance();
}

Status run_deferred(const Call& call) {
  if (call.deferred_experts == 0) return Status::ok();
  return call.stage->deferred_status = forward(call, call.scratch->later.data(), nullptr, call.stage->deferred());
}

}  // namespace kt
