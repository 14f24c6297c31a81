#include "threads/gate.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <cstdio>

namespace kt {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the kernel reads the epoch as a plain 32-bit word");

int64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

void yield_core() { sched_yield(); }

int64_t waited_for_core_ns() {
  const int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
  if (file < 0) return -1;
  char text[96];  // three numbers: ran, waited (both ns), how often
  const ssize_t length = read(file, text, sizeof(text) - 1);
  close(file);
  if (length <= 0) return -1;
  text[length] = 0;
  long long ran, waited;
  return std::sscanf(text, "%lld %lld", &ran, &waited) == 2 ? waited : -1;
}

void Gate::sleep(uint32_t old) {
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  // Signals and wakes meant for an earlier epoch return early: hence the loop.
  while (epoch_.load(std::memory_order_seq_cst) == old) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&epoch_), FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
  }
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

bool Gate::sleep_for(uint32_t old, int64_t ns) {
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  const timespec timeout{static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  if (epoch_.load(std::memory_order_seq_cst) == old) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&epoch_), FUTEX_WAIT_PRIVATE, old, &timeout, nullptr, 0);
  }
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
  return epoch() != old;
}

void Gate::wake_sleepers() {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&epoch_), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace kt
