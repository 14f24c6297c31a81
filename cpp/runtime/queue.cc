#include "runtime/queue.h"

#include <pthread.h>

#include <algorithm>
#include <bit>
#include <cassert>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

#include "threads/thread.h"

namespace kt {
namespace {

constexpr uint64_t kNobody = std::numeric_limits<uint64_t>::max();
constexpr int kMaxCapacity = 1 << 20;
// A thread that naps 1 ms at a time uses 0.3 % of a core; a bell that rings meanwhile is heard that much later.
constexpr int64_t kShortestNapNs = 50'000, kLongestNapNs = 1'000'000;

static_assert(std::is_same_v<pthread_t, unsigned long>);

}  // namespace

Queue::Queue(const QueueConfig& config)
    : spin_budget_(int64_t{config.spin_us} * 1000),
      mask_(std::bit_ceil(static_cast<uint64_t>(config.capacity)) - 1),
      slots_(std::make_unique<Slot[]>(mask_ + 1)),
      has_cpu_(config.cpu >= 0),
      wake_at_(kNobody) {
  sync_policy_.budget_ns = int64_t{config.sync_spin_us} * 1000;
}

Status Queue::create(const QueueConfig& config, std::unique_ptr<Queue>* out) {
  out->reset();
  if (config.capacity < 1 || config.capacity > kMaxCapacity) {
    return Status::invalid("a queue of " + std::to_string(config.capacity) + " tasks is not possible; use 1 to " +
                           std::to_string(kMaxCapacity));
  }
  if (config.spin_us < 0 || config.sync_spin_us < 0) {
    return Status::invalid("spin times are " + std::to_string(config.spin_us) + " and " +
                           std::to_string(config.sync_spin_us) + " us; pass 0 or more");
  }
  std::unique_ptr<Queue> queue(new Queue(config));
  KT_RETURN_IF_ERROR(
      start_thread({thread_main, queue.get(), "kt-queue", config.cpu}, &queue->thread_, &queue->pinned_));
  queue->started_ = true;
  *out = std::move(queue);
  return Status::ok();
}

Queue::~Queue() {
  if (!started_ || !owner_.is_this()) return;
  stop_.store(true, std::memory_order_relaxed);  // published by the gate
  {
    const std::lock_guard<std::mutex> lock(submit_mutex_);
    work_.bump();
  }
  work_.wake();
  pthread_join(thread_, nullptr);
}

bool Queue::try_submit(Task task, void* context) {
  if (!owner_.is_this()) return false;
  {
    const std::lock_guard<std::mutex> lock(submit_mutex_);
    const uint64_t index = submitted_.load(std::memory_order_relaxed);
    if (index - finished_.load(std::memory_order_acquire) > mask_) return false;
    slots_[index & mask_] = {task, context};
    submitted_.store(index + 1, std::memory_order_release);
    work_.bump();
  }
  work_.wake();
  return true;
}

void Queue::submit(Task task, void* context) {
  while (!try_submit(task, context) && owner_.is_this()) {
    // Full when read, or fuller by now: the slot of task `submitted` is free once task `submitted - capacity` is done.
    wait_finished(submitted_.load(std::memory_order_acquire) - mask_);
  }
}

void Queue::wait(int allow_n_pending) {
  const uint64_t submitted = submitted_.load(std::memory_order_acquire);
  const uint64_t allowed = allow_n_pending > 0 ? static_cast<uint64_t>(allow_n_pending) : 0;
  if (submitted > allowed) wait_finished(submitted - allowed);
}

Status Queue::sync(int allow_n_pending) {
  KT_RETURN_IF_ERROR(usable());
  wait(allow_n_pending);
  if (!has_error_.load(std::memory_order_acquire)) return Status::ok();
  const std::lock_guard<std::mutex> lock(error_mutex_);
  has_error_.store(false, std::memory_order_relaxed);
  return std::exchange(error_, Status::ok());
}

int Queue::pending() const {
  const uint64_t finished = finished_.load(std::memory_order_acquire);  // first: the difference is never negative
  return static_cast<int>(submitted_.load(std::memory_order_acquire) - finished);
}

void Queue::wait_finished(uint64_t target) {
  assert(pthread_equal(pthread_self(), thread_) == 0 && "a task cannot wait for the queue that runs it");
  const auto reached = [&] { return finished_.load(std::memory_order_seq_cst) >= target; };
  if (spin_until(reached, sync_policy_)) return;
  for (;;) {
    // The epoch before the registration: finish() first withdraws wake_at_, then advances, so a registration that it
    // withdrew unseen is followed by a new epoch and the sleep below returns at once.
    const uint32_t seen = progress_.epoch();
    uint64_t registered = wake_at_.load(std::memory_order_seq_cst);
    while (target < registered && !wake_at_.compare_exchange_weak(registered, target, std::memory_order_seq_cst)) {
    }
    if (reached()) return;
    progress_.wait(seen, SpinPolicy{});
    if (reached()) return;
  }
}

void Queue::finish(uint64_t finished, Status status) {
  if (!status.is_ok()) {
    const std::lock_guard<std::mutex> lock(error_mutex_);
    if (error_.is_ok()) error_ = std::move(status);
    has_error_.store(true, std::memory_order_release);
  }
  finished_.store(finished, std::memory_order_seq_cst);
  if (finished >= wake_at_.load(std::memory_order_seq_cst)) {
    wake_at_.store(kNobody, std::memory_order_seq_cst);
    progress_.advance();
  }
}

void Queue::add_bell(std::atomic<uint32_t>* word, Ring ring, void* context) {
  {
    const std::lock_guard<std::mutex> lock(bells_mutex_);
    bells_.push_back({word, ring, context});
    has_bells_.store(true, std::memory_order_release);
  }
  expect_bell();
}

void Queue::remove_bell(const std::atomic<uint32_t>* word) {
  assert(pthread_equal(pthread_self(), thread_) == 0 && "a ring() cannot wait for its own end");
  std::unique_lock<std::mutex> lock(bells_mutex_);
  std::erase_if(bells_, [&](const Bell& bell) { return bell.word == word; });
  has_bells_.store(!bells_.empty(), std::memory_order_release);
  rung_.wait(lock, [&] { return ringing_ != word; });
}

void Queue::expect_bell() {
  {
    const std::lock_guard<std::mutex> lock(submit_mutex_);
    work_.bump();
  }
  work_.wake();
}

bool Queue::bell_rings() {
  if (!has_bells_.load(std::memory_order_acquire)) return false;
  const std::lock_guard<std::mutex> lock(bells_mutex_);
  for (const Bell& bell : bells_) {
    if (bell.word->load(std::memory_order_relaxed) != 0) return true;
  }
  return false;
}

bool Queue::answer_bell() {
  if (!has_bells_.load(std::memory_order_acquire)) return false;
  Bell rung{};
  uint32_t value = 0;
  {
    const std::lock_guard<std::mutex> lock(bells_mutex_);
    for (size_t i = 0; i < bells_.size() && value == 0; ++i) {
      rung = bells_[next_bell_++ % bells_.size()];
      value = rung.word->load(std::memory_order_acquire);
    }
    if (value == 0) return false;
    next_bell_ %= bells_.size();
    rung.word->store(0, std::memory_order_relaxed);
    ringing_ = rung.word;
  }
  rung.ring(rung.context, value);
  {
    const std::lock_guard<std::mutex> lock(bells_mutex_);
    ringing_ = nullptr;
  }
  rung_.notify_all();
  return true;
}

void Queue::wait_for_work(uint32_t seen) {
  const auto ready = [&] { return work_.epoch() != seen || bell_rings(); };
  const int64_t start_ns = monotonic_ns();
  if (!spin_until(ready, {.budget_ns = spin_budget_.ns()})) {
    for (int64_t nap_ns = kShortestNapNs; !ready(); nap_ns = std::min(2 * nap_ns, kLongestNapNs)) {
      if (!has_bells_.load(std::memory_order_acquire)) return work_.wait(seen, SpinPolicy{});
      work_.sleep_for(seen, nap_ns);
    }
  }
  if (work_.epoch() == seen) spin_budget_.add_wait(monotonic_ns() - start_ns);
}

void Queue::loop() {
  uint64_t next = 0;
  for (;;) {
    const uint32_t seen = work_.epoch();  // before the look at the ring: a submit after it ends the wait
    const bool has_task = next != submitted_.load(std::memory_order_acquire);
    if (has_task) {
      const Slot slot = slots_[next & mask_];
      finish(++next, slot.task(slot.context));
    }
    // After a task too: somebody who always has another one must not keep a GPU waiting.
    if (answer_bell() || has_task) continue;
    if (stop_.load(std::memory_order_relaxed)) return;
    wait_for_work(seen);
  }
}

void* Queue::thread_main(void* argument) {
  auto* queue = static_cast<Queue*>(argument);
  if (queue->has_cpu_) ask_short_slices();
  queue->loop();
  return nullptr;
}

}  // namespace kt
