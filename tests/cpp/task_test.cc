// ForwardTask: forwards on addresses, by the host, in streams and in graphs of the fake driver.
#include "runtime/task.h"

#include <string>
#include <vector>

#include "check.h"
#include "stream_case.h"

namespace {

using namespace kt_test;
using kt::ForwardTask;
using kt::Status;

struct Case {
  Batch batch;
  Rows out;
  int32_t tokens;

  explicit Case(int count, uint64_t seed = 1) : batch(count, seed), out(batch.input.size()), tokens(count) {}
  ForwardTask task(kt::Layer& layer, bool incremental = false) {
    const kt::Tokens at = batch.address();
    return {&layer,   reinterpret_cast<uint64_t>(&tokens),    kTopK,      at.ids, at.weights,
            at.input, reinterpret_cast<uint64_t>(out.data()), incremental};
  }
};

KT_TEST(task_reads_its_arguments_when_it_runs) {
  Model model(1);
  Case c(5);
  Door door;
  model.queue->submit(Door::task, &door);
  KT_CHECK(submit(*model.queue, c.task(*model.layers[0])).is_ok());
  c.batch.refill(2);
  c.tokens = 3;
  door.open.store(true);
  KT_CHECK(model.queue->sync().is_ok());
  Rows expected = model.forward(0, c.batch);
  std::fill(expected.begin() + 3 * kHidden, expected.end(), uint16_t{0});
  KT_CHECK(c.out == expected);
}

KT_TEST(task_adds_to_the_output_if_asked) {
  Model model(1);
  Case c(4);
  std::fill(c.out.begin(), c.out.end(), uint16_t{0x3f80});
  const Rows ones = c.out;
  KT_CHECK(submit(*model.queue, c.task(*model.layers[0], true)).is_ok());
  KT_CHECK(model.queue->sync().is_ok());
  KT_CHECK(c.out == model.forward(0, c.batch, nullptr, &ones));
}

KT_TEST(task_skips_experts) {
  Model model(1);
  Case c(4);
  const std::vector<uint8_t> skip = {1, 0, 1, 0, 0, 1, 0, 0};
  ForwardTask task = c.task(*model.layers[0]);
  task.skip = reinterpret_cast<uint64_t>(skip.data());
  KT_CHECK(submit(*model.queue, task).is_ok());
  KT_CHECK(model.queue->sync().is_ok());
  KT_CHECK(c.out == model.forward(0, c.batch, skip.data()));
}

KT_TEST(task_errors_come_out_of_the_host_sync) {
  Model model(1);
  kt::Layer& empty = model.add_layer();
  Case c(4);
  ForwardTask wrong = c.task(*model.layers[0]);
  wrong.top_k = 3;
  KT_CHECK(submit(*model.queue, wrong).is_ok());
  KT_CHECK(fails(model.queue->sync(), "k = 3"));
  KT_CHECK(submit(*model.queue, c.task(empty)).is_ok());
  KT_CHECK(fails(model.queue->sync(), "has no weights"));
  KT_CHECK(model.queue->sync().is_ok());
}

KT_TEST(task_in_a_stream) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(2);
    kt::Layer& empty = model.add_layer();
    const FakeStream stream(cuda);
    Case c(4);
    Rows copy(c.out.size());
    struct Copy {
      Rows *from, *to;
    } arguments{&c.out, &copy};
    Door door;
    cuda.fake_run(stream, Door::kernel, &door);
    KT_CHECK(submit_on(*model.queue, *cuda.driver, stream, c.task(empty)).is_ok());
    for (int layer : {0, 1})
      KT_CHECK(submit_on(*model.queue, *cuda.driver, stream, c.task(*model.layers[layer])).is_ok());
    KT_CHECK(sync_on(*model.queue, *cuda.driver, stream, 0).is_ok());
    cuda.fake_run(
        stream,
        [](void* context) {
          const auto& it = *static_cast<Copy*>(context);
          *it.to = *it.from;
        },
        &arguments);
    KT_CHECK(model.queue->pending() == 0);
    KT_CHECK(model.queue->sync().is_ok());  // nothing has run
    door.open.store(true);
    stream.sync();
    KT_CHECK(copy == model.forward(1, c.batch));
    KT_CHECK(fails(model.queue->sync(), "has no weights"));  // the stream's wait left it here
    KT_CHECK(model.queue->sync().is_ok());
  });
}

KT_TEST(task_sync_in_a_stream_allows_pending) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(1);
    const FakeStream stream(cuda);
    Door door;
    model.queue->submit(Door::task, &door);
    KT_CHECK(sync_on(*model.queue, *cuda.driver, stream, 1).is_ok());
    stream.sync();
    KT_CHECK(model.queue->pending() == 1);
    door.open.store(true);
    KT_CHECK(model.queue->sync().is_ok());
  });
}

KT_TEST(task_in_a_graph) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(1);
    const FakeStream stream(cuda);
    Case c(4);
    cuda.fake_begin_capture(stream, kCaptureGlobal);
    KT_CHECK(submit_on(*model.queue, *cuda.driver, stream, c.task(*model.layers[0])).is_ok());
    KT_CHECK(sync_on(*model.queue, *cuda.driver, stream, 0).is_ok());
    void* graph = cuda.fake_end_capture(stream);
    KT_CHECK(graph != nullptr);
    for (int i = 0; i < 20; ++i) {
      c.batch.refill(i);
      cuda.fake_launch(graph, stream);
      cuda.fake_launch(graph, stream);
      stream.sync();
      KT_CHECK(c.out == model.forward(0, c.batch));
    }
    cuda.fake_destroy_graph(graph);
    KT_CHECK(model.queue->sync().is_ok());
  });
}

// A graph may end before its tasks have run.
KT_TEST(task_outlives_its_graph) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(1);
    const FakeStream stream(cuda);
    Case c(4);
    Door door;
    model.queue->submit(Door::task, &door);
    cuda.fake_begin_capture(stream, kCaptureGlobal);
    KT_CHECK(submit_on(*model.queue, *cuda.driver, stream, c.task(*model.layers[0])).is_ok());
    void* graph = cuda.fake_end_capture(stream);
    cuda.fake_launch(graph, stream);
    stream.sync();
    cuda.fake_destroy_graph(graph);
    door.open.store(true);
    KT_CHECK(model.queue->sync().is_ok());
    KT_CHECK(c.out == model.forward(0, c.batch));
  });
}

KT_TEST(task_that_cannot_be_launched_is_an_error) {
  on_every_way([](const FakeCuda& cuda) {
    Model model(1);
    const FakeStream stream(cuda);
    Case c(4);
    for (bool captured : {false, true}) {
      if (captured) cuda.fake_begin_capture(stream, kCaptureGlobal);
      cuda.fake_fail("cuLaunchHostFunc", 0, kLaunchFailed);
      KT_CHECK(fails(submit_on(*model.queue, *cuda.driver, stream, c.task(*model.layers[0])), "cuLaunchHostFunc"));
      cuda.fake_fail("cuLaunchHostFunc", 0, kLaunchFailed);
      KT_CHECK(fails(sync_on(*model.queue, *cuda.driver, stream, 0), "LAUNCH_FAILED"));
      if (captured) cuda.fake_destroy_graph(cuda.fake_end_capture(stream));
    }
    stream.sync();
    KT_CHECK(model.queue->pending() == 0 && model.queue->sync().is_ok());
  });
}

}  // namespace
