// A decoder with latent attention against fp64, in the form that makes keys and values of every head; what never
// changes a bit; and, under the thread sanitizer, that no phase reads what another worker still writes.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "decoder/decoder.h"
#include "variants.h"

using kt::Format;
using kt::RotaryPairs;
using kt_test::Random;

namespace {

constexpr int kHidden = 48, kVocabulary = 70, kSlots = 6, kMaxLen = 600, kMlp = 40, kBlocks = 2;
constexpr int kHeads = 6, kRank = 32, kNope = 24, kValue = 16, kRotary = 16, kQRank = 40;
constexpr int kKey = kRank + kRotary, kPitch = kKey + 16;
constexpr float kScale = 0.1f, kEps = 1e-5f, kLatentEps = 1e-2f;

using Row = std::vector<double>;

struct Model {
  std::unique_ptr<kt::Pool> pool;
  std::shared_ptr<kt::Workspace> workspace;
  const kt::IsaTable* isa;
  Random random{11};
  std::vector<std::unique_ptr<kt::Linear>> linears;
  std::vector<uint16_t> embedding, keys[kBlocks];
  std::vector<float> cos, sin;
  kt::DecoderConfig config;
  std::unique_ptr<kt::Decoder> decoder;

  // The first block has q_a, the second none.
  Model(const kt::IsaTable* table, const std::vector<int>& threads, Format format, RotaryPairs pairs) : isa(table) {
    kt::PoolConfig nodes;
    nodes.spin_us = 0;
    for (const int n : threads) nodes.nodes.push_back({-1, n, {}});
    KT_CHECK(kt::Pool::create(nodes, &pool).is_ok());
    workspace = std::make_shared<kt::Workspace>(pool.get());
    embedding = bf16(static_cast<size_t>(kVocabulary) * kHidden, 1);
    for (int i = 0; i < kMaxLen * kRotary / 2; ++i) {
      const float angle = 3 * random.gaussian();
      cos.push_back(std::cos(angle));
      sin.push_back(std::sin(angle));
    }
    for (auto& block : keys) block = bf16(static_cast<size_t>(kSlots) * kMaxLen * kPitch, 1);
    config.hidden = kHidden;
    config.vocabulary = kVocabulary;
    config.slots = config.max_batch = kSlots;
    config.max_len = kMaxLen;
    config.eps = kEps;
    config.embedding = embedding.data();
    config.final_norm = norm(kHidden);
    config.head = linear(format, kVocabulary, kHidden);
    for (int i = 0; i < kBlocks; ++i) config.blocks.push_back(block(format, i, pairs));
    const kt::Status made = kt::Decoder::create(workspace, isa, config, &decoder);
    if (!made.is_ok()) std::printf("  %s\n", made.message().c_str());
    KT_CHECK(made.is_ok());
  }

  std::vector<uint16_t> bf16(size_t count, float scale) {
    std::vector<uint16_t> values(count);
    for (uint16_t& v : values) v = kt::f32_to_bf16(scale * random.gaussian());
    return values;
  }

  std::vector<float> norm(int count) {
    std::vector<float> values(count);
    for (float& v : values) v = 1 + 0.1f * random.gaussian();
    return values;
  }

  const kt::Linear* linear(Format format, int rows, int columns) {
    std::unique_ptr<kt::Linear>& made = linears.emplace_back();
    KT_CHECK(kt::Linear::create(workspace, isa, {format, rows, columns, false}, &made).is_ok());
    const float scale = 1 / std::sqrt(static_cast<float>(columns));
    KT_CHECK(made->load(bf16(static_cast<size_t>(rows) * columns, scale).data()).is_ok());
    return made.get();
  }

