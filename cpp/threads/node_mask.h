// The node mask of set_mempolicy and mbind. The system calls are made directly: libnuma would be a dependency for two
// calls.
#pragma once

namespace kt {

struct NodeMask {
  static constexpr int kBits = 1024;  // the largest MAX_NUMNODES of a mainline kernel
  static constexpr int kWordBits = 8 * sizeof(unsigned long);
  unsigned long words[kBits / kWordBits] = {};

  bool set(int node) {
    if (node < 0 || node >= kBits) return false;
    words[node / kWordBits] |= 1ul << (node % kWordBits);
    return true;
  }
};

}  // namespace kt
