// One thread that runs tasks in the order of submission. A task calls Pool::run and so is worker 0 of the pool: while
// it computes, the threads that submit and sync need no core.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "threads/gate.h"
#include "threads/process.h"
#include "threads/spin_budget.h"

namespace kt {

struct QueueConfig {
  int cpu = -1;         // pins the queue's thread; give it the CPU of the pool's worker 0. -1 = float
  int capacity = 1024;  // tasks that can be pending; rounded up to a power of two
  int spin_us = 500;    // how long the idle thread waits for a task before it parks; for bells see spin_ns()
  // How long sync() spins before it sleeps. 0, because with as many workers as cores the spinner takes its core from
  // one of them: a job of 67 us on 2 cores takes 71.5 us through the queue, and 102 us when sync() spins for 20 us or
  // more.
  int sync_spin_us = 0;
};

class Queue {
 public:
  // Must not throw. An error is kept for sync(); later tasks run all the same.
  using Task = Status (*)(void* context);

  static Status create(const QueueConfig& config, std::unique_ptr<Queue>* out);
  // Finishes what was submitted. Nobody may be in submit() or sync() any more.
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  // From any thread but the queue's own, also from a CUDA host callback: no allocation, one short lock among
  // submitters, at most one system call (when the thread is parked). `context` must live until the task has run.
  // When `capacity` tasks are pending it waits for one to finish. In a child forked after the queue was made it does
  // nothing: there is no thread to run the task, and sync() says so.
  void submit(Task task, void* context);
  // False instead of waiting, and in a forked child. This one a task may call too.
  bool try_submit(Task task, void* context);

  // A word that someone who cannot call submit() writes: a GPU. Whenever it is not 0 the queue's thread sets it to 0
  // and calls ring(context, value). It looks at them after every task, and one bell after the other has its turn. While
  // there are bells an idle thread looks at them every millisecond at least, after the time in which it spins, which is
  // as long as bells let it wait lately (SpinBudget): a nap that begins too early costs a decode step up to its length.
  using Ring = void (*)(void* context, uint32_t value);
  void add_bell(std::atomic<uint32_t>* word, Ring ring, void* context);
  // Nobody may write to it any more. Returns when a ring() that has begun has ended: not from a ring().
  void remove_bell(const std::atomic<uint32_t>* word);
  // A bell is about to be rung: the thread spins for it as if it had just been busy.
  void expect_bell();
  // How long the idle thread spins for a bell now.
  int64_t spin_ns() const { return spin_budget_.ns(); }

  // Waits until at most `allow_n_pending` of the tasks submitted before this call are unfinished. Returns, once, the
  // first error since the last sync; in a forked child always the error that the thread is missing. Not from a task: it
  // would wait for itself.
  Status sync(int allow_n_pending = 0);
  // The same, leaving the error to the next sync.
  void wait(int allow_n_pending = 0);

  // An error in a process forked after the queue was made: its thread is not there.
  Status usable() const { return owner_.check("queue"); }
  int pending() const;
  bool pinned() const { return pinned_; }
  // Whether the thread sleeps in the kernel, for tests and for `doctor`.
  bool parked() const { return work_.sleepers() != 0; }

 private:
  struct Slot {
    Task task;
    void* context;
  };

  explicit Queue(const QueueConfig& config);
  struct Bell {
    std::atomic<uint32_t>* word;
    Ring ring;
    void* context;
  };

  static void* thread_main(void* argument);
  void loop();
  bool answer_bell();
  bool bell_rings();
  void wait_for_work(uint32_t seen);
  void finish(uint64_t finished, Status status);
  void wait_finished(uint64_t target);

  SpinBudget spin_budget_;
  SpinPolicy sync_policy_;
  uint64_t mask_ = 0;
  std::unique_ptr<Slot[]> slots_;  // task i lives in slot i & mask_
  unsigned long thread_ = 0;       // pthread_t
  bool has_cpu_ = false;           // a CPU was named, so the thread is meant to have it alone
  bool started_ = false;
  bool pinned_ = false;
  OwnerProcess owner_;

  alignas(128) std::mutex submit_mutex_;
  std::atomic<uint64_t> submitted_{0};
  std::atomic<bool> stop_{false};
  alignas(128) Gate work_;  // advanced by submitters, watched by the thread

  std::mutex bells_mutex_;  // uncontended: 15 ns in a look at all bells
  std::vector<Bell> bells_;
  size_t next_bell_ = 0;                            // where the next look begins
  const std::atomic<uint32_t>* ringing_ = nullptr;  // whose ring() runs
  std::condition_variable rung_;
  std::atomic<bool> has_bells_{false};

  alignas(128) std::atomic<uint64_t> finished_{0};
  // The smallest count somebody sleeps for: the thread makes no system call before it is reached, so sync(0) after 60
  // submits is woken once, not 60 times.
  std::atomic<uint64_t> wake_at_;
  Gate progress_;
  std::atomic<bool> has_error_{false};
  std::mutex error_mutex_;
  Status error_;
};

}  // namespace kt