  kt::BlockConfig block(Format format, int index, RotaryPairs pairs) {
    kt::BlockConfig b;
    b.attention_norm = norm(kHidden);
    b.ffn_norm = norm(kHidden);
    b.mlp = {linear(format, kMlp, kHidden), linear(format, kMlp, kHidden), linear(format, kHidden, kMlp), nullptr};
    kt::AttentionConfig& a = b.attention;
    kt::LatentConfig& l = a.latent;
    if (index == 0) {
      l.q_a = linear(format, kQRank, kHidden);
      l.q_norm = norm(kQRank);
    }
    a.q = linear(format, kHeads * (kNope + kRotary), l.q_a ? kQRank : kHidden);
    a.o = linear(format, kHidden, kHeads * kValue);
    l.kv_a = linear(format, kKey, kHidden);
    l.kv_norm = norm(kRank);
    l.k_up = linear(Format::bf16, kHeads * kRank, kNope);
    l.v_up = linear(Format::bf16, kHeads * kValue, kRank);
    l.rank = kRank;
    l.nope = kNope;
    l.value_dim = kValue;
    l.eps = kLatentEps;
    a.heads = kHeads;
    a.kv_heads = 1;
    a.head_dim = kKey;
    a.scale = kScale;
    a.cos = cos.data();
    a.sin = sin.data();
    a.rotary = kRotary;
    a.pairs = pairs;
    a.keys = keys[index].data();
    a.position_pitch = kPitch;
    a.slot_pitch = a.head_pitch = static_cast<size_t>(kMaxLen) * kPitch;
    return b;
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

  std::vector<float> step_of_all() { return decode(all_slots, all_tokens, all_positions); }

  const std::vector<int64_t> all_slots{3, 0, 5, 1, 4, 2}, all_tokens{1, 69, 0, 33, 12, 7},
      all_positions{0, 599, 127, 128, 300, 41};
};

// The same in fp64, from the weights as the kernels see them and the latents of a cache.
struct Reference {
  const Model& model;
  const std::vector<uint16_t>* keys;  // of each block, before the step

  static Row product(const kt::Linear* linear, const Row& x) {
    const int rows = linear->config().rows, columns = linear->config().columns;
    std::vector<float> weights(static_cast<size_t>(rows) * columns);
    linear->decode(weights.data());
    Row y(rows);
    for (int i = 0; i < rows; ++i) {
      for (int k = 0; k < columns; ++k) y[i] += weights[static_cast<size_t>(i) * columns + k] * x[k];
    }
    return y;
  }

  static Row normed(const Row& x, const std::vector<float>& weight, double eps) {
    double sum = 0;
    for (const double v : x) sum += v * v;
    Row y(x.size());
    for (size_t i = 0; i < x.size(); ++i) y[i] = x[i] / std::sqrt(sum / x.size() + eps) * weight[i];
    return y;
  }

  Row turned(const Row& x, RotaryPairs pairs, int64_t position) const {
    Row y(kRotary);
    constexpr int kHalf = kRotary / 2;
    for (int i = 0; i < kHalf; ++i) {
      const bool halves = pairs == RotaryPairs::halves, stay = pairs == RotaryPairs::neighbours;
      const double a = x[halves ? i : 2 * i], b = x[halves ? i + kHalf : 2 * i + 1];
      const double c = model.cos[position * kHalf + i], s = model.sin[position * kHalf + i];
      y[stay ? 2 * i : i] = a * c - b * s;
      y[stay ? 2 * i + 1 : i + kHalf] = b * c + a * s;
    }
    return y;
  }

