// Which process a thread belongs to. fork() copies the memory of a pool but none of its threads, and its mutexes in
// whatever state they were: whoever waits for either in the child waits for ever.
#pragma once

#include <cstdint>

#include "base/status.h"

namespace kt {

// Remembers the process it was made in. Ask before taking a lock or waiting for a thread.
class OwnerProcess {
 public:
  OwnerProcess();
  // A load and a comparison: fork() counts, getpid() would be a system call every time.
  bool is_this() const;
  // An error that says what to do if not; `what` is the thing that was made.
  Status check(const char* what) const;

 private:
  uint32_t generation_;
};

}  // namespace kt
