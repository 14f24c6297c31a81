// The MoE layers of one model as their callers see them: calls in flight, the host memory they use, and what a layer
// leaves to the next one.
//
// Host memory is never shared by calls that could overlap. A stage belongs to the plain calls, to a stream, or to a
// stream in the capture of a graph; a call takes a free one of its owner and its sync gives it back. Within a stream,
// and within a branch of a graph, that is right without waiting for anybody: the next call's copies come after this
// one's.
//
// The queue's thread takes the mutex for every call. So nobody holds it who calls the driver: pinning and unpinning
// memory may wait for the GPU, and the GPU for the queue.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "cuda/lease.h"
#include "runtime/call.h"
#include "runtime/queue.h"
#include "runtime/stage.h"

namespace kt {

// Who may use a stage.
struct StageOwner {
  enum class Kind { host, stream, capture } kind = Kind::host;
  uint64_t context = 0;     // of the GPU: handles such as 0 are the same on each
  uint64_t stream = 0;      // handle; streams captured into one graph are branches of it, which run side by side
  cuda::LeaseId lease = 0;  // of the capture
  bool operator==(const StageOwner&) const = default;
};

// What a layer leaves to the next one: the deferred rows of a stage.
struct Left {
  StageOwner owner;
  int layer_idx = 0;
  int tokens = 0;
  Stage* stage = nullptr;  // null: nothing
};

class Session {
 public:
  Session(Queue* queue, int hidden, int top_k) : queue_(queue), hidden_(hidden), top_k_(top_k) {}
  // After its ports, after the graphs that were captured with them, and after the copies that its streams still have to
  // make: it frees the memory they read.
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  Queue& queue() { return *queue_; }
  int hidden() const { return hidden_; }
  int top_k() const { return top_k_; }

  // The layers a caller has; the last one leaves nothing for later, since there would be no next.
  void add_layer(int layer_idx);
  void remove_layer(int layer_idx);
  bool is_last(int layer_idx) const;

  Status acquire(const StageOwner& owner, const cuda::Driver* driver, int tokens, bool deferring, Stage** out);
  // One who uses it less (acquire made the first); the last one leaves it to its owner's next call.
  void release(Stage* stage);
  // The same without the certainty that its calls have run: it is free when they have.
  void abandon(Stage* stage);

  // What an earlier layer of this pass left to this one. The caller releases the stage after its sync. An error if the
  // rows are of another number of tokens.
  Status take_deferred(const StageOwner& owner, int layer_idx, int tokens, Left* out);
  // As if it had not been taken: the call was not made.
  void put_back(const Left& left);
  void leave_deferred(const Left& left);

  // A call that can run: its number, which a bell carries. One that is not of a capture is gone when it has run.
  uint32_t add_call(const Call& call, const StageOwner& owner);
  // Puts it on the queue.
  void submit(uint32_t number);
  // For a callback in a stream: ring_call(call_context(number)) rings its bell.
  void* call_context(uint32_t number);
  static void ring_call(void* call_context);
  // Drops a call that was never started.
  void drop_call(uint32_t number);
  // Waits until no call that the host submitted needs the layer.
  void finish_calls_of(const Layer* layer);

  // The first error of a call in a stream since the last time somebody asked.
  Status take_error();

  // Frees what the capture used; its graphs are gone. Waits for a call of theirs that the queue has not ended.
  void end_lease(cuda::LeaseId lease);
  // Frees the stages of plain calls that nobody uses, and those of streams if these have nothing left to do: otherwise
  // one may still have to copy out of them. A graph may run again.
  void clear_stages(bool streams_idle);
  size_t stage_count() const;

 private:
  struct Entry {
    std::unique_ptr<Stage> stage;
    StageOwner owner;
    int users = 0;
    bool abandoned = false;
  };
  struct Slot {  // of the table of calls
    Call call;
    StageOwner owner;
    Session* session = nullptr;
    uint32_t number = 0;
    bool used = false;
  };

  static void ring(void* session, uint32_t number);
  static Status run_task(void* slot);
  void run_slot(Slot& slot);
  void keep_error(const StageOwner& owner, Status status);
  // Of the stages that a call uses.
  static void count(const Call& call, int change);
  void free_call(Slot& slot);
  Entry* find(const Stage* stage);
  Stage* find_free(const StageOwner& owner, int tokens, bool deferring);
  // Takes those out of the list that a condition is true of.
  std::vector<Entry> take_entries(const std::function<bool(const Entry&)>& condition);
  // No bell of theirs is heard any more when it returns. Without the mutex: a call that runs needs it.
  void remove_bells(const std::vector<Entry>& entries);

  Queue* queue_;
  int hidden_;
  int top_k_;

  mutable std::mutex mutex_;
  std::vector<int> layers_;  // indices, sorted
  std::vector<Entry> stages_;
  std::deque<Slot> calls_;  // number i is calls_[i - 1]; addresses stay
  std::vector<uint32_t> free_calls_;
  std::vector<Left> left_;
  Status error_;
};

}  // namespace kt
