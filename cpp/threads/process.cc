#include "threads/process.h"

#include <pthread.h>

#include <atomic>
#include <string>

namespace kt {
namespace {

// How many fork() lie between the process that loaded this library and this one.
std::atomic<uint32_t> generation{0};

// When the library is loaded and not at the first use: a fork() in the middle of that would not be counted. It fails
// only where a few bytes of memory cannot be had.
[[maybe_unused]] const int registered =
    pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

OwnerProcess::OwnerProcess() : generation_(generation.load(std::memory_order_relaxed)) {}

bool OwnerProcess::is_this() const { return generation_ == generation.load(std::memory_order_relaxed); }

Status OwnerProcess::check(const char* what) const {
  if (is_this()) return Status::ok();
  return Status::unsupported(
      std::string("this ") + what +
      " was made before fork(); make a new one in this process, or start the process with spawn");
}

}  // namespace kt