  // Keys K_h c and values V_h c of every position, as transformers makes them.
  Row attention(int block, const Row& x, int64_t slot, int64_t position) const {
    const kt::AttentionConfig& a = model.config.blocks[block].attention;
    const kt::LatentConfig& l = a.latent;
    const Row q = product(a.q, l.q_a ? normed(product(l.q_a, x), l.q_norm, kLatentEps) : x);
    const Row kv = product(l.kv_a, x);
    std::vector<Row> latents, turned_keys;
    for (int64_t j = 0; j < position; ++j) {
      Row& row = latents.emplace_back();
      for (int i = 0; i < kKey; ++i) row.push_back(kt::bf16_to_f32(keys[block][(slot * kMaxLen + j) * kPitch + i]));
      turned_keys.emplace_back(row.begin() + kRank, row.end());
      row.resize(kRank);
    }
    latents.push_back(normed({kv.begin(), kv.begin() + kRank}, l.kv_norm, kLatentEps));
    turned_keys.push_back(turned({kv.begin() + kRank, kv.end()}, a.pairs, position));
    std::vector<float> k_up(static_cast<size_t>(kHeads) * kRank * kNope),
        v_up(static_cast<size_t>(kHeads) * kValue * kRank);
    l.k_up->decode(k_up.data());
    l.v_up->decode(v_up.data());
    Row out;
    for (int h = 0; h < kHeads; ++h) {
      const auto head = q.begin() + h * (kNope + kRotary);
      const Row q_turned = turned({head + kNope, head + kNope + kRotary}, a.pairs, position);
      Row scores, mixed(kValue);
      for (size_t j = 0; j < latents.size(); ++j) {
        double score = 0;
        for (int n = 0; n < kNope; ++n) {
          double key = 0;
          for (int r = 0; r < kRank; ++r) key += k_up[(static_cast<size_t>(h) * kRank + r) * kNope + n] * latents[j][r];
          score += head[n] * key;
        }
        for (int i = 0; i < kRotary; ++i) score += q_turned[i] * turned_keys[j][i];
        scores.push_back(std::exp(kScale * score));
      }
      double sum = 0;
      for (const double s : scores) sum += s;
      for (size_t j = 0; j < latents.size(); ++j) {
        for (int v = 0; v < kValue; ++v) {
          double value = 0;
          for (int r = 0; r < kRank; ++r)
            value += v_up[(static_cast<size_t>(h) * kValue + v) * kRank + r] * latents[j][r];
          mixed[v] += scores[j] / sum * value;
        }
      }
      out.insert(out.end(), mixed.begin(), mixed.end());
    }
    return product(a.o, out);
  }

