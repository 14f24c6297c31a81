// A decoder of random weights: what never changes a bit, and, under the thread sanitizer, that no phase of a step reads
// what another worker still writes. Numbers are held against transformers in tests/python/test_native_decoder.py.
#include "decoder/decoder.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "variants.h"

using kt::Format;
using kt_test::Random;

namespace {

constexpr int kHidden = 48, kVocabulary = 70, kSlots = 6, kMaxLen = 600, kHeads = 4, kKvHeads = 2, kHeadDim = 16;
constexpr int kExperts = 5, kTopK = 2, kIntermediate = 130, kMlp = 40, kRotary = 12;

std::vector<float> random_floats(int count, Random& random) {
  std::vector<float> values(count);
  for (float& v : values) v = 1 + 0.1f * random.gaussian();
  return values;
}

std::vector<uint16_t> random_bf16(size_t count, float scale, Random& random) {
  std::vector<uint16_t> values(count);
  for (uint16_t& v : values) v = kt::f32_to_bf16(scale * random.gaussian());
  return values;
}

// Two blocks: experts beside a gated MLP, behind a window and sinks; and a plain MLP.
struct Model {
  std::unique_ptr<kt::Pool> pool;
  std::shared_ptr<kt::Workspace> workspace;
  const kt::IsaTable* isa;
  Random random{11};
  std::vector<std::unique_ptr<kt::Linear>> linears;
  std::unique_ptr<kt::Layer> experts;
  std::vector<uint16_t> embedding, keys[2], values[2];
  std::vector<float> cos, sin;
  std::unique_ptr<kt::Decoder> decoder;

  Model(const kt::IsaTable* table, const std::vector<int>& threads, Format format) : isa(table) {
    kt::PoolConfig config;
    config.spin_us = 0;
    for (const int n : threads) config.nodes.push_back({-1, n, {}});
    KT_CHECK(kt::Pool::create(config, &pool).is_ok());
    workspace = std::make_shared<kt::Workspace>(pool.get());
    embedding = random_bf16(static_cast<size_t>(kVocabulary) * kHidden, 1, random);
    cos = random_floats(kMaxLen * kRotary / 2, random);
    sin = random_floats(kMaxLen * kRotary / 2, random);
    for (int i = 0; i < 2; ++i) {
      keys[i].resize(static_cast<size_t>(kSlots) * kKvHeads * kMaxLen * kHeadDim);
      values[i].resize(keys[i].size());
    }
    make_experts(format);
    const kt::Status made = kt::Decoder::create(workspace, isa, spec(format), &decoder);
    if (!made.is_ok()) std::printf("  %s\n", made.message().c_str());
    KT_CHECK(made.is_ok());
  }

  const kt::Linear* linear(Format format, int rows, int columns) {
    std::unique_ptr<kt::Linear>& made = linears.emplace_back();
    KT_CHECK(kt::Linear::create(workspace, isa, {format, rows, columns, true}, &made).is_ok());
    const float scale = 1 / std::sqrt(static_cast<float>(columns));
    KT_CHECK(made->load(random_bf16(static_cast<size_t>(rows) * columns, scale, random).data()).is_ok());
    KT_CHECK(made->load_bias(random_floats(rows, random).data()).is_ok());
    return made.get();
  }

  void make_experts(Format format) {
    kt::LayerConfig config;
    config.set_format(format);
    config.num_experts = kExperts;
    config.top_k = kTopK;
    config.hidden = kHidden;
    config.intermediate = kIntermediate;
    config.max_tokens = kSlots;
    KT_CHECK(kt::Layer::create(workspace, isa, config, &experts).is_ok());
    for (int e = 0; e < kExperts; ++e) {
      const size_t size = static_cast<size_t>(kHidden) * kIntermediate;
      const auto gate = random_bf16(size, 0.15f, random), up = random_bf16(size, 0.15f, random),
                 down = random_bf16(size, 0.1f, random);
      KT_CHECK(experts->load_expert(e, {gate.data(), up.data(), down.data()}).is_ok());
    }
  }

  kt::BlockConfig block(Format format, int index) {
    kt::BlockConfig b;
    b.attention_norm = random_floats(kHidden, random);
    b.ffn_norm = random_floats(kHidden, random);
    kt::AttentionConfig& a = b.attention;
    a.q = linear(format, kHeads * kHeadDim, kHidden);
    a.k = linear(format, kKvHeads * kHeadDim, kHidden);
    a.v = linear(format, kKvHeads * kHeadDim, kHidden);
    a.o = linear(format, kHidden, kHeads * kHeadDim);
    a.heads = kHeads;
    a.kv_heads = kKvHeads;
    a.head_dim = kHeadDim;
    a.q_norm = random_floats(index ? kHeadDim : kHeads * kHeadDim, random);
    a.k_norm = random_floats(index ? kHeadDim : kKvHeads * kHeadDim, random);
    if (index == 0) a.sinks = random_floats(kHeads, random);
    a.scale = 0.25f;
    a.window = index == 0 ? 300 : 0;
    a.cos = cos.data();
    a.sin = sin.data();
    a.rotary = kRotary;
    a.keys = keys[index].data();
    a.values = values[index].data();
    a.position_pitch = kHeadDim;
    a.head_pitch = static_cast<size_t>(kMaxLen) * kHeadDim;
    a.slot_pitch = kKvHeads * a.head_pitch;
    b.mlp = {linear(format, kMlp, kHidden), linear(format, kMlp, kHidden), linear(format, kHidden, kMlp), nullptr};
    if (index == 1) return b;
    b.mlp.scalar = linear(format, 1, kHidden);
    b.router = linear(Format::bf16, kExperts, kHidden);
    b.routing.num_experts = kExperts;
    b.routing.top_k = kTopK;
    b.experts = experts.get();
    return b;
  }

