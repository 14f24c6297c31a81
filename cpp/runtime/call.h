// One forward of one layer on staged tokens, as the queue runs it.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "moe/layer.h"
#include "runtime/stage.h"

namespace kt {

// Bytes per expert that a call needs when it defers some; for one call at a time.
struct CallScratch {
  CallScratch(int num_experts, int top_k) : now(num_experts), later(num_experts), order(top_k) {}
  std::vector<uint8_t> now, later;  // non-zero = skip
  std::vector<int> order;
};

// Lives until it has run, or as long as a graph that was captured with it.
struct Call {
  Layer* layer = nullptr;
  Stage* stage = nullptr;
  int tokens = 0;
  int id_bytes = 8;
  // Experts per token that may be left for later: 0 = none. An expert among the others of any token is done at once for
  // all tokens.
  int deferred_experts = 0;
  CallScratch* scratch = nullptr;  // null when it defers none
  Stage* taken_over = nullptr;     // whose deferred rows are added: of the layer before
};

// Which experts a call does at once and which later, from its routing; into its scratch.
void split_experts(const Call& call);

// The steps of a call: what is due at once, telling whoever waits for it, what was deferred. After an error the rows
// hold NaN: whoever goes on in spite of it must not get numbers.
Status run_due(const Call& call);
void tell(const Call& call);
Status run_deferred(const Call& call);

}  // namespace kt