  Row logits(int64_t slot, int64_t token, int64_t position) const {
    Row x;
    for (int i = 0; i < kHidden; ++i) x.push_back(kt::bf16_to_f32(model.embedding[token * kHidden + i]));
    for (int block = 0; block < kBlocks; ++block) {
      const kt::BlockConfig& b = model.config.blocks[block];
      const Row attended = attention(block, normed(x, b.attention_norm, kEps), slot, position);
      for (int i = 0; i < kHidden; ++i) x[i] += attended[i];
      const Row in = normed(x, b.ffn_norm, kEps), gate = product(b.mlp.gate, in);
      Row up = product(b.mlp.up, in);
      for (int i = 0; i < kMlp; ++i) up[i] *= gate[i] / (1 + std::exp(-gate[i]));
      const Row down = product(b.mlp.down, up);
      for (int i = 0; i < kHidden; ++i) x[i] += down[i];
    }
    return product(model.config.head, normed(x, model.config.final_norm, kEps));
  }
};

double difference(const float* got, const Row& wanted) {
  double error = 0, size = 0;
  for (int i = 0; i < kVocabulary; ++i) {
    error += std::pow(got[i] - wanted[i], 2);
    size += wanted[i] * wanted[i];
  }
  return std::sqrt(error / size);
}

constexpr RotaryPairs kPairs[] = {RotaryPairs::halves, RotaryPairs::neighbours, RotaryPairs::gathered};

}  // namespace

// Rounding to bf16 between products is what is left; another position of the same token is the control.
KT_TEST(logits_agree_with_fp64) {
  for (const kt_test::Variant& v : kt_test::variants().run) {
    for (const RotaryPairs pairs : kPairs) {
      Model model(v.table, {2}, Format::bf16, pairs);
      const std::vector<uint16_t> before[kBlocks] = {model.keys[0], model.keys[1]};
      const Reference reference{model, before};
      const std::vector<float> got = model.step_of_all();
      for (int row = 0; row < kSlots; ++row) {
        const int64_t slot = model.all_slots[row], token = model.all_tokens[row], position = model.all_positions[row];
        const float* logits = got.data() + row * kVocabulary;
        const double error = difference(logits, reference.logits(slot, token, position));
        if (error >= 0.01) std::printf("  %s, position %d: %g\n", v.name, static_cast<int>(position), error);
        KT_CHECK(error < 0.01);
        KT_CHECK(difference(logits, reference.logits(slot, token, (position + 1) % kMaxLen)) > 0.02);
      }
    }
  }
}

KT_TEST(rows_threads_and_nodes_change_no_bit) {
  for (const kt_test::Variant& v : kt_test::variants().run) {
    for (const Format format : {Format::bf16, Format::int8}) {
      Model one(v.table, {1}, format, RotaryPairs::gathered);
      const std::vector<float> first = one.step_of_all();
      KT_CHECK(std::all_of(first.begin(), first.end(), [](float x) { return std::isfinite(x); }));
      for (const std::vector<int>& threads : {std::vector<int>{3}, {2, 1}})
        KT_CHECK(Model(v.table, threads, format, RotaryPairs::gathered).step_of_all() == first);
      for (int row = 0; row < kSlots; ++row) {
        const std::vector<float> alone =
            one.decode({one.all_slots[row]}, {one.all_tokens[row]}, {one.all_positions[row]});
        KT_CHECK(std::equal(alone.begin(), alone.end(), first.begin() + row * kVocabulary));
      }
    }
  }
}

KT_TEST(latents_are_written_at_their_position_only) {
  Model model(kt_test::variants().run.front().table, {2}, Format::bf16, RotaryPairs::neighbours);
  const std::vector<uint16_t> before = model.keys[1];
  model.decode({2}, {5}, {17});
  const size_t first = (2 * static_cast<size_t>(kMaxLen) + 17) * kPitch;
  int changed = 0;
  for (size_t i = 0; i < before.size(); ++i) {
    if (i < first || i >= first + kKey) KT_CHECK_EQ(model.keys[1][i], before[i]);
    changed += model.keys[1][i] != before[i];
  }
  KT_CHECK(changed > kKey / 2);
}

KT_TEST(errors_say_what_is_wrong) {
  Model model(kt_test::variants().run.front().table, {1}, Format::int8, RotaryPairs::halves);
  const auto fails = [&](const char* with, auto change) {
    kt::DecoderConfig config = model.config;
    change(config.blocks[0].attention);
    std::unique_ptr<kt::Decoder> made;
    const kt::Status status = kt::Decoder::create(model.workspace, model.isa, config, &made);
    const bool found = !status.is_ok() && status.message().find(with) != std::string::npos;
    if (!found) std::printf("  '%s' lacks '%s'\n", status.message().c_str(), with);
    return found;
  };
  const kt::Linear* quantised = model.linear(Format::int8, kHeads * kRank, kNope);
  KT_CHECK(fails("a latent of 32 elements and 8", [](auto& a) { a.rotary = 8; }));
  KT_CHECK(fails("kv_norm has 3 elements", [](auto& a) { a.latent.kv_norm.resize(3); }));
  KT_CHECK(fails("q_norm has 0 elements", [](auto& a) { a.latent.q_norm.clear(); }));
  KT_CHECK(fails("q is [240, 40]; it must be [240, 48]", [](auto& a) { a.latent.q_a = nullptr; }));
  KT_CHECK(fails("v_up has 17 rows for a head", [](auto& a) { a.latent.value_dim = 17; }));
  KT_CHECK(fails("k_up is missing", [](auto& a) { a.latent.k_up = nullptr; }));
  KT_CHECK(fails("k_up must be packed in bf16", [&](auto& a) { a.latent.k_up = quantised; }));
  KT_CHECK(fails("eps of its latents", [](auto& a) { a.latent.eps = 0; }));
  KT_CHECK(fails("pitches", [](auto& a) { a.position_pitch = kKey - 1; }));
}

KT_TEST(coverage) { kt_test::print_coverage(); }
