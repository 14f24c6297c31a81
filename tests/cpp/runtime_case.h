// What the tests of ports, graphs and tasks share: a model of small layers, batches of tokens, and what must come out.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/bf16.h"
#include "check.h"
#include "moe/layer.h"
#include "runtime/port.h"
#include "runtime/queue.h"
#include "runtime/session.h"
#include "threads/pool.h"
#include "variants.h"

namespace kt_test {

// Somebody who waits for ever is killed: minutes above what the slowest of these tests takes with a sanitizer.
[[maybe_unused]] inline const unsigned kAlarm = alarm(240);

inline constexpr int kExperts = 8, kTopK = 4, kHidden = 64, kMaxTokens = 40;

using Rows = std::vector<uint16_t>;

inline bool fails(const kt::Status& status, const std::string& with = "") {
  return !status.is_ok() && status.message().find(with) != std::string::npos;
}

struct Batch {
  int tokens;
  Rows input;
  std::vector<int64_t> ids;
  std::vector<int32_t> ids32;
  std::vector<float> weights;

  Batch(int count, uint64_t seed) : tokens(count), input(count * kHidden) {
    Random random(seed);
    fill_gaussian_bf16(input, random);
    for (int i = 0; i < count * kTopK; ++i) {
      ids.push_back(random.below(kExperts));
      weights.push_back(static_cast<float>(random.below(1000)) / 1000);
    }
    copy_ids();
  }
  void copy_ids() { ids32.assign(ids.begin(), ids.end()); }

  kt::Tokens address(int id_bytes = 8) const {
    const auto at = [](const auto& v) { return reinterpret_cast<uint64_t>(v.data()); };
    return {tokens, at(input), id_bytes == 4 ? at(ids32) : at(ids), at(weights), id_bytes};
  }
  // Other tokens at the same addresses.
  void refill(uint64_t seed) {
    const Batch other(tokens, seed);
    std::copy(other.input.begin(), other.input.end(), input.begin());
    std::copy(other.ids.begin(), other.ids.end(), ids.begin());
    std::copy(other.ids32.begin(), other.ids32.end(), ids32.begin());
    std::copy(other.weights.begin(), other.weights.end(), weights.begin());
  }
  // As a caller would who reuses his buffers.
  void scribble() {
    std::fill(input.begin(), input.end(), uint16_t{0x4141});
    std::fill(ids.begin(), ids.end(), 1);
    std::fill(ids32.begin(), ids32.end(), 1);
    std::fill(weights.begin(), weights.end(), 7.0f);
  }
};

// Pool, queue and layers; layer 0 of every model has other weights than layer 1, and so on.
struct Model {
  std::unique_ptr<kt::Pool> pool;
  std::shared_ptr<kt::Workspace> workspace;
  std::unique_ptr<kt::Queue> queue;
  std::vector<std::unique_ptr<kt::Layer>> layers;

  explicit Model(int count, int top_k = kTopK) {
    kt::PoolConfig config;
    config.nodes.resize(1);
    config.nodes[0].threads = 2;
    config.spin_us = 50;
    KT_CHECK(kt::Pool::create(config, &pool).is_ok());
    workspace = std::make_shared<kt::Workspace>(pool.get());
    KT_CHECK(kt::Queue::create({}, &queue).is_ok());
    for (int i = 0; i < count; ++i) {
      add_layer(top_k);
      KT_CHECK(layers.back()->fill_random(i + 1).is_ok());
    }
  }
  // One without weights.
  kt::Layer& add_layer(int top_k = kTopK) {
    const kt::IsaTable* isa = variants().run.front().table;
    kt::LayerConfig config{{}, kExperts, top_k, kHidden, 64, kMaxTokens, {}};
    config.set_format(kt::Format::bf16);
    KT_CHECK(kt::Layer::create(workspace, isa, config, &layers.emplace_back()).is_ok());
    return *layers.back();
  }

