#include "fake_cuda/state.h"

#include <algorithm>

namespace fake {

thread_local bool in_callback = false;
thread_local int capture_mode = 0;

State& state() {
  static auto* all = new State();
  return *all;
}

void violation(const std::string& what) {
  const std::lock_guard lock(state().mutex);
  state().violations.push_back(what);
}

Graph::~Graph() {
  const bool nested = in_callback;
  in_callback = true;
  for (UserObject* object : objects) {
    if (--object->references != 0) continue;
    object->destroy(object->object);
    object->object = nullptr;  // what was not freed is lost
  }
  in_callback = nested;
}

namespace {

bool overlap(const Range& a, const Range& b) { return a.begin < b.begin + b.bytes && b.begin < a.begin + a.bytes; }

bool in_one_allocation(const Range& range) {
  const auto& pinned = state().pinned;
  auto after = pinned.upper_bound(range.begin);
  if (after == pinned.begin()) return false;
  const auto& [begin, bytes] = *std::prev(after);
  return range.begin + range.bytes <= begin + bytes;
}

bool touches(const Operation& operation, const Range& range) {
  return std::any_of(operation.pinned.begin(), operation.pinned.end(),
                     [&](const Range& r) { return overlap(r, range); });
}

void run_stream(Stream* stream) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  for (;;) {
    s.changed.wait(lock, [&] { return stream->stop || !stream->operations.empty(); });
    if (stream->operations.empty()) return;
    auto run = std::move(stream->operations.front().run);
    lock.unlock();
    run();
    run = nullptr;  // the last use of a graph destroys it: here, before the stream counts as idle
    lock.lock();
    stream->operations.pop_front();
    s.changed.notify_all();
  }
}

Stream* start_stream() {
  auto* stream = new Stream();
  {
    const std::lock_guard lock(state().mutex);
    state().streams.push_back(stream);
  }
  stream->thread = std::thread(run_stream, stream);
  return stream;
}

void end_stream(Stream* stream) {
  {
    const std::lock_guard lock(state().mutex);
    stream->stop = true;
    state().changed.notify_all();
  }
  stream->thread.join();
  const std::lock_guard lock(state().mutex);
  std::erase(state().streams, stream);
  delete stream;
}

}  // namespace

Stream* find_stream(void* handle) {
  struct Zero {
    Stream* stream = start_stream();
    ~Zero() { end_stream(stream); }
  };
  static const Zero zero;
  return handle ? static_cast<Stream*>(handle) : zero.stream;
}

int enqueue(void* handle, Operation operation) {
  Stream* stream = find_stream(handle);
  State& s = state();
  const std::lock_guard lock(s.mutex);
  for (const Range& range : operation.pinned) {
    if (!in_one_allocation(range)) s.violations.push_back("an operation reaches outside of pinned memory");
  }
  if (stream->capture) {
    if (stream->capture->invalid) return kCaptureInvalidated;
    stream->capture->branches[stream].push_back(std::move(operation));
  } else {
    stream->operations.push_back(std::move(operation));
    s.changed.notify_all();
  }
  return 0;
}

bool in_use(const Range& range) {
  const auto uses = [&](const Operation& operation) { return touches(operation, range); };
  for (const Stream* stream : state().streams) {
    if (std::any_of(stream->operations.begin(), stream->operations.end(), uses)) return true;
  }
  for (const auto& weak : state().graphs) {
    const auto graph = weak.lock();
    if (!graph) continue;
    for (const auto& [stream, operations] : graph->branches) {
      if (std::any_of(operations.begin(), operations.end(), uses)) return true;
    }
  }
  return false;
}

int refuse_while_capturing() {
  constexpr int kGlobal = 0, kRelaxed = 2;
  if (capture_mode == kRelaxed) return 0;
  int result = 0;
  for (const auto& weak : state().graphs) {
    const auto graph = weak.lock();
    if (!graph || graph->streams.empty() || graph->mode == kRelaxed) continue;
    const bool own = graph->thread == std::this_thread::get_id();
    if (!own && (capture_mode != kGlobal || graph->mode != kGlobal)) continue;
    graph->invalid = true;
    result = kCaptureUnsupported;
  }
  return result;
}

