#include "runtime/session.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

namespace kt {
namespace {

constexpr int kSmallestStage = 16;  // tokens

// A graph's stages are as large as it needs. Others serve many sizes, so that a few are enough.
int capacity_for(const StageOwner& owner, int tokens) {
  if (owner.kind == StageOwner::Kind::capture) return std::max(1, tokens);
  return static_cast<int>(std::bit_ceil(static_cast<unsigned>(std::max(kSmallestStage, tokens))));
}

}  // namespace

Session::~Session() {
  if (!queue_->usable().is_ok()) return;
  remove_bells(stages_);  // every port has waited for its calls
}

void Session::add_layer(int layer_idx) {
  const std::lock_guard lock(mutex_);
  layers_.insert(std::upper_bound(layers_.begin(), layers_.end(), layer_idx), layer_idx);
}

void Session::remove_layer(int layer_idx) {
  const std::lock_guard lock(mutex_);
  const auto found = std::lower_bound(layers_.begin(), layers_.end(), layer_idx);
  if (found != layers_.end() && *found == layer_idx) layers_.erase(found);
}

bool Session::is_last(int layer_idx) const {
  const std::lock_guard lock(mutex_);
  return layers_.empty() || layer_idx >= layers_.back();
}

Session::Entry* Session::find(const Stage* stage) {
  for (Entry& entry : stages_) {
    if (entry.stage.get() == stage) return &entry;
  }
  return nullptr;
}

void Session::remove_bells(const std::vector<Entry>& entries) {
  for (const Entry& entry : entries) {
    if (entry.owner.kind != StageOwner::Kind::host) queue_->remove_bell(&entry.stage->bell());
  }
}

std::vector<Session::Entry> Session::take_entries(const std::function<bool(const Entry&)>& condition) {
  std::vector<Entry> taken;
  for (Entry& entry : stages_) {
    if (condition(entry)) taken.push_back(std::move(entry));
  }
  std::erase_if(stages_, [](const Entry& entry) { return !entry.stage; });
  return taken;
}

Stage* Session::find_free(const StageOwner& owner, int tokens, bool deferring) {
  const auto usable = [&](const Entry& entry) {
    const StageSize& size = entry.stage->size();
    if (entry.users != 0 || entry.owner != owner || size.tokens < tokens || size.deferring < deferring) return false;
    return !entry.abandoned ||
           (owner.kind != StageOwner::Kind::capture && entry.stage->running.load(std::memory_order_acquire) == 0);
  };
  Entry* best = nullptr;
  for (Entry& entry : stages_) {
    if (usable(entry) && (!best || entry.stage->size().tokens < best->stage->size().tokens)) best = &entry;
  }
  if (!best) return nullptr;
  best->abandoned = false;
  best->users = 1;
  return best->stage.get();
}

Status Session::acquire(const StageOwner& owner, const cuda::Driver* driver, int tokens, bool deferring, Stage** out) {
  {
    const std::lock_guard lock(mutex_);
    if ((*out = find_free(owner, tokens, deferring))) return Status::ok();
  }
  std::unique_ptr<Stage> stage;
  KT_RETURN_IF_ERROR(Stage::create({capacity_for(owner, tokens), top_k_, hidden_, deferring}, driver, &stage));
  if (owner.kind != StageOwner::Kind::host) queue_->add_bell(&stage->bell(), ring, this);
  *out = stage.get();
  const std::lock_guard lock(mutex_);
  stages_.push_back({std::move(stage), owner, 1});
  return Status::ok();
}

void Session::release(Stage* stage) {
  const std::lock_guard lock(mutex_);
  if (Entry* entry = find(stage)) --entry->users;
}

void Session::abandon(Stage* stage) {
  const std::lock_guard lock(mutex_);
  if (Entry* entry = find(stage)) {
    --entry->users;
    entry->abandoned = true;
  }
}

Status Session::take_deferred(const StageOwner& owner, int layer_idx, int tokens, Left* out) {
  *out = {};
  Left left;
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(left_.begin(), left_.end(), [&](const Left& l) { return l.owner == owner; });
    if (found == left_.end()) return Status::ok();
    left = *found;
    left_.erase(found);
  }
  if (left.layer_idx < layer_idx && left.tokens == tokens) {
    *out = left;
    return Status::ok();
  }
  abandon(left.stage);
  if (left.layer_idx >= layer_idx) return Status::ok();  // a new pass: the one that left it was given up
  return Status::invalid("layer " + std::to_string(left.layer_idx) + " deferred experts of " +
                         std::to_string(left.tokens) + " tokens to the next layer, but layer " +
                         std::to_string(layer_idx) + " was called with " + std::to_string(tokens) +
                         "; call the layers of a pass with the same tokens, or set max_deferred_experts_per_token=0");
}

void Session::put_back(const Left& left) {
  const std::lock_guard lock(mutex_);
  left_.push_back(left);
}

void Session::leave_deferred(const Left& left) {
  const std::lock_guard lock(mutex_);
  left_.push_back(left);
  ++find(left.stage)->users;
}

