// How long a captured graph may still call back. What a graph uses (host memory, calls, layers) is kept until the lease
// of its capture has ended: until the graph and everything instantiated from it are destroyed.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/driver.h"

namespace kt::cuda {

using LeaseId = uint64_t;  // never 0

// *out = 0 when the stream is not capturing. The same capture always gives the same lease. With a driver that cannot
// tie lifetimes to graphs the lease never ends.
Status lease_of(const Driver& driver, Stream stream, LeaseId* out);

// Leases that ended since the last call.
std::vector<LeaseId> take_ended_leases();

}  // namespace kt::cuda
