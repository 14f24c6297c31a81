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
double timed_run(Pool& pool, const Body& body) {
  struct Context {
    const Body* body;
    Clock::time_point start, end;
  } context{&body, {}, {}};
  pool.run(
      [](void* p, const Worker& worker) {
        auto& context = *static_cast<Context*>(p);
        worker.barrier();
        if (worker.global == 0) context.start = Clock::now();
        (*context.body)(worker);
        worker.barrier();
        if (worker.global == 0) context.end = Clock::now();
      },
      &context);
  return seconds_between(context.start, context.end);
}

// The best of the rounds that fit into `seconds`, at least three: interference can only make a round slower.
template <typename Body>
double best_run(Pool& pool, double seconds, const Body& body) {
  const Clock::time_point start = Clock::now();
  double best = timed_run(pool, body);
  for (int round = 1; round < 3 || seconds_between(start, Clock::now()) < seconds; ++round) {
    best = std::min(best, timed_run(pool, body));
  }
  return best;
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
  timed_run(pool, [&](const Worker& worker) { std::memset(probe.slice(worker), 1, probe.slice_bytes_); });
  *out = std::move(probe);
  return Status::ok();
}

double ReadProbe::measure(const LimitLoops& loops, double seconds) const {
  const double best =
      best_run(*pool_, seconds, [&](const Worker& worker) { loops.read_stream(slice(worker), slice_bytes_); });
  return static_cast<double>(slice_bytes_) * pool_->total_threads() / best;
}

double measure_peak(Pool& pool, PeakLoop loop, double seconds) {
  // Rounds long enough to hide the barriers (about 1 us) and short enough that some are undisturbed.
  constexpr double kRoundSeconds = 0.005;
  uint64_t iterations = 1000;
  const auto body = [&](const Worker&) { loop(iterations); };
  while (iterations < (uint64_t{1} << 40) && timed_run(pool, body) < kRoundSeconds) iterations *= 2;

  const double best = best_run(pool, seconds, body);
  return static_cast<double>(loop(1)) * iterations * pool.total_threads() / best;
}

}  // namespace kt
