#include "cuda/copy.h"

#include <algorithm>
#include <mutex>
#include <vector>

namespace kt::cuda {
namespace {

constexpr size_t kMaxPieces = 3;
constexpr size_t kKernelMaxBytes = 2 << 20;
constexpr unsigned kBlockThreads = 256, kMaxBlocks = 64;
// What one block has in flight at once: 4 words of 16 bytes for each of its threads.
constexpr unsigned kRingingThreads = 1024;
constexpr size_t kRingingMaxBytes = kRingingThreads * 4 * 16;

// kt_copy((to, from, words) x 3, clear, ring, value): words of 16 bytes in the first piece, of 4 bytes in the others.
// A thread has four words of the first piece in flight at once; the others go to the last threads, which have none of
// it in a small copy. With `ring`, which needs a grid of one block, *clear = 0 and *ring = value when everything has
// arrived: the barrier orders the block's words before the fence of its first thread. Compiled by the driver for
// whatever GPU there is.
constexpr const char* kCopyKernel = R"(
.version 6.0
.target sm_50
.address_size 64

.visible .entry kt_copy(
  .param .u64 to_a, .param .u64 from_a, .param .u32 words_a,
  .param .u64 to_b, .param .u64 from_b, .param .u32 words_b,
  .param .u64 to_c, .param .u64 from_c, .param .u32 words_c,
  .param .u64 clear, .param .u64 ring, .param .u32 value)
.maxntid 1024, 1, 1
{
  .reg .pred %end, %has1, %has2, %has3, %in_b;
  .reg .u32 %thread, %threads, %first, %step, %i, %i1, %i2, %i3, %words, %small, %v;
  .reg .u32 %p<4>, %q<4>, %r<4>, %s<4>;
  .reg .u64 %to, %from, %to_b, %from_b, %to_c, %from_c, %offset, %stride, %at, %at1, %at2, %at3;

  mov.u32 %thread, %tid.x;
  mov.u32 %threads, %ntid.x;
  mov.u32 %i, %ctaid.x;
  mad.lo.u32 %first, %i, %threads, %thread;
  mov.u32 %i, %nctaid.x;
  mul.lo.u32 %step, %threads, %i;

  ld.param.u64 %to, [to_a];
  ld.param.u64 %from, [from_a];
  ld.param.u32 %words, [words_a];
  mul.wide.u32 %stride, %step, 16;
  mov.u32 %i, %first;
NEXT_A:
  setp.ge.u32 %end, %i, %words;
  @%end bra DONE_A;
  add.u32 %i1, %i, %step;
  add.u32 %i2, %i1, %step;
  add.u32 %i3, %i2, %step;
  setp.lt.u32 %has1, %i1, %words;
  setp.lt.u32 %has2, %i2, %words;
  setp.lt.u32 %has3, %i3, %words;
  mul.wide.u32 %offset, %i, 16;
  add.u64 %at, %from, %offset;
  add.u64 %at1, %at, %stride;
  add.u64 %at2, %at1, %stride;
  add.u64 %at3, %at2, %stride;
  ld.global.v4.u32 {%p0, %p1, %p2, %p3}, [%at];
  @%has1 ld.global.v4.u32 {%q0, %q1, %q2, %q3}, [%at1];
  @%has2 ld.global.v4.u32 {%r0, %r1, %r2, %r3}, [%at2];
  @%has3 ld.global.v4.u32 {%s0, %s1, %s2, %s3}, [%at3];
  add.u64 %at, %to, %offset;
  add.u64 %at1, %at, %stride;
  add.u64 %at2, %at1, %stride;
  add.u64 %at3, %at2, %stride;
  st.global.v4.u32 [%at], {%p0, %p1, %p2, %p3};
  @%has1 st.global.v4.u32 [%at1], {%q0, %q1, %q2, %q3};
  @%has2 st.global.v4.u32 [%at2], {%r0, %r1, %r2, %r3};
  @%has3 st.global.v4.u32 [%at3], {%s0, %s1, %s2, %s3};
  add.u32 %i, %i3, %step;
  bra NEXT_A;
DONE_A:

  ld.param.u64 %to_b, [to_b];
  ld.param.u64 %from_b, [from_b];
  ld.param.u32 %words, [words_b];
  ld.param.u64 %to_c, [to_c];
  ld.param.u64 %from_c, [from_c];
  ld.param.u32 %small, [words_c];
  add.u32 %small, %small, %words;
  sub.u32 %i, %step, %first;
  sub.u32 %i, %i, 1;
NEXT_B:
  setp.ge.u32 %end, %i, %small;
  @%end bra DONE_B;
  setp.lt.u32 %in_b, %i, %words;
  sub.u32 %i1, %i, %words;
  selp.u32 %i1, %i, %i1, %in_b;
  selp.u64 %to, %to_b, %to_c, %in_b;
  selp.u64 %from, %from_b, %from_c, %in_b;
  mul.wide.u32 %offset, %i1, 4;
  add.u64 %at, %from, %offset;
  ld.global.u32 %v, [%at];
  add.u64 %at, %to, %offset;
  st.global.u32 [%at], %v;
  add.u32 %i, %i, %step;
  bra NEXT_B;
DONE_B:

  ld.param.u64 %to, [ring];
  setp.eq.u64 %end, %to, 0;
  @%end bra DONE;
  bar.sync 0;
  setp.ne.u32 %end, %thread, 0;
  @%end bra DONE;
  ld.param.u64 %at, [clear];
  ld.param.u32 %v, [value];
  st.volatile.global.u32 [%at], 0;
  membar.sys;
  st.volatile.global.u32 [%to], %v;
DONE:
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

size_t bytes_of(std::span<const Piece> pieces) {
  size_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  return bytes;
}

bool fits_kernel(std::span<const Piece> pieces) {
  uint64_t misaligned = pieces[0].to % 16 | pieces[0].from % 16 | pieces[0].bytes % 16;
  for (const Piece& piece : pieces) misaligned |= piece.to % 4 | piece.from % 4 | piece.bytes % 4;
  return bytes_of(pieces) <= kKernelMaxBytes && misaligned == 0;
}

// With a signal (ring != 0) by one block, otherwise by as many as fill the bus.
Status launch(const Driver& driver, Stream stream, Function function, std::span<const Piece> pieces, Signal signal) {
  Piece padded[kMaxPieces] = {};
  std::copy(pieces.begin(), pieces.end(), padded);
  uint32_t words[kMaxPieces], all_words = 0;
  void* arguments[3 * kMaxPieces + 3] = {};
  for (size_t i = 0; i < kMaxPieces; ++i) {
    words[i] = static_cast<uint32_t>(padded[i].bytes / (i == 0 ? 16 : 4));
    all_words += words[i];
    arguments[3 * i] = &padded[i].to;
    arguments[3 * i + 1] = &padded[i].from;
    arguments[3 * i + 2] = &words[i];
  }
  arguments[3 * kMaxPieces] = &signal.clear;
  arguments[3 * kMaxPieces + 1] = &signal.ring;
  arguments[3 * kMaxPieces + 2] = &signal.value;
  // One word for each thread, so that a small copy waits for the bus once.
  unsigned blocks = 1, threads = std::min((all_words + 31) / 32 * 32, kRingingThreads);
  if (!signal.ring) {
    threads = kBlockThreads;
    blocks = std::clamp((words[0] + kBlockThreads - 1) / kBlockThreads, 1u, kMaxBlocks);
  }
  KT_CUDA(driver, cuLaunchKernel, function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, nullptr);
  return Status::ok();
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

Status copy_to_host(const Driver& driver, Stream stream, std::span<const Piece> pieces, const Signal& signal,
                    bool* signalled) {
  *signalled = false;
  Function function = nullptr;
  if (fits_kernel(pieces) && (function = copy_kernel(driver))) {
    *signalled = bytes_of(pieces) <= kRingingMaxBytes;
    return launch(driver, stream, function, pieces, *signalled ? signal : Signal{});
  }
  for (const Piece& piece : pieces) {
    KT_CUDA(driver, cuMemcpyDtoHAsync_v2, reinterpret_cast<void*>(piece.to), piece.from, piece.bytes, stream);
  }
  return Status::ok();
}

Status copy_to_device(const Driver& driver, Stream stream, const Piece& piece) {
  Function function = nullptr;
  if (fits_kernel({&piece, 1}) && (function = copy_kernel(driver))) {
    return launch(driver, stream, function, {&piece, 1}, {});
  }
  KT_CUDA(driver, cuMemcpyHtoDAsync_v2, piece.to, reinterpret_cast<const void*>(piece.from), piece.bytes, stream);
  return Status::ok();
}

}  // namespace kt::cuda
