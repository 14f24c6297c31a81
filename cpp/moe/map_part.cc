#include "moe/map_part.h"

#include <sys/mman.h>
#include <unistd.h>

namespace kt {

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14
#endif

void map_part(const uint8_t* data, size_t bytes, int part, int parts) {
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), at = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (at + bytes * part / parts) / page * page;
  const uintptr_t end = (at + bytes * (part + 1) / parts + page - 1) / page * page;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_READ);
}

}  // namespace kt
