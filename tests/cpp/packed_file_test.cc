// Packed experts in files: the checksum, what is written and read on one and several nodes, and errors.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <set>
#include <vector>

#include "base/checksum.h"
#include "check.h"
#include "formats/gguf.h"
#include "guarded.h"
#include "moe/layer.h"
#include "variants.h"

using kt::Format;
using kt::PackedExpert;
using kt_test::Guarded;
using kt_test::Random;

namespace {

constexpr uint64_t kBegin = 2 * kt::kPackedAlignment;

// A file that has no name.
struct File {
  File() : fd(memfd_create("packed", MFD_CLOEXEC)) {}
  ~File() { close(fd); }
  kt::PackedFile with(int experts) const { return {fd, "the file", kBegin, experts}; }
  uint64_t size() const { return static_cast<uint64_t>(lseek(fd, 0, SEEK_END)); }
  void flip(uint64_t at) const {
    uint8_t byte = 0;
    KT_CHECK_EQ(pread(fd, &byte, 1, static_cast<off_t>(at)), 1);
    byte ^= 1;
    KT_CHECK_EQ(pwrite(fd, &byte, 1, static_cast<off_t>(at)), 1);
  }
  int fd;
};

struct Fixture {
  Fixture(int nodes, int experts, Format format = Format::int8, int hidden = 100, int intermediate = 333,
          bool biases = false) {
    kt::PoolConfig pool_config;
    pool_config.nodes.resize(nodes);
    for (kt::PoolNode& node : pool_config.nodes) node.threads = 2;
    KT_CHECK(kt::Pool::create(pool_config, &pool).is_ok());
    kt::LayerConfig config;
    config.set_format(format);
    config.num_experts = experts;
    config.top_k = config.max_tokens = 1;
    config.hidden = hidden;
    config.intermediate = intermediate;
    config.biases = biases;
    config.group = 32;
    const kt::IsaTable* isa = kt_test::variants().run.front().table;
    KT_CHECK(kt::Layer::create(std::make_shared<kt::Workspace>(pool.get()), isa, config, &layer).is_ok());
  }

  std::vector<float> decoded(int expert) const {
    const size_t size = static_cast<size_t>(layer->config().hidden) * layer->config().intermediate;
    std::vector<float> w(3 * size);
    KT_CHECK(layer->decode_expert(expert, w.data(), w.data() + size, w.data() + 2 * size).is_ok());
    return w;
  }

  std::unique_ptr<kt::Pool> pool;
  std::unique_ptr<kt::Layer> layer;
};

const char* reason(const kt::Status& status) {
  static std::string text;
  text = status.message();
  return text.c_str();
}

}  // namespace

KT_TEST(a_checksum_reads_its_bytes_and_no_others) {
  Random random(1);
  for (size_t bytes : {0u, 1u, 7u, 8u, 63u, 64u, 65u, 127u, 128u, 1000u}) {
    kt_test::now_running("checksum of %zu bytes", bytes);
    Guarded<uint8_t> data(bytes);
    for (uint8_t& b : data) b = static_cast<uint8_t>(random.below(256));
    kt::checksum(data.data(), bytes);
  }
}

