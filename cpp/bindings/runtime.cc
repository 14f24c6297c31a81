// Queues, sessions and ports: calls that return before the work is done. Only integers cross.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>

#include "bindings/status.h"
#include "cuda/copy.h"
#include "cuda/driver.h"
#include "cuda/lease.h"
#include "runtime/port.h"
#include "runtime/queue.h"
#include "runtime/session.h"
#include "runtime/task.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

const kt::cuda::Driver& driver() {
  const kt::cuda::Driver* opened = nullptr;
  raise(kt::cuda::open_driver(&opened));
  return *opened;
}

kt::cuda::Stream stream_of(uintptr_t handle) { return reinterpret_cast<kt::cuda::Stream>(handle); }

std::unique_ptr<kt::Queue> make_queue(kt::Pool& pool) {
  kt::QueueConfig config;
  const std::vector<int>& cpus = pool.node(0).cpus;
  if (!cpus.empty()) config.cpu = cpus.front();
  std::unique_ptr<kt::Queue> queue;
  raise(kt::Queue::create(config, &queue));
  return queue;
}

std::unique_ptr<kt::Port> make_port(kt::Session& session, kt::Layer& layer, int layer_idx, int deferred_experts) {
  std::unique_ptr<kt::Port> port;
  raise(kt::Port::create(&session, &layer, layer_idx, deferred_experts, &port));
  return port;
}

// Ctrl-C ends the wait; what was submitted runs on, in memory of its own.
bool no_signal_pending() {
  nb::gil_scoped_acquire held;
  return PyErr_CheckSignals() == 0;
}

using Addresses = std::vector<uintptr_t>;

kt::WriteSlicesTask make_write(kt::Layer& layer, int ranks, int expert, const Addresses& w13_weights,
                               const Addresses& w13_scales, const Addresses& w2_weights, const Addresses& w2_scales) {
  raise(layer.check_slices(expert, ranks));
  kt::WriteSlicesTask task{&layer, expert, std::vector<kt::SliceBuffers>(ranks)};
  for (const Addresses* list : {&w13_weights, &w13_scales, &w2_weights, &w2_scales}) {
    if (list->size() != task.ranks.size()) throw nb::value_error("each list needs one address for each rank");
  }
  const auto at = [](uintptr_t address) { return reinterpret_cast<uint8_t*>(address); };
  for (int r = 0; r < ranks; ++r)
    task.ranks[r] = {at(w13_weights[r]), at(w13_scales[r]), at(w2_weights[r]), at(w2_scales[r])};
  return task;
}

void sync_port(kt::Port& port, int tokens, uintptr_t output) {
  kt::Status status;
  {
    nb::gil_scoped_release released;
    status = port.sync(tokens, output, no_signal_pending);
  }
  if (PyErr_Occurred()) throw nb::python_error();
  raise(status);
}

}  // namespace

