// How long a captured graph may still call back. What a graph uses (host memory, calls, layers) is kept until the lease
// of its capture has ended: until the graph and everything instantiated from it are destroyed.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/driver.h"

namespace kt::cuda {

using LeaseId = uint64_t;  // never 0

// *out = 0 when the stream is not capturing. The same capture always gives the same lease. An error with a driver that
// cannot tie lifetimes to graphs: memory that captures cannot be told apart by would be shared by their graphs.
Status lease_of(const Driver& driver, Stream stream, LeaseId* out);

// The same for an object that nothing but the graph needs: destroy(object) is called when the graph is gone, on a
// thread of the driver where its functions must not be called. *kept = false, and nothing is done, when the stream is
// not capturing.
Status keep_with_graph(const Driver& driver, Stream stream, void* object, HostFn destroy, bool* kept);

// Leases that ended since the last call.
std::vector<LeaseId> take_ended_leases();

}  // namespace kt::cuda