  Rows forward(int layer, const Batch& batch, const uint8_t* skip = nullptr, const Rows* addend = nullptr) {
    Rows out(batch.input.size());
    const kt::Routing routing{batch.ids.data(), batch.weights.data(), batch.tokens, kTopK};
    const kt::Status status = layers[layer]->forward(
        {routing, batch.input.data(), out.data(), addend && !addend->empty() ? addend->data() : nullptr, skip});
    KT_CHECK(status.is_ok());
    return out;
  }
};

// Holds the queue until it is opened.
struct Door {
  std::atomic<bool> open{false};

  static kt::Status task(void* context) {
    while (!static_cast<Door*>(context)->open.load()) usleep(100);
    return kt::Status::ok();
  }
  static void kernel(void* context) { (void)task(context).is_ok(); }
  ~Door() { open.store(true); }
};

// Which experts a layer puts off, by definition: those that are not among the kept ones (the largest weights, the
// earlier slot of two equal ones, a NaN above all) of any token.
inline std::vector<uint8_t> deferred_of(const Batch& batch, int deferred_experts) {
  std::vector<uint8_t> deferred(kExperts, 1);
  for (int t = 0; t < batch.tokens; ++t) {
    const float* weights = &batch.weights[t * kTopK];
    for (int slot = 0; slot < kTopK; ++slot) {
      const auto above = [&](int other) {
        const float a = std::isnan(weights[other]) ? INFINITY : weights[other];
        const float b = std::isnan(weights[slot]) ? INFINITY : weights[slot];
        return a > b || (a == b && other < slot);
      };
      int larger = 0;
      for (int other = 0; other < kTopK; ++other) larger += above(other);
      const int64_t id = batch.ids[t * kTopK + slot];
      if (larger < kTopK - deferred_experts && id >= 0 && id < kExperts) deferred[id] = 0;
    }
  }
  return deferred;
}

// What a pass over the layers gives, layer by layer: each computes what is due and adds what the one before put off.
struct Reference {
  Model& model;
  int deferred_experts;
  Rows left;  // empty: nothing

  Rows step(int layer, const Batch& batch, bool last) {
    if (deferred_experts == 0 || last) {
      Rows out = model.forward(layer, batch, nullptr, &left);
      left.clear();
      return out;
    }
    const std::vector<uint8_t> now = deferred_of(batch, deferred_experts);
    std::vector<uint8_t> later(kExperts);
    std::transform(now.begin(), now.end(), later.begin(), [](uint8_t skip) { return skip ? 0 : 1; });
    Rows out = model.forward(layer, batch, now.data(), &left);
    left = model.forward(layer, batch, later.data());
    return out;
  }
};

inline bool always() { return true; }

inline std::unique_ptr<kt::Port> make_port(kt::Session& session, kt::Layer& layer, int layer_idx, int deferred = 0) {
  std::unique_ptr<kt::Port> port;
  KT_CHECK(kt::Port::create(&session, &layer, layer_idx, deferred, &port).is_ok());
  return port;
}

// A session and a port per layer of a model.
struct Ports {
  kt::Session session;
  std::vector<std::unique_ptr<kt::Port>> ports;

  explicit Ports(Model& model, int deferred = 0) : session(model.queue.get(), kHidden, kTopK) {
    for (size_t i = 0; i < model.layers.size(); ++i)
      ports.push_back(make_port(session, *model.layers[i], static_cast<int>(i), deferred));
  }
  kt::Port& operator[](size_t i) { return *ports[i]; }
};

inline kt::Status sync(kt::Port& port, Rows& out) {
  return port.sync(static_cast<int>(out.size()) / kHidden, reinterpret_cast<uint64_t>(out.data()), always);
}

inline bool all_nan(const Rows& rows) {
  return std::all_of(rows.begin(), rows.end(), [](uint16_t x) { return std::isnan(kt::bf16_to_f32(x)); });
}

}  // namespace kt_test
