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

// Two words of pinned memory: `clear` becomes 0, then `ring` becomes `value`.
struct Signal {
  uint64_t clear = 0;
  uint64_t ring = 0;
  uint32_t value = 0;
};

// Small copies go by one kernel that reads and writes across the bus, which spares the copy engine's start for each
// piece: a round trip of one token of 7168 takes 10 to 14 us and not 25, of 64 tokens 47 and not 58; from 512 tokens on
// (290 us) the engine is as fast. The kernel needs the module of this context: prepare() loads it.

// Up to three pieces. Below 64 KB the kernel gives the signal itself, which spares the stream two operations, and
// *signalled is true; otherwise the caller does, behind the copy.
Status copy_to_host(const Driver& driver, Stream stream, std::span<const Piece> pieces, const Signal& signal,
                    bool* signalled);
Status copy_to_device(const Driver& driver, Stream stream, const Piece& piece);

// Loads the copy kernel for the current context, once (70 ms the first time on a machine). Without it, or where the
// driver cannot compile it, copies go by the copy engine.
void prepare(const Driver& driver);

}  // namespace kt::cuda