void Session::count(const Call& call, int change) {
  call.stage->running.fetch_add(change, std::memory_order_acq_rel);
  if (call.taken_over) call.taken_over->running.fetch_add(change, std::memory_order_acq_rel);
}

uint32_t Session::add_call(const Call& call, const StageOwner& owner) {
  const std::lock_guard lock(mutex_);
  if (free_calls_.empty()) {
    Slot& slot = calls_.emplace_back();
    slot.session = this;
    slot.number = static_cast<uint32_t>(calls_.size());
    free_calls_.push_back(slot.number);
  }
  const uint32_t number = free_calls_.back();
  free_calls_.pop_back();
  Slot& slot = calls_[number - 1];
  slot.call = call;
  slot.owner = owner;
  slot.used = true;
  if (owner.kind != StageOwner::Kind::capture) count(call, 1);
  return number;
}

void Session::free_call(Slot& slot) {
  if (slot.owner.kind != StageOwner::Kind::capture) count(slot.call, -1);
  slot.used = false;
  free_calls_.push_back(slot.number);
}

void Session::drop_call(uint32_t number) {
  const std::lock_guard lock(mutex_);
  free_call(calls_[number - 1]);
}

void Session::finish_calls_of(const Layer* layer) {
  const auto running = [&] {
    const std::lock_guard lock(mutex_);
    return std::any_of(calls_.begin(), calls_.end(), [&](const Slot& slot) {
      return slot.used && slot.call.layer == layer && slot.owner.kind != StageOwner::Kind::capture;
    });
  };
  while (running()) yield_core();
}

void Session::submit(uint32_t number) { queue_->submit(run_task, call_context(number)); }

void* Session::call_context(uint32_t number) {
  const std::lock_guard lock(mutex_);
  return &calls_[number - 1];
}

// When the bell has rung the call may be over, and with it the session.
void Session::ring_call(void* call_context) {
  const Slot& slot = *static_cast<Slot*>(call_context);
  Queue* const queue = slot.session->queue_;
  slot.call.stage->done().store(0, std::memory_order_relaxed);
  slot.call.stage->bell().store(slot.number, std::memory_order_release);
  queue->expect_bell();
}

void Session::ring(void* session, uint32_t number) {
  Session& self = *static_cast<Session*>(session);
  Slot* slot;
  {
    const std::lock_guard lock(self.mutex_);
    if (number > self.calls_.size()) return;
    slot = &self.calls_[number - 1];
  }
  self.run_slot(*slot);
}

// The error is kept by the session or the stage; on the queue it would surface at somebody else's sync.
Status Session::run_task(void* slot) {
  static_cast<Slot*>(slot)->session->run_slot(*static_cast<Slot*>(slot));
  return Status::ok();
}

// An error is kept before anybody is told: who has waited for the output finds it.
void Session::run_slot(Slot& slot) {
  keep_error(slot.owner, run_due(slot.call));
  tell(slot.call);
  keep_error(slot.owner, run_deferred(slot.call));
  if (slot.owner.kind != StageOwner::Kind::host) slot.call.layer->pool().set_spin_ns(queue_->spin_ns());
  if (slot.owner.kind == StageOwner::Kind::capture) return;
  const std::lock_guard lock(mutex_);
  free_call(slot);
}

// Those of the host stay in the stage, for its sync.
void Session::keep_error(const StageOwner& owner, Status status) {
  if (status.is_ok() || owner.kind == StageOwner::Kind::host) return;
  const std::lock_guard lock(mutex_);
  if (error_.is_ok()) error_ = std::move(status);
}

Status Session::take_error() {
  const std::lock_guard lock(mutex_);
  return std::exchange(error_, Status::ok());
}

void Session::end_lease(cuda::LeaseId lease) {
  const auto ended = [&](const auto& one) {
    return one.owner.kind == StageOwner::Kind::capture && one.owner.lease == lease;
  };
  std::vector<Entry> entries;  // freed when the mutex is free again
  {
    const std::lock_guard lock(mutex_);
    entries = take_entries(ended);
    std::erase_if(left_, ended);
  }
  remove_bells(entries);
  const std::lock_guard lock(mutex_);
  for (Slot& slot : calls_) {
    if (slot.used && ended(slot)) free_call(slot);
  }
}

void Session::clear_stages(bool streams_idle) {
  std::vector<Entry> entries;
  {
    const std::lock_guard lock(mutex_);
    entries = take_entries([&](const Entry& entry) {
      const StageOwner::Kind kind = entry.owner.kind;
      return (kind == StageOwner::Kind::host || (kind == StageOwner::Kind::stream && streams_idle)) &&
             entry.users == 0 && entry.stage->running.load(std::memory_order_acquire) == 0;
    });
  }
  remove_bells(entries);
}

size_t Session::stage_count() const {
  const std::lock_guard lock(mutex_);
  return stages_.size();
}

}  // namespace kt
