// Memory for kernels under test: the last legal byte is followed by a page that faults, and the bytes in front of the
// first one are a pattern that is checked. A fault prints what was running.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace kt_test {

inline char running[256] = "?";

inline void report_fault(int) {
  const char text[] = "\nFAULT: a kernel left its buffers, or wrote to an input, in: ";
  [[maybe_unused]] ssize_t n = write(STDOUT_FILENO, text, sizeof(text) - 1);
  n = write(STDOUT_FILENO, running, strlen(running));
  n = write(STDOUT_FILENO, "\n", 1);
  _exit(1);
}

// Names what runs next; the sanitizers keep their own handler, which prints the stack.
template <class... Args>
void now_running(const char* format, Args... args) {
#if !defined(__SANITIZE_ADDRESS__)
  static const bool installed = signal(SIGSEGV, report_fault) != SIG_ERR;
  (void)installed;
#endif
  std::snprintf(running, sizeof(running), format, args...);
}

template <class T>
class Guarded {
 public:
  explicit Guarded(size_t count) : count_(count) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t data_bytes = (count * sizeof(T) + kFront + page - 1) / page * page;
    map_bytes_ = data_bytes + page;
    void* map = mmap(nullptr, map_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED || mprotect(static_cast<uint8_t*>(map) + data_bytes, page, PROT_NONE) != 0) {
      std::printf("no memory for a guarded buffer of %zu bytes\n", count * sizeof(T));
      std::exit(1);
    }
    map_ = static_cast<uint8_t*>(map);
    data_ = reinterpret_cast<T*>(map_ + data_bytes - count * sizeof(T));
    // A kernel that reads what it should not gets NaN or huge integers.
    std::memset(map_, kPattern, data_bytes);
  }
  ~Guarded() { munmap(map_, map_bytes_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return count_; }
  size_t bytes() const { return count_ * sizeof(T); }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  T* begin() { return data_; }
  T* end() { return data_ + count_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + count_; }

  // From here on writing faults.
  void seal() { mprotect(map_, map_bytes_ - static_cast<size_t>(sysconf(_SC_PAGESIZE)), PROT_READ); }

  bool front_intact() const {
    for (const uint8_t* p = reinterpret_cast<const uint8_t*>(data_) - kFront;
         p < reinterpret_cast<const uint8_t*>(data_); ++p) {
      if (*p != kPattern) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kFront = 128;
  static constexpr uint8_t kPattern = 0xff;
  uint8_t* map_;
  T* data_;
  size_t count_;
  size_t map_bytes_;
};

}  // namespace kt_test
