#include "runtime/port.h"

#include <cstring>
#include <string>

#include "cuda/copy.h"

namespace kt {
namespace {

constexpr int64_t kAskEveryNs = 50'000'000;

// Whether the GPU of this context can ring bells and wait for words by itself. Otherwise callbacks on a thread of the
// driver do it: 58 us for a round trip of one token instead of 25 (with the same copies).
bool has_memory_operations(const cuda::Driver& driver) {
  int device = 0, yes = 0;
  return driver.cuStreamWriteValue32_v2 && driver.cuStreamWaitValue32_v2 && driver.cuCtxGetDevice(&device) == 0 &&
         driver.cuDeviceGetAttribute(&yes, cuda::kAttributeStreamMemoryOperations, device) == 0 && yes;
}

void wait_done(void* context) {
  Stage& stage = *static_cast<Stage*>(context);
  for (;;) {
    const uint32_t seen = stage.finished.epoch();  // before the look: an output after it ends the sleep
    if (stage.done().load(std::memory_order_acquire) != 0) break;
    stage.finished.sleep_for(seen, kAskEveryNs);
  }
}

uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

StageOwner owner_of(const cuda::Driver& driver, cuda::Stream stream, cuda::LeaseId lease) {
  cuda::Context context = nullptr;
  driver.cuCtxGetCurrent(&context);
  return {lease ? StageOwner::Kind::capture : StageOwner::Kind::stream, address(context), address(stream), lease};
}

}  // namespace

Port::Port(Session* session, Layer* layer, int layer_idx, int deferred_experts)
    : session_(session), layer_(layer), layer_idx_(layer_idx), deferred_experts_(deferred_experts) {
  if (deferred_experts > 0)
    scratch_ = std::make_unique<CallScratch>(layer->config().num_experts, layer->config().top_k);
}

Status Port::create(Session* session, Layer* layer, int layer_idx, int deferred_experts, std::unique_ptr<Port>* out) {
  const LayerConfig& config = layer->config();
  if (config.hidden != session->hidden() || config.top_k != session->top_k()) {
    return Status::invalid("the layers of one model have hidden_size " + std::to_string(session->hidden()) +
                           " and top_k " + std::to_string(session->top_k()) + ", this one has " +
                           std::to_string(config.hidden) + " and " + std::to_string(config.top_k));
  }
  if (deferred_experts < 0 || deferred_experts > config.top_k) {
    return Status::invalid(std::to_string(deferred_experts) + " deferred experts per token; this layer can have 0 to " +
                           std::to_string(config.top_k));
  }
  out->reset(new Port(session, layer, layer_idx, deferred_experts));
  session->add_layer(layer_idx);
  return Status::ok();
}

Port::~Port() {
  if (!session_->queue().usable().is_ok()) return;  // a forked child: locks may be held by threads that are not there
  give_up();
  session_->remove_layer(layer_idx_);
  session_->finish_calls_of(layer_);
}

Status Port::check(const Tokens& tokens) const {
  KT_RETURN_IF_ERROR(session_->queue().usable());
  const int most = layer_->config().max_tokens;
  if (tokens.count < 1 || tokens.count > most) {
    return Status::invalid(std::to_string(tokens.count) + " tokens in one call; this layer takes 1 to " +
                           std::to_string(most) + " (chunked_prefill_size)");
  }
  if (!tokens.input || !tokens.ids || !tokens.weights) return Status::invalid("an address of the tokens is 0");
  if (tokens.id_bytes != 4 && tokens.id_bytes != 8) {
    return Status::invalid("ids of " + std::to_string(tokens.id_bytes) + " bytes; pass int32 or int64");
  }
  return Status::ok();
}

Status Port::begin(const StageOwner& owner, const cuda::Driver* driver, const Tokens& tokens) {
  give_up();
  defers_ = deferred_experts_ > 0 && !session_->is_last(layer_idx_);
  KT_RETURN_IF_ERROR(session_->take_deferred(owner, layer_idx_, tokens.count, &taken_over_));
  Status status = session_->acquire(owner, driver, tokens.count, defers_, &stage_);
  if (!status.is_ok()) {
    undo();
    return status;
  }
  owner_ = owner;
  tokens_ = tokens.count;
  epoch_ = stage_->finished.epoch();
  Call call{layer_, stage_, tokens.count, tokens.id_bytes};
  if (defers_) {
    call.deferred_experts = deferred_experts_;
    call.scratch = scratch_.get();
  }
  call.taken_over = taken_over_.stage;
  number_ = session_->add_call(call, owner);
  return Status::ok();
}

void Port::started() {
  if (defers_) session_->leave_deferred({owner_, layer_idx_, tokens_, stage_});
}

void Port::undo() {
  if (stage_) session_->abandon(stage_);
  if (taken_over_.stage) session_->put_back(taken_over_);
  stage_ = nullptr;
  taken_over_ = {};
}

void Port::end() {
  session_->release(stage_);
  if (taken_over_.stage) session_->release(taken_over_.stage);
  stage_ = nullptr;
  taken_over_ = {};
}

void Port::give_up() {
  if (stage_) session_->abandon(stage_);
  if (taken_over_.stage) session_->abandon(taken_over_.stage);
  stage_ = nullptr;
  taken_over_ = {};
}

Status Port::check_sync(int tokens, bool in_stream) const {
  KT_RETURN_IF_ERROR(session_->queue().usable());
  if (!stage_) return Status::invalid("nothing was submitted; call submit_forward before sync_forward");
  if (in_stream != (owner_.kind != StageOwner::Kind::host)) {
    return Status::invalid(in_stream ? "submit_forward was called with CPU tensors, sync_forward with a CUDA tensor"
                                     : "submit_forward was called with CUDA tensors, sync_forward with a CPU tensor");
  }
  if (tokens != tokens_) {
    return Status::invalid(std::to_string(tokens_) + " tokens were submitted; sync_forward was called with " +
                           std::to_string(tokens));
  }
  return Status::ok();
}

Status Port::submit(const Tokens& tokens) {
  KT_RETURN_IF_ERROR(check(tokens));
  KT_RETURN_IF_ERROR(begin({}, nullptr, tokens));
  const size_t pairs = static_cast<size_t>(tokens.count) * session_->top_k();
  std::memcpy(stage_->ids(), reinterpret_cast<const void*>(tokens.ids), pairs * tokens.id_bytes);
  std::memcpy(stage_->weights(), reinterpret_cast<const void*>(tokens.weights), pairs * 4);
  std::memcpy(stage_->input(), reinterpret_cast<const void*>(tokens.input),
              static_cast<size_t>(tokens.count) * session_->hidden() * 2);
  session_->submit(number_);
  started();
  return Status::ok();
}

Status Port::sync(int tokens, uint64_t output, const std::function<bool()>& keep_waiting) {
  KT_RETURN_IF_ERROR(check_sync(tokens, false));
  while (!stage_->finished.sleep_for(epoch_, kAskEveryNs)) {
    if (stage_->finished.epoch() == epoch_ && !keep_waiting()) return Status::invalid("interrupted");
  }
  Status status = stage_->status;
  if (status.is_ok() && taken_over_.stage) status = taken_over_.stage->deferred_status;
  if (status.is_ok()) {
    std::memcpy(reinterpret_cast<void*>(output), stage_->output(),
                static_cast<size_t>(tokens_) * session_->hidden() * 2);
  }
  end();
  return status;
}

Status Port::submit_on(const cuda::Driver& driver, cuda::Stream stream, const Tokens& tokens, cuda::LeaseId* lease) {
  KT_RETURN_IF_ERROR(check(tokens));
  KT_RETURN_IF_ERROR(session_->take_error());
  KT_RETURN_IF_ERROR(cuda::lease_of(driver, stream, lease));
  if (!*lease) {
    cuda::prepare(driver);
    layer_->pool().make_way();
  }
  KT_RETURN_IF_ERROR(begin(owner_of(driver, stream, *lease), &driver, tokens));
  Status status = send(driver, stream, tokens);
  if (!status.is_ok()) {
    session_->drop_call(number_);
    undo();
    return status;
  }
  started();
  if (!*lease) session_->queue().expect_bell();
  return status;
}

Status Port::send(const cuda::Driver& driver, cuda::Stream stream, const Tokens& tokens) {
  const size_t pairs = static_cast<size_t>(tokens.count) * session_->top_k();
  const cuda::Piece pieces[] = {
      {address(stage_->input()), tokens.input, static_cast<size_t>(tokens.count) * session_->hidden() * 2},
      {address(stage_->ids()), tokens.ids, pairs * tokens.id_bytes},
      {address(stage_->weights()), tokens.weights, pairs * 4}};
  const cuda::Signal signal{address(&stage_->done()), address(&stage_->bell()), number_};
  bool rung = false;
  KT_RETURN_IF_ERROR(cuda::copy_to_host(driver, stream, pieces, signal, &rung));
  if (rung) return Status::ok();
  if (has_memory_operations(driver)) {
    KT_CUDA(driver, cuStreamWriteValue32_v2, stream, signal.clear, 0, 0);
    KT_CUDA(driver, cuStreamWriteValue32_v2, stream, signal.ring, signal.value, 0);
  } else {
    KT_CUDA(driver, cuLaunchHostFunc, stream, Session::ring_call, session_->call_context(number_));
  }
  return Status::ok();
}

Status Port::sync_on(const cuda::Driver& driver, cuda::Stream stream, int tokens, uint64_t output) {
  KT_RETURN_IF_ERROR(check_sync(tokens, true));
  KT_RETURN_IF_ERROR(session_->take_error());
  cuda::LeaseId lease = 0;
  KT_RETURN_IF_ERROR(cuda::lease_of(driver, stream, &lease));
  if (owner_of(driver, stream, lease) != owner_) {
    return Status::invalid("submit_forward and sync_forward of a call must be given the same cuda_stream");
  }
  if (has_memory_operations(driver)) {
    KT_CUDA(driver, cuStreamWaitValue32_v2, stream, address(&stage_->done()), 1, cuda::kWaitGreaterOrEqual);
  } else {
    KT_CUDA(driver, cuLaunchHostFunc, stream, wait_done, stage_);
  }
  const size_t bytes = static_cast<size_t>(tokens_) * session_->hidden() * 2;
  KT_RETURN_IF_ERROR(cuda::copy_to_device(driver, stream, {output, address(stage_->output()), bytes}));
  end();
  return Status::ok();
}

}  // namespace kt
