// Layer::read_packed and write_packed: workers copy between the file and the memory of their own node.
//
// Read, not mapped: memory is then node-local and in huge pages, and a file that somebody cuts short is an error rather
// than the end of the process.
#include "moe/packed_file.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <vector>

#include "base/checksum.h"
#include "moe/layer.h"

namespace kt {
namespace {

// Bytes of one task and of one checksum: they are summed up while they are in the cache. The checksum of a part is that
// of its chunks' checksums, so that all workers can share one expert. 4 MB tasks, which seldom meet in a new huge page,
// were no faster.
constexpr size_t kChunk = size_t{1} << 20;

constexpr int kCutShort = -1;  // in the place of an errno

uint64_t round_up(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }

// 0, an errno, or kCutShort.
int read_at(int fd, uint8_t* to, size_t bytes, uint64_t at) {
  while (bytes != 0) {
    const ssize_t got = pread(fd, to, bytes, static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno;
    if (got == 0) return kCutShort;
    to += got, at += got, bytes -= got;
  }
  return 0;
}

// 0 or an errno.
int write_at(int fd, const uint8_t* from, size_t bytes, uint64_t at) {
  while (bytes != 0) {
    const ssize_t put = pwrite(fd, from, bytes, static_cast<off_t>(at));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return errno;
    from += put, at += put, bytes -= put;
  }
  return 0;
}

// One region of the file: a part of some experts, in chunks.
struct Region {
  PackedPart part{};
  uint64_t begin = 0;
  size_t per_expert = 0;  // chunks
  std::vector<uint64_t> checksums;
  std::atomic<size_t> next{0};
};

struct Copy {
  const PackedFile& file;
  const std::vector<PackedExpert>& experts;
  const bool to_file;
  std::vector<Region> regions;
  std::atomic<int> error{0};

  void copy(Region& region, size_t chunk) {
    const PackedExpert& e = experts[chunk / region.per_expert];
    const size_t offset = chunk % region.per_expert * kChunk, bytes = std::min(kChunk, region.part.bytes - offset);
    const uint64_t at = region.begin + static_cast<uint64_t>(e.position) * region.part.bytes + offset;
    uint8_t* data = region.part.memory + static_cast<size_t>(e.expert) * region.part.bytes + offset;
    const int failed = to_file ? write_at(file.fd, data, bytes, at) : read_at(file.fd, data, bytes, at);
    if (failed == 0) {
      region.checksums[chunk] = checksum(data, bytes);
      return;
    }
    int none = 0;
    error.compare_exchange_strong(none, failed, std::memory_order_relaxed);
  }

  void work(const Worker& worker) {
    for (Region& region : regions) {
      if (region.part.node != worker.node) continue;
      const size_t chunks = region.checksums.size();
      for (size_t chunk; (chunk = region.next.fetch_add(1, std::memory_order_relaxed)) < chunks;) {
        if (error.load(std::memory_order_relaxed) != 0) return;
        copy(region, chunk);
      }
    }
  }
};

}  // namespace

std::vector<PackedPart> Layer::packed_parts() const {
  std::vector<PackedPart> parts;
  for (int n = 0; n < static_cast<int>(shards_.size()); ++n) {
    const Shard& shard = shards_[n];
    parts.push_back({n, shard.begin, shard.size, shard.gate_up_bytes + shard.down_bytes, shard.weights.data()});
    if (!config_.biases) continue;
    parts.push_back({n, shard.begin, shard.size, (shard.gate_up_biases + shard.down_biases) * 4, shard.biases.data()});
  }
  return parts;
}

uint64_t Layer::packed_bytes(int experts) const {
  uint64_t end = 0;
  for (const PackedPart& part : packed_parts()) {
    end = round_up(end, kPackedAlignment) + uint64_t{part.bytes} * static_cast<uint64_t>(std::max(experts, 0));
  }
  return end;
}

Status Layer::check_packed(const PackedFile& file, const std::vector<PackedExpert>& experts) const {
  if (file.experts < 1 || file.experts > config_.num_experts) {
    return Status::invalid(file.path + " is said to hold " + std::to_string(file.experts) +
                           " experts; this layer has " + std::to_string(config_.num_experts));
  }
  if (file.begin % kPackedAlignment != 0 || file.begin > uint64_t{1} << 62) {
    return Status::invalid(file.path + ": packed experts cannot begin at byte " + std::to_string(file.begin) +
                           "; it must be a multiple of " + std::to_string(kPackedAlignment));
  }
  std::vector<uint8_t> seen(config_.num_experts, 0);
  for (const PackedExpert& e : experts) {
    if (e.position < 0 || e.position >= file.experts || e.expert < 0 || e.expert >= config_.num_experts) {
      return Status::invalid("expert " + std::to_string(e.expert) + " at position " + std::to_string(e.position) +
                             ": the layer has " + std::to_string(config_.num_experts) + " experts, the file " +
                             std::to_string(file.experts));
    }
    if (seen[e.expert]++) return Status::invalid("expert " + std::to_string(e.expert) + " is named twice");
  }
  return Status::ok();
}

Status Layer::copy_packed(const PackedFile& file, const std::vector<PackedExpert>& experts, bool to_file,
                          std::vector<uint64_t>* checksums) {
  const std::vector<PackedPart> parts = packed_parts();
  Copy copy{file, experts, to_file, std::vector<Region>(parts.size())};
  uint64_t end = file.begin;
  for (size_t p = 0; p < parts.size(); ++p) {
    Region& region = copy.regions[p];
    region.part = parts[p];
    region.begin = round_up(end, kPackedAlignment);
    region.per_expert = (parts[p].bytes + kChunk - 1) / kChunk;
    region.checksums.resize(region.per_expert * experts.size());
    end = region.begin + uint64_t{parts[p].bytes} * static_cast<uint64_t>(file.experts);
  }
  KT_RETURN_IF_ERROR(
      workspace_->pool().run([](void* c, const Worker& worker) { static_cast<Copy*>(c)->work(worker); }, &copy));
  if (const int error = copy.error.load(); error != 0) {
    if (error == kCutShort) return Status::invalid(file.path + " is cut short");
    return Status::system(std::string("cannot ") + (to_file ? "write " : "read ") + file.path + ": " +
                          std::strerror(error));
  }
  checksums->clear();
  for (size_t i = 0; i < experts.size(); ++i) {
    for (const Region& region : copy.regions) {
      const size_t chunks = region.per_expert;
      checksums->push_back(checksum(region.checksums.data() + i * chunks, chunks * sizeof(uint64_t)));
    }
  }
  return Status::ok();
}

Status Layer::write_packed(const PackedFile& file, const std::vector<PackedExpert>& experts,
                           std::vector<uint64_t>* checksums) {
  KT_RETURN_IF_ERROR(check_packed(file, experts));
  KT_RETURN_IF_ERROR(workspace_->pool().usable());
  const std::lock_guard lock(workspace_->mutex());
  for (const PackedExpert& e : experts) {
    if (!loaded_[e.expert]) {
      return Status::invalid("expert " + std::to_string(e.expert) +
                             " has no weights, or no biases; load them before they are kept");
    }
  }
  return copy_packed(file, experts, true, checksums);
}

Status Layer::read_packed(const PackedFile& file, const std::vector<PackedExpert>& experts,
                          const std::vector<uint64_t>& checksums) {
  KT_RETURN_IF_ERROR(check_packed(file, experts));
  const size_t parts = packed_parts().size();
  if (checksums.size() != experts.size() * parts) {
    return Status::invalid(std::to_string(checksums.size()) + " checksums for " + std::to_string(experts.size()) +
                           " experts in " + std::to_string(parts) + " part(s)");
  }
  KT_RETURN_IF_ERROR(workspace_->pool().usable());
  const std::lock_guard lock(workspace_->mutex());
  for (const PackedExpert& e : experts) unset_loaded(e.expert);
  std::vector<uint64_t> found;
  KT_RETURN_IF_ERROR(copy_packed(file, experts, false, &found));
  const auto wrong = std::mismatch(found.begin(), found.end(), checksums.begin()).first;
  if (wrong != found.end()) {
    const size_t i = static_cast<size_t>(wrong - found.begin()) / parts;
    return Status::invalid(file.path + " is damaged: the checksum of its expert " +
                           std::to_string(experts[i].position) + " is wrong");
  }
  for (const PackedExpert& e : experts) {
    set_loaded(e.expert);
    if (config_.biases) set_loaded(e.expert, kBiases);
  }
  return Status::ok();
}

}  // namespace kt
