// Copies between device and pinned memory: which way they go, what arrives, and who gives the signal.
#include "cuda/copy.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "check.h"
#include "stream_case.h"

namespace {

using namespace kt_test;
using kt::cuda::Piece;
using kt::cuda::Signal;

constexpr size_t kIds = 128, kWeights = 64;  // bytes

uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

// Two words and three pieces of pinned memory, and what they come from; `skew` bytes off the alignment of a kernel.
class Case {
 public:
  Case(const FakeCuda& cuda, size_t bytes, size_t skew = 0)
      : cuda_(cuda), stream_(cuda), bytes_(bytes), device_(kBegin + bytes + kIds + kWeights + 16) {
    void* memory = nullptr;
    KT_CHECK(cuda.driver->cuMemHostAlloc(&memory, device_.size(), 0) == 0);
    host_ = static_cast<uint8_t*>(memory);
    // Vectors of bytes lie at multiples of 16.
    const uint64_t from = address(device_.data()) + kBegin + skew, to = address(host_) + kBegin + skew;
    pieces_ = {{to, from, bytes}, {to + bytes, from + bytes, kIds}, {to + bytes + kIds, from + bytes + kIds, kWeights}};
    for (size_t i = 0; i < device_.size(); ++i) device_[i] = static_cast<uint8_t>(i * 7 + i / 256);
    std::fill_n(host_, device_.size(), 0x11);
  }
  ~Case() { KT_CHECK(cuda_.driver->cuMemFreeHost(host_) == 0); }

  bool send(uint32_t value) {
    bool signalled = false;
    const Signal signal{address(host_), address(host_ + 128), value};
    KT_CHECK(kt::cuda::copy_to_host(*cuda_.driver, stream_, pieces_, signal, &signalled).is_ok());
    stream_.sync();
    return signalled;
  }
  void receive() {
    KT_CHECK(kt::cuda::copy_to_device(*cuda_.driver, stream_, {pieces_[0].from, pieces_[0].to, bytes_}).is_ok());
    stream_.sync();
  }
  bool equal(size_t bytes) const { return std::memcmp(at(pieces_[0].from), at(pieces_[0].to), bytes) == 0; }
  bool arrived() const { return equal(bytes_ + kIds + kWeights); }
  uint32_t clear() const { return word(0); }
  uint32_t ring() const { return word(128); }
  void fill_host(uint8_t byte) { std::fill_n(host_, kBegin + bytes_, byte); }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kBegin = 256;
  static const void* at(uint64_t address) { return reinterpret_cast<const void*>(address); }
  uint32_t word(size_t offset) const {
    uint32_t value;
    std::memcpy(&value, host_ + offset, 4);
    return value;
  }

  const FakeCuda& cuda_;
  FakeStream stream_;
  size_t bytes_;
  std::vector<uint8_t> device_;
  uint8_t* host_ = nullptr;
  std::vector<Piece> pieces_;
};

struct Launch {
  unsigned blocks = 0, threads = 0;
  bool operator==(const Launch&) const = default;
};

Launch last_launch(const FakeCuda& cuda) {
  Launch launch;
  cuda.fake_last_launch(&launch.blocks, &launch.threads);
  return launch;
}

KT_TEST(copy_arrives_and_signals_on_every_way) {
  for (const Way& way : ways()) {
    const NoViolations none(way.cuda);
    use(way);
    for (size_t bytes : {size_t{16}, size_t{14336}, size_t{65536 - kIds - kWeights}, size_t{65536}, size_t{2 << 20}}) {
      Case c(way.cuda, bytes);
      const bool signalled = c.send(77);
      KT_CHECK(c.arrived());
      KT_CHECK_EQ(signalled, way.kernel && bytes + kIds + kWeights <= 65536);
      KT_CHECK_EQ(c.clear(), signalled ? 0 : 0x11111111u);
      KT_CHECK_EQ(c.ring(), signalled ? 77 : 0x11111111u);
      c.fill_host(0x22);
      KT_CHECK(!c.equal(bytes));
      c.receive();
      KT_CHECK(c.equal(bytes));
    }
  }
}

KT_TEST(copy_has_a_thread_for_each_word) {
  const FakeCuda& cuda = new_cuda();
  const NoViolations none(cuda);
  use(ways()[0]);
  struct {
    size_t bytes;
    Launch send, receive;
  } const cases[] = {
      {4096, {1, 256 + 64}, {1, 256}},   // a token of 2048; 48 words of ids and weights
      {14336, {1, 896 + 64}, {4, 256}},  // a token of 7168
      {57344, {1, 1024}, {14, 256}},     // four of them: four words for a thread
      {114688, {28, 256}, {28, 256}},   {1 << 20, {64, 256}, {64, 256}},
  };
  for (const auto& expected : cases) {
    Case c(cuda, expected.bytes);
    KT_CHECK_EQ(c.send(1), expected.send.blocks == 1);
    KT_CHECK(last_launch(cuda) == expected.send);
    c.receive();
    KT_CHECK(last_launch(cuda) == expected.receive);
  }
}

KT_TEST(copy_that_no_kernel_can_make_goes_by_the_engine) {
  const FakeCuda& cuda = new_cuda();
  const NoViolations none(cuda);
  use(ways()[0]);
  for (auto [bytes, skew] : {std::pair<size_t, size_t>{14336, 4}, {14336 + 4, 0}, {(2 << 20) + 16, 0}}) {
    Case c(cuda, bytes, skew);
    const int kernels = cuda.fake_calls("cuLaunchKernel");
    KT_CHECK(!c.send(1));
    KT_CHECK(c.arrived());
    KT_CHECK_EQ(cuda.fake_calls("cuLaunchKernel"), kernels);
  }
}

}  // namespace
