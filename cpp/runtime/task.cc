#include "runtime/task.h"

#include <memory>
#include <string>

#include "cuda/lease.h"

namespace kt {
namespace {

struct Submitted {
  Queue* queue;
  ForwardTask task;
  bool once;  // not of a graph: gone when it has run
};

struct Waiting {
  Queue* queue;
  int allow_n_pending;
  bool once;
};

Status run(void* context) {
  const std::unique_ptr<Submitted> submitted(static_cast<Submitted*>(context));
  const ForwardTask& task = submitted->task;
  const int tokens = *reinterpret_cast<const int32_t*>(task.n_tokens);
  if (task.top_k != task.layer->config().top_k) {
    return Status::invalid("forward_task got k = " + std::to_string(task.top_k) + "; this layer has " +
                           std::to_string(task.layer->config().top_k));
  }
  auto* output = reinterpret_cast<uint16_t*>(task.output);
  const Routing routing{reinterpret_cast<const void*>(task.ids), reinterpret_cast<const float*>(task.weights), tokens,
                        task.top_k};
  return task.layer->forward({routing, reinterpret_cast<const uint16_t*>(task.input), output,
                              task.incremental ? output : nullptr, reinterpret_cast<const uint8_t*>(task.skip)});
}

Status run_write(void* context) {
  const std::unique_ptr<WriteSlicesTask> task(static_cast<WriteSlicesTask*>(context));
  return task->layer->write_slices(task->expert, task->ranks.data(), static_cast<int>(task->ranks.size()));
}

void submit_callback(void* context) {
  auto* submitted = static_cast<Submitted*>(context);
  // A graph may be destroyed before the task has run.
  submitted->queue->submit(run, submitted->once ? submitted : new Submitted{submitted->queue, submitted->task, true});
}

// The error stays on the queue for a sync() of the host: nobody could catch it here.
void sync_callback(void* context) {
  auto* waiting = static_cast<Waiting*>(context);
  const std::unique_ptr<Waiting> owner(waiting->once ? waiting : nullptr);
  waiting->queue->wait(waiting->allow_n_pending);
}

template <class Context>
Status launch(const cuda::Driver& driver, cuda::Stream stream, cuda::HostFn callback,
              std::unique_ptr<Context> context) {
  Context* const argument = context.get();
  bool kept = false;
  KT_RETURN_IF_ERROR(cuda::keep_with_graph(
      driver, stream, argument, [](void* object) { delete static_cast<Context*>(object); }, &kept));
  argument->once = !kept;
  if (kept) context.release();
  KT_CUDA(driver, cuLaunchHostFunc, stream, callback, argument);
  context.release();
  return Status::ok();
}

}  // namespace

Status submit(Queue& queue, const ForwardTask& task) {
  KT_RETURN_IF_ERROR(queue.usable());
  queue.submit(run, new Submitted{&queue, task, true});
  return Status::ok();
}

Status submit(Queue& queue, const WriteSlicesTask& task) {
  KT_RETURN_IF_ERROR(queue.usable());
  queue.submit(run_write, new WriteSlicesTask(task));
  return Status::ok();
}

Status submit_on(Queue& queue, const cuda::Driver& driver, cuda::Stream stream, const ForwardTask& task) {
  KT_RETURN_IF_ERROR(queue.usable());
  return launch(driver, stream, submit_callback, std::make_unique<Submitted>(&queue, task, true));
}

Status sync_on(Queue& queue, const cuda::Driver& driver, cuda::Stream stream, int allow_n_pending) {
  KT_RETURN_IF_ERROR(queue.usable());
  return launch(driver, stream, sync_callback, std::make_unique<Waiting>(&queue, allow_n_pending, true));
}

}  // namespace kt