  kt::DecoderConfig spec(Format format) {
    kt::DecoderConfig c;
    c.hidden = kHidden;
    c.vocabulary = kVocabulary;
    c.slots = c.max_batch = kSlots;
    c.max_len = kMaxLen;
    c.eps = 1e-5f;
    c.embedding_scale = 1.5f;
    c.residual_scale = 0.8f;
    c.logits_scale = 0.5f;
    c.embedding = embedding.data();
    c.final_norm = random_floats(kHidden, random);
    c.head = linear(format, kVocabulary, kHidden);
    for (int i = 0; i < 2; ++i) c.blocks.push_back(block(format, i));
    return c;
  }

  std::vector<float> decode(std::vector<int64_t> slots, std::vector<int64_t> tokens, std::vector<int64_t> positions) {
    std::vector<float> logits(slots.size() * kVocabulary, NAN);
    const kt::DecodeArgs args{static_cast<int>(slots.size()), slots.data(), tokens.data(), positions.data(),
                              logits.data()};
    const kt::Status status = decoder->decode(args);
    if (!status.is_ok()) std::printf("  %s\n", status.message().c_str());
    KT_CHECK(status.is_ok());
    return logits;
  }

  // Slots filled to different lengths, then one step of all.
  std::vector<float> step_of_all() {
    Random text(5);
    for (int slot = 0; slot < kSlots; ++slot) {
      for (int block = 0; block < 2; ++block) {
        const size_t size = static_cast<size_t>(kKvHeads) * kMaxLen * kHeadDim;
        for (size_t i = slot * size; i < (slot + 1) * size; ++i) {
          keys[block][i] = text.gaussian_bf16();
          values[block][i] = text.gaussian_bf16();
        }
      }
    }
    return decode(all_slots, all_tokens, all_positions);
  }

  const std::vector<int64_t> all_slots{3, 0, 5, 1, 4, 2}, all_tokens{1, 69, 0, 33, 12, 7},
      all_positions{0, 599, 127, 128, 300, 41};
};

bool finite(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); });
}

}  // namespace

KT_TEST(rows_and_threads_change_no_bit) {
  for (const kt_test::Variant& v : kt_test::variants().run) {
    for (const Format format : {Format::bf16, Format::int8}) {
      Model one(v.table, {1}, format);
      const std::vector<float> first = one.step_of_all();
      KT_CHECK(finite(first));
      KT_CHECK(Model(v.table, {3}, format).step_of_all() == first);
      for (int row = 0; row < kSlots; ++row) {
        const std::vector<float> alone =
            one.decode({one.all_slots[row]}, {one.all_tokens[row]}, {one.all_positions[row]});
        KT_CHECK(std::equal(alone.begin(), alone.end(), first.begin() + row * kVocabulary));
      }
    }
  }
}

// Partial sums of the experts are rounded otherwise; rows are still alone.
KT_TEST(several_nodes) {
  const kt::IsaTable* isa = kt_test::variants().run.front().table;
  const std::vector<float> one = Model(isa, {1}, Format::bf16).step_of_all();
  for (const std::vector<int>& threads : {std::vector<int>{1, 1}, {2, 1}}) {
    const std::vector<float> got = Model(isa, threads, Format::bf16).step_of_all();
    double error = 0, size = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      error += std::pow(got[i] - one[i], 2);
      size += one[i] * one[i];
    }
    KT_CHECK(std::sqrt(error / size) < 0.01);
  }
}

KT_TEST(keys_are_written_at_their_position_only) {
  Model model(kt_test::variants().run.front().table, {2}, Format::bf16);
  const std::vector<uint16_t> before = model.keys[1];
  model.decode({2}, {5}, {17});
  for (size_t i = 0; i < before.size(); ++i) {
    const size_t position = i / kHeadDim % kMaxLen, slot = i / (static_cast<size_t>(kKvHeads) * kMaxLen * kHeadDim);
    if (slot == 2 && position == 17) continue;
    KT_CHECK_EQ(model.keys[1][i], before[i]);
  }
  KT_CHECK(!std::equal(before.begin(), before.end(), model.keys[1].begin()));
}

// A request whose keys are NaN must not spoil another's logits.
KT_TEST(a_row_that_is_not_finite_stays_alone) {
  Model model(kt_test::variants().run.front().table, {2}, Format::int8);
  const std::vector<float> clean = model.step_of_all();
  const size_t slot = static_cast<size_t>(kKvHeads) * kMaxLen * kHeadDim;
  std::fill_n(model.values[0].begin() + 5 * slot, slot, uint16_t{0x7fc0});
  const std::vector<float> got = model.decode(model.all_slots, model.all_tokens, model.all_positions);
  for (int row = 0; row < kSlots; ++row) {
    const auto from = got.begin() + row * kVocabulary;
    if (model.all_slots[row] == 5) {
      KT_CHECK(std::isnan(*from));
    } else {
      KT_CHECK(std::equal(from, from + kVocabulary, clean.begin() + row * kVocabulary));
    }
  }
}

KT_TEST(coverage) { kt_test::print_coverage(); }
