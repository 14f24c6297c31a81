#include "threads/numa_buffer.h"

#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "check.h"

namespace {

using kt::NumaBuffer;
using kt::Status;

constexpr size_t kMiB = size_t{1} << 20;

KT_TEST(numa_buffer_is_zeroed_aligned_and_writable) {
  for (size_t bytes : {size_t{1}, size_t{4096}, size_t{4097}, kMiB, 2 * kMiB, 2 * kMiB + 1, 5 * kMiB + 123}) {
    for (int numa_id : {-1, 0, 1023}) {  // 1023: no such node; not an error
      NumaBuffer buffer;
      KT_CHECK(NumaBuffer::allocate(bytes, numa_id, &buffer).is_ok());
      KT_CHECK(buffer.size() == bytes);
      const auto address = reinterpret_cast<uintptr_t>(buffer.data());
      KT_CHECK(address % 4096 == 0);
      if (bytes > 2 * kMiB) KT_CHECK(address % (2 * kMiB) == 0);
      if (numa_id != 0) KT_CHECK(!buffer.bound());
      uint8_t any = 0;
      for (size_t i = 0; i < bytes; ++i) any |= buffer.data()[i];
      KT_CHECK(any == 0);
      for (size_t i = 0; i < bytes; i += 4096) buffer.data()[i] = 1;
      buffer.data()[bytes - 1] = 2;
    }
  }
}

KT_TEST(numa_buffer_moves) {
  NumaBuffer a, b;
  KT_CHECK(NumaBuffer::allocate(100, -1, &a).is_ok());
  KT_CHECK(NumaBuffer::allocate(200, -1, &b).is_ok());
  uint8_t* const data = a.data();
  data[99] = 7;
  b = std::move(a);
  KT_CHECK(b.data() == data && b.size() == 100 && b.data()[99] == 7);
  KT_CHECK(a.data() == nullptr && a.size() == 0);
  NumaBuffer c(std::move(b));
  KT_CHECK(c.data() == data && b.data() == nullptr);
  NumaBuffer& same = c;
  c = std::move(same);
  KT_CHECK(c.data() == data && c.size() == 100);
  KT_CHECK(NumaBuffer::allocate(0, -1, &c).is_ok());
  KT_CHECK(c.data() == nullptr && c.size() == 0);
}

KT_TEST(numa_buffer_says_what_it_could_not_get) {
  for (size_t bytes : {size_t{1} << 60, std::numeric_limits<size_t>::max()}) {
    NumaBuffer buffer;
    const Status status = NumaBuffer::allocate(bytes, -1, &buffer);
    KT_CHECK(status.code() == Status::Code::system);
    KT_CHECK(status.message().find(std::to_string(bytes)) != std::string::npos);
    KT_CHECK(buffer.data() == nullptr);
  }
}

}  // namespace
