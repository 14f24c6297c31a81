// What the fake driver consists of: streams that are threads, graphs that are lists of operations, and pinned memory
// that is plain memory with known bounds. Device memory is whatever the test owns.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace fake {

struct Range {
  uint64_t begin = 0;
  size_t bytes = 0;
};

// `pinned` is what it touches of pinned memory: it must lie in one allocation, which may not be freed before.
struct Operation {
  std::function<void()> run;
  std::vector<Range> pinned;
};

struct UserObject {
  void* object;
  void (*destroy)(void*);
  unsigned references;
};

struct Stream;

// A capture and what comes out of it. A launch runs the branches at the same time, each in its order.
struct Graph {
  uint64_t id = 0;
  int mode = 0;
  std::thread::id thread;  // that began the capture
  bool invalid = false;
  std::vector<Stream*> streams;                        // being captured; empty when it ended
  std::map<Stream*, std::vector<Operation>> branches;  // by the stream they were captured from
  std::vector<UserObject*> objects;
  ~Graph();
};

struct Stream {
  std::deque<Operation> operations;  // the front one runs
  std::shared_ptr<Graph> capture;
  bool stop = false;
  std::thread thread;
};

struct Failure {
  int after;  // calls that still succeed
  int code;
};

struct Launch {
  unsigned blocks = 0;
  unsigned threads = 0;  // of a block
};

struct State {
  std::mutex mutex;
  std::condition_variable changed;  // of any stream
  std::vector<Stream*> streams;
  std::vector<std::weak_ptr<Graph>> graphs;
  std::deque<UserObject> objects;     // that were ever made
  std::map<uint64_t, size_t> pinned;  // begin -> bytes
  std::map<std::string, Failure> failures;
  std::map<std::string, int> calls;
  std::vector<std::string> violations;
  Launch last_launch;
  uint64_t next_capture = 1;
  uint64_t context = 1;
  bool memory_operations = true;
  bool waiting_allocation = false;
};

State& state();

// Results of the driver that are told apart here.
inline constexpr int kInvalidValue = 1, kNotSupported = 801, kCaptureUnsupported = 900, kCaptureInvalidated = 901;

// Whether this thread runs a callback or a destructor of the driver, where no call of the driver is allowed.
extern thread_local bool in_callback;
extern thread_local int capture_mode;

void violation(const std::string& what);

// The stream behind a handle; 0 is a stream as the others.
Stream* find_stream(void* handle);

// Appends to the stream, or to the graph it is captured into.
int enqueue(void* stream, Operation operation);

// With the lock held: whether something that may still run touches it.
bool in_use(const Range& range);
// With the lock held: what a call that a capture forbids returns, and the capture is spoilt.
int refuse_while_capturing();
// Waits until no stream has anything to do.
void wait_idle(std::unique_lock<std::mutex>& lock);

void run_graph(const Graph& graph);

}  // namespace fake

#define FAKE_EXPORT extern "C" __attribute__((visibility("default")))