void wait_idle(std::unique_lock<std::mutex>& lock) {
  State& s = state();
  s.changed.wait(lock, [&] {
    return std::all_of(s.streams.begin(), s.streams.end(), [](const Stream* one) { return one->operations.empty(); });
  });
}

void run_graph(const Graph& graph) {
  std::vector<std::thread> others;
  const auto run = [](const std::vector<Operation>& operations) {
    for (const Operation& operation : operations) operation.run();
  };
  for (auto it = graph.branches.begin(); it != graph.branches.end(); ++it) {
    if (std::next(it) == graph.branches.end()) {
      run(it->second);
    } else {
      others.emplace_back(run, std::cref(it->second));
    }
  }
  for (std::thread& other : others) other.join();
}

}  // namespace fake

using fake::Graph;
using fake::state;
using fake::Stream;

FAKE_EXPORT void* fake_create_stream() { return fake::start_stream(); }

FAKE_EXPORT void fake_destroy_stream(void* stream) { fake::end_stream(static_cast<Stream*>(stream)); }

FAKE_EXPORT void fake_sync_stream(void* handle) {
  Stream* stream = fake::find_stream(handle);
  std::unique_lock lock(state().mutex);
  state().changed.wait(lock, [&] { return stream->operations.empty(); });
}

FAKE_EXPORT void fake_run(void* stream, void (*kernel)(void*), void* context) {
  fake::enqueue(stream, {[=] { kernel(context); }, {}});
}

FAKE_EXPORT void fake_begin_capture(void* handle, int mode) {
  Stream* stream = fake::find_stream(handle);
  const std::lock_guard lock(state().mutex);
  stream->capture = std::make_shared<Graph>();
  stream->capture->id = state().next_capture++;
  stream->capture->mode = mode;
  stream->capture->thread = std::this_thread::get_id();
  stream->capture->streams.push_back(stream);
  state().graphs.push_back(stream->capture);
}

FAKE_EXPORT void fake_fork_capture(void* from, void* to) {
  const std::lock_guard lock(state().mutex);
  auto* other = static_cast<Stream*>(to);
  other->capture = static_cast<Stream*>(from)->capture;
  other->capture->streams.push_back(other);
}

FAKE_EXPORT void* fake_end_capture(void* handle) {
  std::shared_ptr<Graph> graph;
  {
    const std::lock_guard lock(state().mutex);
    graph = fake::find_stream(handle)->capture;
    for (Stream* stream : graph->streams) stream->capture.reset();
    graph->streams.clear();
  }
  return graph->invalid ? nullptr : new std::shared_ptr<Graph>(graph);
}

FAKE_EXPORT void fake_launch(void* graph, void* stream) {
  fake::enqueue(stream, {[held = *static_cast<std::shared_ptr<Graph>*>(graph)] { run_graph(*held); }, {}});
}

FAKE_EXPORT void fake_destroy_graph(void* graph) { delete static_cast<std::shared_ptr<Graph>*>(graph); }

FAKE_EXPORT void fake_fail(const char* function, int after, int code) {
  const std::lock_guard lock(state().mutex);
  state().failures[function] = {after, code};
}

FAKE_EXPORT int fake_calls(const char* function) {
  const std::lock_guard lock(state().mutex);
  return state().calls[function];
}

FAKE_EXPORT void fake_last_launch(unsigned* blocks, unsigned* threads) {
  const std::lock_guard lock(state().mutex);
  *blocks = state().last_launch.blocks;
  *threads = state().last_launch.threads;
}

FAKE_EXPORT void fake_set_memory_operations(bool yes) {
  const std::lock_guard lock(state().mutex);
  state().memory_operations = yes;
}

FAKE_EXPORT void fake_set_waiting_allocation(bool yes) {
  const std::lock_guard lock(state().mutex);
  state().waiting_allocation = yes;
}

FAKE_EXPORT void fake_set_context(uint64_t context) {
  const std::lock_guard lock(state().mutex);
  state().context = context;
}

FAKE_EXPORT size_t fake_pinned() {
  const std::lock_guard lock(state().mutex);
  return state().pinned.size();
}

FAKE_EXPORT int fake_take_violations(const char** first) {
  static std::string kept;
  const std::lock_guard lock(state().mutex);
  const int count = static_cast<int>(state().violations.size());
  kept = count ? state().violations.front() : "";
  *first = kept.c_str();
  state().violations.clear();
  return count;
}
