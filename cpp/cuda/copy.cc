#include "cuda/copy.h"

#include <algorithm>
#include <mutex>
#include <vector>

namespace kt::cuda {
namespace {

constexpr size_t kMaxPieces = 3;
constexpr size_t kKernelMaxBytes = 2 << 20;
constexpr unsigned kBlockThreads = 256;

// kt_copy(to, from, words) x 3: words of 16 bytes in the first piece, of 4 bytes in the others. Compiled by the driver
// for whatever GPU there is.
constexpr const char* kCopyKernel = R"(
.version 6.0
.target sm_50
.address_size 64

.visible .entry kt_copy(
  .param .u64 to_a, .param .u64 from_a, .param .u32 words_a,
  .param .u64 to_b, .param .u64 from_b, .param .u32 words_b,
  .param .u64 to_c, .param .u64 from_c, .param .u32 words_c)
{
  .reg .pred %end;
  .reg .u32 %first, %step, %i, %words, %v<4>;
  .reg .u64 %to, %from, %at, %offset;

  mov.u32 %v0, %ntid.x;
  mov.u32 %v1, %ctaid.x;
  mov.u32 %v2, %tid.x;
  mad.lo.u32 %first, %v1, %v0, %v2;
  mov.u32 %v1, %nctaid.x;
  mul.lo.u32 %step, %v0, %v1;

  ld.param.u64 %to, [to_a];
  ld.param.u64 %from, [from_a];
  ld.param.u32 %words, [words_a];
  mov.u32 %i, %first;
NEXT_A:
  setp.ge.u32 %end, %i, %words;
  @%end bra DONE_A;
  mul.wide.u32 %offset, %i, 16;
  add.u64 %at, %from, %offset;
  ld.global.v4.u32 {%v0, %v1, %v2, %v3}, [%at];
  add.u64 %at, %to, %offset;
  st.global.v4.u32 [%at], {%v0, %v1, %v2, %v3};
  add.u32 %i, %i, %step;
  bra NEXT_A;
DONE_A:

  ld.param.u64 %to, [to_b];
  ld.param.u64 %from, [from_b];
  ld.param.u32 %words, [words_b];
  mov.u32 %i, %first;
NEXT_B:
  setp.ge.u32 %end, %i, %words;
  @%end bra DONE_B;
  mul.wide.u32 %offset, %i, 4;
  add.u64 %at, %from, %offset;
  ld.global.u32 %v0, [%at];
  add.u64 %at, %to, %offset;
  st.global.u32 [%at], %v0;
  add.u32 %i, %i, %step;
  bra NEXT_B;
DONE_B:

  ld.param.u64 %to, [to_c];
  ld.param.u64 %from, [from_c];
  ld.param.u32 %words, [words_c];
  mov.u32 %i, %first;
NEXT_C:
  setp.ge.u32 %end, %i, %words;
  @%end bra DONE_C;
  mul.wide.u32 %offset, %i, 4;
  add.u64 %at, %from, %offset;
  ld.global.u32 %v0, [%at];
  add.u64 %at, %to, %offset;
  st.global.u32 [%at], %v0;
  add.u32 %i, %i, %step;
  bra NEXT_C;
DONE_C:
  ret;
}
)";

struct Loaded {
  const Driver* driver;
  Context context;
  Function function;  // null: this driver could not make it
};

std::mutex& loaded_mutex() {
  static std::mutex mutex;
  return mutex;
}

// One entry per GPU. Never destroyed: contexts are not, before the process ends.
std::vector<Loaded>& loaded() {
  static auto* list = new std::vector<Loaded>();
  return *list;
}

const Loaded* find(const Driver& driver) {
  Context context = nullptr;
  if (driver.cuCtxGetCurrent(&context) != 0 || !context) return nullptr;
  for (const Loaded& entry : loaded()) {
    if (entry.driver == &driver && entry.context == context) return &entry;
  }
  return nullptr;
}

Function copy_kernel(const Driver& driver) {
  const std::lock_guard lock(loaded_mutex());
  const Loaded* entry = find(driver);
  return entry ? entry->function : nullptr;
}

bool fits_kernel(std::span<const Piece> pieces) {
  size_t bytes = 0;
  uint64_t misaligned = pieces[0].to % 16 | pieces[0].from % 16 | pieces[0].bytes % 16;
  for (const Piece& piece : pieces) {
    bytes += piece.bytes;
    misaligned |= piece.to % 4 | piece.from % 4 | piece.bytes % 4;
  }
  return bytes <= kKernelMaxBytes && misaligned == 0;
}

}  // namespace

void prepare(const Driver& driver) {
  const std::lock_guard lock(loaded_mutex());
  Context context = nullptr;
  if (find(driver) || driver.cuCtxGetCurrent(&context) != 0 || !context) return;
  const AllowAllocation allow(driver);
  Module module = nullptr;
  Function function = nullptr;
  if (driver.cuModuleLoadData(&module, kCopyKernel) == 0) driver.cuModuleGetFunction(&function, module, "kt_copy");
  loaded().push_back({&driver, context, function});
}

Status copy(const Driver& driver, Stream stream, Direction direction, std::span<const Piece> pieces) {
  Function function = nullptr;
  if (fits_kernel(pieces) && (function = copy_kernel(driver))) {
    Piece padded[kMaxPieces] = {};
    std::copy(pieces.begin(), pieces.end(), padded);
    uint32_t words[kMaxPieces];
    void* arguments[3 * kMaxPieces];
    for (size_t i = 0; i < kMaxPieces; ++i) {
      words[i] = static_cast<uint32_t>(padded[i].bytes / (i == 0 ? 16 : 4));
      arguments[3 * i] = &padded[i].to;
      arguments[3 * i + 1] = &padded[i].from;
      arguments[3 * i + 2] = &words[i];
    }
    // One word for each thread, so that a small copy waits for the bus once; 64 blocks are enough to fill it.
    const unsigned blocks = std::clamp((words[0] + kBlockThreads - 1) / kBlockThreads, 1u, 64u);
    KT_CUDA(driver, cuLaunchKernel, function, blocks, 1, 1, kBlockThreads, 1, 1, 0, stream, arguments, nullptr);
    return Status::ok();
  }
  for (const Piece& piece : pieces) {
    if (direction == Direction::to_host) {
      KT_CUDA(driver, cuMemcpyDtoHAsync_v2, reinterpret_cast<void*>(piece.to), piece.from, piece.bytes, stream);
    } else {
      KT_CUDA(driver, cuMemcpyHtoDAsync_v2, piece.to, reinterpret_cast<const void*>(piece.from), piece.bytes, stream);
    }
  }
  return Status::ok();
}

}  // namespace kt::cuda