void bind_runtime(nb::module_& m) {
  nb::class_<kt::ForwardTask>(m, "ForwardTask", "A forward on addresses that are read when it runs.")
      .def(
          "__init__",
          [](kt::ForwardTask* self, kt::Layer& layer, uintptr_t n_tokens, int top_k, uintptr_t ids, uintptr_t weights,
             uintptr_t input, uintptr_t output, bool incremental, uintptr_t skip) {
            new (self) kt::ForwardTask{&layer, n_tokens, top_k, ids, weights, input, output, incremental, skip};
          },
          "layer"_a, "n_tokens_address"_a, "top_k"_a, "ids"_a, "weights"_a, "input"_a, "output"_a,
          "incremental"_a = false, "skip"_a = 0, nb::keep_alive<1, 2>());

  nb::class_<kt::WriteSlicesTask>(m, "WriteSlicesTask",
                                  "Writes an expert for the ranks of a GPU, at one address for each rank.")
      .def(nb::new_(&make_write), "layer"_a, "ranks"_a, "expert"_a, "w13_weights"_a, "w13_scales"_a, "w2_weights"_a,
           "w2_scales"_a, nb::keep_alive<0, 2>());

  nb::class_<kt::Queue>(m, "Queue", "One thread that runs what is submitted, in order, on a pool.")
      .def(nb::new_(&make_queue), "pool"_a, nb::keep_alive<0, 2>())
      .def_prop_ro("pending", &kt::Queue::pending)
      .def(
          "submit",
          [](kt::Queue& queue, const kt::ForwardTask& task) { raise_of([&] { return submit(queue, task); }); },
          "task"_a)
      .def(
          "submit",
          [](kt::Queue& queue, const kt::WriteSlicesTask& task) { raise_of([&] { return submit(queue, task); }); },
          "task"_a)
      .def(
          "sync", [](kt::Queue& queue, int allow_n_pending) { raise_of([&] { return queue.sync(allow_n_pending); }); },
          "allow_n_pending"_a = 0, "Waits; raises the first error since the last sync.")
      .def(
          "submit_on",
          [](kt::Queue& queue, uintptr_t stream, const kt::ForwardTask& task) {
            const kt::cuda::Driver& opened = driver();
            raise_of([&] { return submit_on(queue, opened, stream_of(stream), task); });
          },
          "stream"_a, "task"_a, "The same when a CUDA stream gets there.")
      .def(
          "sync_on",
          [](kt::Queue& queue, uintptr_t stream, int allow_n_pending) {
            const kt::cuda::Driver& opened = driver();
            raise_of([&] { return sync_on(queue, opened, stream_of(stream), allow_n_pending); });
          },
          "stream"_a, "allow_n_pending"_a = 0, "Makes a CUDA stream wait.");

  nb::class_<kt::Session>(m, "Session", "The MoE layers of one model: their calls, and the memory between them.")
      .def(
          "__init__",
          [](kt::Session* self, kt::Queue& queue, int hidden, int top_k) {
            new (self) kt::Session(&queue, hidden, top_k);
          },
          "queue"_a, "hidden_size"_a, "top_k"_a, nb::keep_alive<1, 2>())
      .def("end_lease", &kt::Session::end_lease, "lease"_a)
      .def("clear_stages", &kt::Session::clear_stages, "streams_idle"_a,
           "Frees host memory of finished calls; that of streams only when all of them are idle, that of graphs never.")
      .def_prop_ro("stages", &kt::Session::stage_count);

  nb::class_<kt::Port>(m, "Port",
                       "Where one layer's tokens go in and come out. All addresses are of contiguous memory.")
      .def(nb::new_(&make_port), "session"_a, "layer"_a, "layer_idx"_a, "deferred_experts"_a = 0,
           nb::keep_alive<0, 2>(), nb::keep_alive<0, 3>())
      .def_prop_ro("in_flight", &kt::Port::in_flight)
      .def(
          "submit",
          [](kt::Port& port, int tokens, uintptr_t input, uintptr_t ids, uintptr_t weights, int id_bytes) {
            raise_of([&] { return port.submit({tokens, input, ids, weights, id_bytes}); });
          },
          "n_tokens"_a, "input"_a, "ids"_a, "weights"_a, "id_bytes"_a, "Copies the tokens and returns.")
      .def("sync", &sync_port, "n_tokens"_a, "output"_a, "Waits, and copies bf16 [T, H] to output.")
      .def(
          "submit_on",
          [](kt::Port& port, uintptr_t stream, int tokens, uintptr_t input, uintptr_t ids, uintptr_t weights,
             int id_bytes) {
            const kt::cuda::Driver& opened = driver();
            kt::cuda::LeaseId lease = 0;
            raise_of([&] {
              return port.submit_on(opened, stream_of(stream), {tokens, input, ids, weights, id_bytes}, &lease);
            });
            return lease;
          },
          "stream"_a, "n_tokens"_a, "input"_a, "ids"_a, "weights"_a, "id_bytes"_a,
          "The same in the order of a CUDA stream, on device memory. Not 0: the lease of the graph being captured.")
      .def(
          "sync_on",
          [](kt::Port& port, uintptr_t stream, int tokens, uintptr_t output) {
            const kt::cuda::Driver& opened = driver();
            raise_of([&] { return port.sync_on(opened, stream_of(stream), tokens, output); });
          },
          "stream"_a, "n_tokens"_a, "output"_a, "Makes the stream wait and copy to device memory.");

  m.def("ended_leases", &kt::cuda::take_ended_leases, "Leases of graphs that are gone, each once.");
  m.def(
      "cuda_missing",
      []() -> std::optional<std::string> {
        const kt::cuda::Driver* opened = nullptr;
        const kt::Status status = kt::cuda::open_driver(&opened);
        if (status.is_ok()) return std::nullopt;
        return status.message();
      },
      "Why CUDA streams cannot be used here, or None.");
  m.def(
      "prepare_cuda", [] { kt::cuda::prepare(driver()); },
      "Loads what the first call on the current GPU would load; a capture should not be the first call.");
}
