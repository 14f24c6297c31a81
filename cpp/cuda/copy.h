// Stream-ordered copies between device memory and pinned host memory.
#pragma once

#include <span>

#include "cuda/driver.h"

namespace kt::cuda {

struct Piece {
  uint64_t to;
  uint64_t from;
  size_t bytes;
};

enum class Direction { to_host, to_device };

// Copies up to three pieces. Small ones go by one kernel that reads and writes across the bus, which spares the copy
// engine's start for each piece: a round trip of one token of 7168 takes 17 us and not 25, of 64 tokens 47 and not 58;
// from 512 tokens on (290 us) the engine is as fast. The kernel needs the module of this context: prepare() loads it.
Status copy(const Driver& driver, Stream stream, Direction direction, std::span<const Piece> pieces);

// Loads the copy kernel for the current context, once (70 ms the first time on a machine). Without it, or where the
// driver cannot compile it, copy() uses the copy engine.
void prepare(const Driver& driver);

}  // namespace kt::cuda
