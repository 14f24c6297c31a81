// Where one layer's tokens go in and come out: submit, then sync, on host memory or in the order of a CUDA stream.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "base/status.h"
#include "cuda/driver.h"
#include "cuda/lease.h"
#include "runtime/session.h"

namespace kt {

// Addresses of contiguous memory: of the host for submit(), of the device for submit_on().
struct Tokens {
  int count = 0;
  uint64_t input = 0;    // bf16 [count][H]
  uint64_t ids = 0;      // [count][top_k]
  uint64_t weights = 0;  // f32 [count][top_k]
  int id_bytes = 8;
};

class Port {
 public:
  // deferred_experts: see Call. The session and the layer must outlive the port.
  static Status create(Session* session, Layer* layer, int layer_idx, int deferred_experts, std::unique_ptr<Port>* out);
  // Waits for calls that were submitted by the host.
  ~Port();
  Port(const Port&) = delete;
  Port& operator=(const Port&) = delete;

  // Copies the tokens and returns; they are computed meanwhile. A call that was never synced is given up.
  Status submit(const Tokens& tokens);
  // Waits, then copies bf16 [tokens][H] to output. keep_waiting is asked every 50 ms; false ends the wait with an
  // error, and sync() may be called again.
  Status sync(int tokens, uint64_t output, const std::function<bool()>& keep_waiting);

  // The same in the order of a stream, returning at once. *lease != 0: the stream is being captured into a graph, and
  // this port and all behind it must live until that lease has ended. Errors of a call that ran meanwhile are returned
  // by the next submit_on or sync_on of the session.
  Status submit_on(const cuda::Driver& driver, cuda::Stream stream, const Tokens& tokens, cuda::LeaseId* lease);
  Status sync_on(const cuda::Driver& driver, cuda::Stream stream, int tokens, uint64_t output);

  bool in_flight() const { return stage_ != nullptr; }

 private:
  Port(Session* session, Layer* layer, int layer_idx, int deferred_experts);

  Status check(const Tokens& tokens) const;
  // Takes a stage and makes the call; what follows brings the tokens there and starts it, then started() or undo().
  Status begin(const StageOwner& owner, const cuda::Driver* driver, const Tokens& tokens);
  // The tokens into the stage and the bell rung, in the order of the stream.
  Status send(const cuda::Driver& driver, cuda::Stream stream, const Tokens& tokens);
  void started();
  void undo();
  Status check_sync(int tokens, bool in_stream) const;
  // After sync: stages go back to their owner.
  void end();
  void give_up();

  Session* session_;
  Layer* layer_;
  int layer_idx_;
  int deferred_experts_;
  std::unique_ptr<CallScratch> scratch_;

  // The call in flight.
  Stage* stage_ = nullptr;
  Left taken_over_;  // what the layer before left; its stage is released together with stage_
  StageOwner owner_;
  int tokens_ = 0;
  bool defers_ = false;
  uint32_t number_ = 0;
  uint32_t epoch_ = 0;  // of stage_->finished before the call
};

}  // namespace kt
