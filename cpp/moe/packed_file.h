// Packed experts in a file, byte for byte as the nodes hold them.
//
// An expert is kept in parts: the panels of each node and, in layers that have them, its biases. The body begins at
// `begin` and has a region for every part, in the order of Layer::packed_parts, each at a multiple of kPackedAlignment
// from there; a region holds this part of all experts of the file, one after the other without gaps. What is around the
// body, and which experts these are, is the caller's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kt {

// A huge page, so that a file can be mapped as well as read.
constexpr uint64_t kPackedAlignment = uint64_t{2} << 20;

struct PackedFile {
  int fd;
  std::string path;  // for messages
  uint64_t begin;
  int experts;  // in the file
};

// An expert of the file and an expert of the layer.
struct PackedExpert {
  int position;
  int expert;
};

// A part of every expert: panels or biases that one node holds.
struct PackedPart {
  int node;
  int begin;  // columns of the intermediate dimension
  int size;
  size_t bytes;     // of an expert
  uint8_t* memory;  // of expert 0; the others follow without gaps
};

}  // namespace kt
