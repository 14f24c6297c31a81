// Pages of mapped files.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kt {

// Maps the pages of a part of some bytes of a mapped file at once: page by page a fault costs as much as packing what
// the page holds. A hint; where the kernel lacks it, faults do it.
void map_part(const uint8_t* data, size_t bytes, int part, int parts);

}  // namespace kt