KT_TEST(a_checksum_sees_every_bit_and_the_length) {
  std::vector<uint8_t> data(200, 0);
  std::set<uint64_t> seen;
  for (size_t bytes = 0; bytes <= data.size(); ++bytes) seen.insert(kt::checksum(data.data(), bytes));
  KT_CHECK_EQ(seen.size(), data.size() + 1);
  for (size_t bit = 0; bit < 8 * data.size(); ++bit) {
    data[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
    seen.insert(kt::checksum(data.data(), data.size()));
    data[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
  }
  KT_CHECK_EQ(seen.size(), data.size() + 1 + 8 * data.size());
}

KT_TEST(a_checksum_sees_the_order_of_lines_and_words) {
  std::vector<uint64_t> data(64);
  for (size_t i = 0; i < data.size(); ++i) data[i] = i;
  std::set<uint64_t> seen{kt::checksum(data.data(), 512)};
  for (size_t i = 0; i < data.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      std::swap(data[i], data[j]);
      seen.insert(kt::checksum(data.data(), 512));
      std::swap(data[i], data[j]);
    }
  }
  KT_CHECK_EQ(seen.size(), size_t{1 + 64 * 63 / 2});
}

KT_TEST(experts_come_back_at_any_place) {
  for (int f = 0; f < kt::kFormatCount; ++f) {
    for (int nodes : {1, 2, 5}) {
      const Format format = static_cast<Format>(f);
      kt_test::now_running("packed %s nodes=%d", kt::format_name(format), nodes);
      const bool blocks = kt::gguf_block(format).weights > 1;  // of up to 256, on each node
      const int hidden = blocks ? 256 : 100, intermediate = blocks ? 256 * nodes : 333;
      Fixture from(nodes, 3, format, hidden, intermediate), to(nodes, 4, format, hidden, intermediate);
      KT_CHECK(from.layer->fill_random(7).is_ok());
      File file;
      std::vector<uint64_t> sums, rest;
      KT_CHECK(from.layer->write_packed(file.with(3), {{0, 2}, {2, 1}}, &sums).is_ok());
      KT_CHECK(from.layer->write_packed(file.with(3), {{1, 0}}, &rest).is_ok());
      KT_CHECK_EQ(file.size(), kBegin + from.layer->packed_bytes(3));
      KT_CHECK_EQ(sums.size(), size_t(2 * nodes));
      sums.insert(sums.end(), rest.begin(), rest.end());
      const kt::Status read = to.layer->read_packed(file.with(3), {{0, 3}, {2, 0}, {1, 2}}, sums);
      KT_CHECK_EQ(std::string(read.message()), "");
      KT_CHECK_EQ(to.layer->loaded_experts(), 3);
      KT_CHECK(to.decoded(3) == from.decoded(2));
      KT_CHECK(to.decoded(0) == from.decoded(1));
      KT_CHECK(to.decoded(2) == from.decoded(0));
    }
  }
}

KT_TEST(parts_of_several_chunks) {
  Fixture from(2, 2, Format::bf16, 1024, 1100), to(2, 2, Format::bf16, 1024, 1100);
  KT_CHECK(from.layer->packed_parts()[1].bytes > size_t{3} << 20);
  KT_CHECK(from.layer->fill_random(3).is_ok());
  File file;
  std::vector<uint64_t> sums;
  KT_CHECK(from.layer->write_packed(file.with(2), {{0, 0}, {1, 1}}, &sums).is_ok());
  KT_CHECK(to.layer->read_packed(file.with(2), {{0, 0}, {1, 1}}, sums).is_ok());
  KT_CHECK(to.decoded(1) == from.decoded(1));
  file.flip(file.size() - 1);
  const kt::Status status = to.layer->read_packed(file.with(2), {{0, 0}, {1, 1}}, sums);
  KT_CHECK_EQ(status.message(), "the file is damaged: the checksum of its expert 1 is wrong");
  KT_CHECK_EQ(to.layer->loaded_experts(), 0);
  KT_CHECK(to.layer->read_packed(file.with(2), {{0, 0}}, {sums[0], sums[1]}).is_ok());
  KT_CHECK_EQ(to.layer->loaded_experts(), 1);
}

KT_TEST(biases_are_parts) {
  for (int nodes : {1, 3}) {
    Fixture from(nodes, 2, Format::int8, 100, 333, true), to(nodes, 2, Format::int8, 100, 333, true);
    KT_CHECK(from.layer->fill_random(5).is_ok());
    std::vector<float> gate(333, 0.5f), down(100, 2.0f);
    KT_CHECK(from.layer->load_biases(1, {gate.data(), gate.data(), down.data()}).is_ok());
    const std::vector<kt::PackedPart> a = from.layer->packed_parts(), b = to.layer->packed_parts();
    KT_CHECK_EQ(a.size(), size_t(2 * nodes));
    File file;
    std::vector<uint64_t> sums;
    KT_CHECK(from.layer->write_packed(file.with(2), {{0, 0}, {1, 1}}, &sums).is_ok());
    KT_CHECK(to.layer->read_packed(file.with(2), {{0, 0}, {1, 1}}, sums).is_ok());
    KT_CHECK_EQ(to.layer->loaded_experts(), 2);
    for (size_t p = 0; p < a.size(); ++p) KT_CHECK_EQ(std::memcmp(a[p].memory, b[p].memory, 2 * a[p].bytes), 0);
    file.flip(file.size() - 1);
    KT_CHECK(!to.layer->read_packed(file.with(2), {{1, 1}}, {sums.begin() + 2 * nodes, sums.end()}).is_ok());
    KT_CHECK_EQ(to.layer->loaded_experts(), 1);
    KT_CHECK(to.layer->load_biases(1, {gate.data(), gate.data(), down.data()}).is_ok());
    KT_CHECK_EQ(to.layer->loaded_experts(), 1);  // its weights are still missing
  }
}

KT_TEST(regions_are_aligned) {
  Fixture three(3, 5);
  const std::vector<kt::PackedPart> parts = three.layer->packed_parts();
  KT_CHECK_EQ(parts.size(), size_t{3});
  int columns = 0;
  for (int n = 0; n < 3; ++n) {
    KT_CHECK_EQ(parts[n].node, n);
    KT_CHECK_EQ(parts[n].begin, columns);
    columns += parts[n].size;
  }
  KT_CHECK_EQ(columns, 333);
  KT_CHECK_EQ(three.layer->packed_bytes(5), 2 * kt::kPackedAlignment + 5 * parts[2].bytes);
}

KT_TEST(a_file_that_is_short_or_cannot_be_used) {
  Fixture one(1, 2);
  KT_CHECK(one.layer->fill_random(1).is_ok());
  File file;
  std::vector<uint64_t> sums;
  KT_CHECK(one.layer->write_packed(file.with(2), {{0, 0}, {1, 1}}, &sums).is_ok());
  KT_CHECK_EQ(ftruncate(file.fd, static_cast<off_t>(file.size() - 1)), 0);
  kt::Status status = one.layer->read_packed(file.with(2), {{0, 0}, {1, 1}}, sums);
  KT_CHECK_EQ(status.message(), "the file is cut short");
  KT_CHECK(status.code() == kt::Status::Code::invalid);
  KT_CHECK_EQ(one.layer->loaded_experts(), 0);
  KT_CHECK(one.layer->fill_random(1).is_ok());
  const kt::PackedFile closed{-1, "nothing", kBegin, 2};
  status = one.layer->read_packed(closed, {{0, 0}, {1, 1}}, sums);
  KT_CHECK_EQ(status.message(), "cannot read nothing: Bad file descriptor");
  KT_CHECK(status.code() == kt::Status::Code::system);
  KT_CHECK(one.layer->fill_random(1).is_ok());
  status = one.layer->write_packed(closed, {{0, 0}}, &sums);
  KT_CHECK_EQ(status.message(), "cannot write nothing: Bad file descriptor");
  KT_CHECK_EQ(one.layer->loaded_experts(), 2);
}

KT_TEST(arguments_are_checked_before_anything_is_touched) {
  Fixture one(1, 2);
  File file;
  std::vector<uint64_t> sums;
  const std::vector<PackedExpert> both{{0, 0}, {1, 1}};
  KT_CHECK(std::strstr(reason(one.layer->write_packed(file.with(2), both, &sums)), "expert 0 has no weights"));
  KT_CHECK(one.layer->fill_random(1).is_ok());
  KT_CHECK(std::strstr(reason(one.layer->read_packed(file.with(2), both, {1})), "1 checksums for 2 experts"));
  for (const PackedExpert& bad : std::vector<PackedExpert>{{-1, 0}, {2, 0}, {0, -1}, {0, 2}}) {
    KT_CHECK(std::strstr(reason(one.layer->read_packed(file.with(2), {bad}, {1})), "the layer has 2 experts"));
  }
  KT_CHECK(std::strstr(reason(one.layer->read_packed(file.with(2), {{0, 1}, {1, 1}}, {1, 1})), "named twice"));
  KT_CHECK(std::strstr(reason(one.layer->read_packed(file.with(3), both, {1, 1})), "said to hold 3 experts"));
  KT_CHECK(std::strstr(reason(one.layer->read_packed(file.with(0), both, {1, 1})), "said to hold 0 experts"));
  const kt::PackedFile odd{file.fd, "odd", kBegin + 1, 2}, far{file.fd, "far", uint64_t{1} << 63, 2};
  KT_CHECK(std::strstr(reason(one.layer->read_packed(odd, both, {1, 1})), "must be a multiple of 2097152"));
  KT_CHECK(!one.layer->read_packed(far, both, {1, 1}).is_ok());
  KT_CHECK_EQ(one.layer->loaded_experts(), 2);
}
