#include "moe/limits.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

namespace kt {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

// Wall time of body(worker) on all workers, from the moment all have arrived until the last is done: waking the pool is
// not part of a limit.
template <typename Body>
Status timed_run(Pool& pool, const Body& body, double* seconds) {
  struct Context {
    const Body* body;
    Clock::time_point start, end;
  } context{&body, {}, {}};
  KT_RETURN_IF_ERROR(pool.run(
      [](void* p, const Worker& worker) {
        auto& context = *static_cast<Context*>(p);
        worker.barrier();
        if (worker.global == 0) context.start = Clock::now();
        (*context.body)(worker);
        worker.barrier();
        if (worker.global == 0) context.end = Clock::now();
      },
      &context));
  *seconds = seconds_between(context.start, context.end);
  return Status::ok();
}

// The best of the rounds that fit into `seconds`, at least three: interference can only make a round slower.
template <typename Body>
Status best_run(Pool& pool, double seconds, const Body& body, double* best) {
  const Clock::time_point start = Clock::now();
  KT_RETURN_IF_ERROR(timed_run(pool, body, best));
  for (int round = 1; round < 3 || seconds_between(start, Clock::now()) < seconds; ++round) {
    double taken;
    KT_RETURN_IF_ERROR(timed_run(pool, body, &taken));
    *best = std::min(*best, taken);
  }
  return Status::ok();
}

}  // namespace

Status ReadProbe::create(Pool& pool, size_t bytes, ReadProbe* out) {
  constexpr size_t kPage = 4096;
  ReadProbe probe;
  probe.pool_ = &pool;
  probe.slice_bytes_ = std::max(bytes / pool.total_threads() / kPage, size_t{1}) * kPage;
  probe.buffers_.resize(pool.node_count());
  for (int i = 0; i < pool.node_count(); ++i) {
    const PoolNode& node = pool.node(i);
    KT_RETURN_IF_ERROR(NumaBuffer::allocate(probe.slice_bytes_ * node.threads, node.numa_id, &probe.buffers_[i]));
  }
  // Written once: untouched pages would all be the one zero page, which lives in the cache.
  double unused;
  const auto write = [&](const Worker& worker) { std::memset(probe.slice(worker), 1, probe.slice_bytes_); };
  KT_RETURN_IF_ERROR(timed_run(pool, write, &unused));
  *out = std::move(probe);
  return Status::ok();
}

Status ReadProbe::measure(const LimitLoops& loops, double seconds, double* bytes_per_s) const {
  double best;
  const auto read = [&](const Worker& worker) { loops.read_stream(slice(worker), slice_bytes_); };
  KT_RETURN_IF_ERROR(best_run(*pool_, seconds, read, &best));
  *bytes_per_s = static_cast<double>(slice_bytes_) * pool_->total_threads() / best;
  return Status::ok();
}

Status measure_peak(Pool& pool, PeakLoop loop, double seconds, double* ops_per_s) {
  // Rounds long enough to hide the barriers (about 1 us) and short enough that some are undisturbed.
  constexpr double kRoundSeconds = 0.005;
  uint64_t iterations = 1000;
  const auto body = [&](const Worker&) { loop(iterations); };
  for (;; iterations *= 2) {
    double round;
    KT_RETURN_IF_ERROR(timed_run(pool, body, &round));
    if (round >= kRoundSeconds || iterations >= (uint64_t{1} << 40)) break;
  }
  double best;
  KT_RETURN_IF_ERROR(best_run(pool, seconds, body, &best));
  *ops_per_s = static_cast<double>(loop(1)) * iterations * pool.total_threads() / best;
  return Status::ok();
}

}  // namespace kt
