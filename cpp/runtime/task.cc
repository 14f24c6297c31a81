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
  auto* submitted = static_cast<Submitted*>(context);
  const std::unique_ptr<Submitted> owner(submitted->once ? submitted : nullptr);
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

void submit_callback(void* context) {
  auto* submitted = static_cast<Submitted*>(context);
  submitted->queue->submit(run, submitted);
}

// The error stays on the queue for a sync() of the host: nobody could catch it here.
void sync_callback(void* context) {
  auto* waiting = static_cast<Waiting*>(context);
  const std::unique_ptr<Waiting> owner(waiting->once ? waiting : nullptr);
  waiting->queue->wait(waiting->allow_n_pending);
}

Status launch(const cuda::Driver& driver, cuda::Stream stream, cuda::HostFn callback, auto context) {
  cuda::LeaseId lease = 0;
  KT_RETURN_IF_ERROR(cuda::lease_of(driver, stream, &lease));
  context->once = lease == 0;
  KT_CUDA(driver, cuLaunchHostFunc, stream, callback, context.get());
  context.release();
  return Status::ok();
}

}  // namespace

Status submit(Queue& queue, const ForwardTask& task) {
  KT_RETURN_IF_ERROR(queue.usable());
  queue.submit(run, new Submitted{&queue, task, true});
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
