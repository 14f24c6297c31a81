#include "runtime/stage.h"

#include <cstring>

namespace kt {

Stage::Stage(const StageSize& size, const cuda::Driver* driver) : size_(size), driver_(driver) {
  const auto place = [this](size_t bytes) {
    const size_t at = bytes_;
    bytes_ += (bytes + kWordPitch - 1) / kWordPitch * kWordPitch;
    return at;
  };
  const size_t pairs = static_cast<size_t>(size.tokens) * size.top_k;
  const size_t rows = static_cast<size_t>(size.tokens) * size.hidden * 2;
  place(2 * kWordPitch);
  ids_at_ = place(pairs * 8);
  weights_at_ = place(pairs * 4);
  input_at_ = place(rows);
  output_at_ = place(rows);
  deferred_at_ = place(size.deferring ? rows : 0);
}

Status Stage::create(const StageSize& size, const cuda::Driver* driver, std::unique_ptr<Stage>* out) {
  std::unique_ptr<Stage> stage(new Stage(size, driver));
  if (driver) {
    const cuda::AllowAllocation allow(*driver);
    void* memory = nullptr;
    KT_CUDA(*driver, cuMemHostAlloc, &memory, stage->bytes_, cuda::kHostAllocPortable | cuda::kHostAllocMapped);
    stage->memory_ = static_cast<uint8_t*>(memory);
    std::memset(memory, 0, 2 * kWordPitch);
  } else {
    KT_RETURN_IF_ERROR(NumaBuffer::allocate(stage->bytes_, -1, &stage->plain_));
    stage->memory_ = stage->plain_.data();
  }
  *out = std::move(stage);
  return Status::ok();
}

Stage::~Stage() {
  if (driver_ && memory_) {
    const cuda::AllowAllocation allow(*driver_);
    driver_->cuMemFreeHost(memory_);
  }
}

}  // namespace kt
