// The work between the matrix products, of every row of cmake/isa.cmake that runs here, against plain double loops.
#include <algorithm>
#include <memory>

#include "check.h"
#include "guarded.h"
#include "variants.h"

using kt::Activation;
using kt::ActKind;
using kt_test::Guarded;
using kt_test::Random;
using kt_test::Variant;

namespace {

constexpr int kDepths[] = {1,  2,  7,   8,   15,  16,  17,  31,  32,  33,  63,
                           64, 65, 200, 255, 256, 257, 300, 511, 512, 513, 1100};

struct Quantised {
  Guarded<uint8_t> data;
  Guarded<float> scales;
  Guarded<int32_t> group_sums, sums;

  Quantised(const Variant& v, ActKind kind, const Guarded<uint16_t>& x, int span = kt::kActGroup)
      : data(static_cast<size_t>(kt::padded_depth(static_cast<int>(x.size()))) * kt::act_bytes(kind)),
        scales(kt_test::acts_group_pitch(static_cast<int>(x.size()))),
        group_sums(scales.size()),
        sums(kt_test::acts_sum_pitch(static_cast<int>(x.size()))) {
    kt_test::now_running("%s quantise %s k=%zu", v.name, kt_test::act_name(kind), x.size());
    v.table->quantise(kind, x.data(), static_cast<int>(x.size()), span, data.data(), scales.data(), group_sums.data(),
                      sums.data());
    KT_CHECK(data.front_intact() && scales.front_intact() && group_sums.front_intact() && sums.front_intact());
  }
};

template <class T>
bool same_bytes(const Guarded<T>& a, const Guarded<T>& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.data(), b.data(), a.bytes()) == 0;
}

double kind_max(ActKind kind) { return kind == ActKind::s8 ? 127 : 32767; }

void check_group(ActKind kind, const Guarded<uint16_t>& x, const Quantised& q, int g, int span = kt::kActGroup) {
  const int k = static_cast<int>(x.size()), from = g * kt::kActGroup, to = std::min(k, from + kt::kActGroup);
  const int span_from = from / span * span, span_to = std::min(k, span_from + span);
  double largest = 0;
  for (int i = span_from; i < span_to; ++i)
    largest = std::max(largest, std::fabs(static_cast<double>(kt::bf16_to_f32(x[i]))));
  const double step = largest / kind_max(kind);
  KT_CHECK(std::fabs(q.scales[g] - step) <= 1e-6 * step);
  bool near = true, in_range = true;
  for (int i = from; i < to; ++i) {
    const int value = kt_test::quantised(kind, q.data.data(), i);
    near &= std::fabs(q.scales[g] * static_cast<double>(value) - kt::bf16_to_f32(x[i])) <= 0.5001 * step * (1 + 1e-4);
    in_range &= std::abs(value) <= kind_max(kind);
  }
  KT_CHECK(near);
  KT_CHECK(in_range);
}

void check_sums_and_padding(ActKind kind, const Quantised& q, int k) {
  std::vector<int> group_sums(q.group_sums.size());
  for (int g = 0; g < kt::padded_depth(k) / kt::kSumGroup; ++g) {
    int sum = 0;
    for (int i = g * kt::kSumGroup; i < (g + 1) * kt::kSumGroup; ++i) {
      const int value = kt_test::quantised(kind, q.data.data(), i);
      if (i >= k) KT_CHECK_EQ(value, 0);
      sum += value;
    }
    KT_CHECK_EQ(q.sums[g], sum);
    group_sums[g * kt::kSumGroup / kt::kActGroup] += sum;
  }
  for (size_t g = 0; g < group_sums.size(); ++g) KT_CHECK_EQ(q.group_sums[g], group_sums[g]);
}

template <class Body>
void for_each_quantiser(Body body) {
  for (const Variant& v : kt_test::variants().run) {
    for (ActKind kind : {ActKind::s8, ActKind::s16}) body(v, kind);
  }
}

}  // namespace

KT_TEST(quantise_rounds_to_nearest_and_sums_what_it_stored) {
  Random random(1);
  for (int k : kDepths) {
    Guarded<uint16_t> x(k);
    kt_test::fill_gaussian_bf16(x, random);
    for_each_quantiser([&](const Variant& v, ActKind kind) {
      const Quantised q(v, kind, x);
      for (int g = 0; g < kt_test::acts_group_pitch(k); ++g) check_group(kind, x, q, g);
      check_sums_and_padding(kind, q, k);
    });
  }
}

KT_TEST(groups_of_a_span_share_one_scale) {
  Random random(7);
  for (int k : {1, 300, 512, 1100, 2500}) {
    Guarded<uint16_t> x(k);
    kt_test::fill_gaussian_bf16(x, random);
    for_each_quantiser([&](const Variant& v, ActKind kind) {
      for (int span : {2 * kt::kActGroup, kt::kMaxSpan}) {
        const Quantised q(v, kind, x, span);
        for (int g = 0; g < kt_test::acts_group_pitch(k); ++g) check_group(kind, x, q, g, span);
        check_sums_and_padding(kind, q, k);
      }
    });
  }
}

KT_TEST(quantise_gives_the_same_bytes_on_every_variant) {
  Random random(2);
  for (int k : kDepths) {
    Guarded<uint16_t> x(k);
    for (uint16_t& bits : x) {
      // Any exponent: most values vanish beside the largest, and ties are frequent in small integers.
      bits = static_cast<uint16_t>(random.below(2) ? random.bits() & 0xbfff
                                                   : kt::f32_to_bf16(static_cast<float>(random.below(255) - 127)));
    }
    for (ActKind kind : {ActKind::s8, ActKind::s16}) {
      const Quantised first(kt_test::variants().run.front(), kind, x);
      for (const Variant& v : kt_test::variants().run) {
        const Quantised q(v, kind, x);
        KT_CHECK(same_bytes(q.data, first.data) && same_bytes(q.scales, first.scales));
        KT_CHECK(same_bytes(q.group_sums, first.group_sums) && same_bytes(q.sums, first.sums));
      }
    }
  }
}

KT_TEST(quantise_may_take_a_row_piece_by_piece) {
  Random random(8);
  Guarded<uint16_t> x(700);
  kt_test::fill_gaussian_bf16(x, random);
  for_each_quantiser([&](const Variant& v, ActKind kind) {
    const Quantised whole(v, kind, x);
    for (int cut : {256, 512}) {
      Guarded<uint16_t> tail(700 - cut);
      std::copy(x.begin() + cut, x.end(), tail.begin());
      const Quantised part(v, kind, tail);
      KT_CHECK(std::equal(part.data.begin(), part.data.end(), whole.data.begin() + cut * kt::act_bytes(kind)));
      KT_CHECK(std::equal(part.scales.begin(), part.scales.end(), whole.scales.begin() + cut / kt::kActGroup));
      KT_CHECK(
          std::equal(part.group_sums.begin(), part.group_sums.end(), whole.group_sums.begin() + cut / kt::kActGroup));
      KT_CHECK(std::equal(part.sums.begin(), part.sums.end(), whole.sums.begin() + cut / kt::kSumGroup));
    }
  });
}

// Powers of two, the largest and the smallest: the largest value of a group always becomes exactly the largest integer.
KT_TEST(quantise_never_saturates) {
  for_each_quantiser([&](const Variant& v, ActKind kind) {
    for (int bits = 0x0900; bits < 0x7f80; bits += 61) {
      Guarded<uint16_t> x(65);
      for (uint16_t& w : x) w = static_cast<uint16_t>(bits | 0x8000);
      x[64] = static_cast<uint16_t>(bits);
      const Quantised q(v, kind, x);
      KT_CHECK_EQ(kt_test::quantised(kind, q.data.data(), 0), -static_cast<int>(kind_max(kind)));
      KT_CHECK_EQ(kt_test::quantised(kind, q.data.data(), 64), static_cast<int>(kind_max(kind)));
    }
  });
}

// Where 1 / scale is no float the group is 0: its error is below 1e-34, and nothing is infinite.
KT_TEST(quantise_takes_zeros_and_denormals) {
  for (uint16_t bits : {0x0000, 0x8000, 0x0001, 0x807f, 0x0080, 0x0200, 0x0600, 0x0800}) {
    for_each_quantiser([&](const Variant& v, ActKind kind) {
      Guarded<uint16_t> x(40);
      for (uint16_t& w : x) w = bits;
      x[1] = 0;
      const Quantised q(v, kind, x);
      check_sums_and_padding(kind, q, 40);
      KT_CHECK(std::isfinite(q.scales[0]));
      const double value = kt::bf16_to_f32(bits);
      KT_CHECK(std::fabs(q.scales[0] * static_cast<double>(kt_test::quantised(kind, q.data.data(), 0)) - value) <=
               1e-34);
      KT_CHECK_EQ(kt_test::quantised(kind, q.data.data(), 1), 0);
      if (value == 0) KT_CHECK_EQ(q.scales[0], 0.0f);
    });
  }
}

// The scale carries NaN to the row's outputs; integers and sums stay in range, so the kernels need not care.
KT_TEST(quantise_turns_nan_and_inf_into_a_nan_scale_of_that_group) {
  Random random(3);
  for (uint16_t bits : {0x7fc0, 0xffc0, 0x7f81, 0x7f80, 0xff80}) {
    for (int at : {256, 257, 300, 511}) {
      Guarded<uint16_t> x(700);
      kt_test::fill_gaussian_bf16(x, random);
      x[at] = bits;
      if (at == 300) x[400] = bits;
      for_each_quantiser([&](const Variant& v, ActKind kind) {
        const Quantised q(v, kind, x);
        KT_CHECK(std::isfinite(q.scales[0]) && std::isnan(q.scales[1]) && std::isfinite(q.scales[2]));
        check_sums_and_padding(kind, q, 700);
        for (int i = 0; i < 700; ++i) KT_CHECK(std::abs(kt_test::quantised(kind, q.data.data(), i)) <= kind_max(kind));
        check_group(kind, x, q, 0);
        check_group(kind, x, q, 2);
      });
    }
  }
}

using Kind = kt::ActivationKind;

// Each kind without a limit and with limits; a limit and a slope so large that products overflow.
constexpr Activation kActivations[] = {
    {Kind::silu, 0, 0},
    {Kind::silu, 1.5f, 0},
    {Kind::silu, 7, 0},
    {Kind::silu, 3e38f, 0},
    {Kind::swiglu_alpha, 0, 1.702f},
    {Kind::swiglu_alpha, 7, 1.702f},
    {Kind::swiglu_alpha, 0, 3e38f},
    {Kind::swigluoai, 0, 1.702f},
    {Kind::swigluoai, 1.5f, 1.702f},
    {Kind::swigluoai, 7, 1.702f},
    {Kind::swigluoai, 3e38f, 1.702f},
    {Kind::gelu_tanh, 0, 0},
    {Kind::gelu_tanh, 1.5f, 0},
};

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

double activated(Activation a, double g, double u) {
  if (a.limit > 0) {
    g = std::min(g, static_cast<double>(a.limit));
    if (a.kind == Kind::swiglu_alpha) g = std::max(g, -static_cast<double>(a.limit));
    u = std::clamp(u, -static_cast<double>(a.limit), static_cast<double>(a.limit));
  }
  if (a.kind == Kind::gelu_tanh) return g * sigmoid(2 * std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g)) * u;
  return a.kind == Kind::silu ? g * sigmoid(g) * u : g * sigmoid(a.alpha * g) * (u + 1);
}

void check_activated(Activation a, double g, double u, uint16_t bits) {
  const double expected = activated(a, g, u), got = kt::bf16_to_f32(bits);
  // bf16 keeps 8 bits. Below 2^-120 * |g| the exponential is clamped. Three roundings in an exponent of at most 83 make
  // 1.5e-5; u + 1 is rounded where it cancels.
  const double limit = std::fabs(expected) * (1 / 256.0 + 2e-5) + 7.6e-37 * std::fabs(g) * (std::fabs(u) + 1) + 1e-40 +
                       (a.alpha > 0 ? 1.2e-7 * std::fabs(g) * sigmoid(a.alpha * g) : 0);
  if (!(std::fabs(got - expected) <= limit)) {
    kt_test::fail(__FILE__, __LINE__,
                  std::string(kt_test::running) + ": g=" + std::to_string(g) + " u=" + std::to_string(u) + " gives " +
                      std::to_string(got));
  }
}

// Rows of `pairs` pairs, one behind the other.
kt::GateUp pairs_of(const float* c, const float* bias, int pairs) {
  return {c, c + 16, static_cast<size_t>(32) * pairs, 32, bias};
}

void check_swiglu(const Variant& v, Activation activation, bool with_bias, int m, int pairs, Random& random) {
  constexpr float kGates[] = {0,   -0.0f, 1e-30f, -1e-30f, 1e-40f, 20,   -20,   60,    -60,   80,
                              -80, 87,    -87,    100,     -100,   1e4f, -1e4f, 1e30f, -1e30f};
  const size_t pitch = 16 * pairs + 3;
  Guarded<float> c(static_cast<size_t>(m) * pairs * 32);
  for (size_t i = 0; i < c.size(); ++i) {
    const bool edge = i % 32 < 16 && random.below(3) == 0;
    c[i] = edge ? kGates[random.below(std::size(kGates))] : 4 * random.gaussian();
  }
  c.seal();
  Guarded<float> bias(static_cast<size_t>(pairs) * 32);
  for (float& b : bias) b = with_bias ? 2 * random.gaussian() : 0;
  bias.seal();
  Guarded<uint16_t> h((m - 1) * pitch + 16 * pairs);
  kt_test::now_running("%s swiglu kind=%d limit=%g alpha=%g bias=%d m=%d pairs=%d", v.name,
                       static_cast<int>(activation.kind), activation.limit, activation.alpha, with_bias, m, pairs);
  v.table->swiglu(pairs_of(c.data(), with_bias ? bias.data() : nullptr, pairs), m, pairs, activation, h.data(), pitch);
  KT_CHECK(h.front_intact());
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < 16 * pairs; ++j) {
      const float* pair = c.data() + (static_cast<size_t>(i) * pairs + j / 16) * 32 + j % 16;
      const float* added = bias.data() + j / 16 * 32 + j % 16;
      check_activated(activation, pair[0] + added[0], pair[16] + added[16], h[i * pitch + j]);
    }
    for (size_t j = 16 * pairs; i + 1 < m && j < pitch; ++j) KT_CHECK_EQ(h[i * pitch + j], uint16_t{0xffff});
  }
}

KT_TEST(swiglu_agrees_with_fp64) {
  Random random(4);
  for (const Variant& v : kt_test::variants().run) {
    for (const Activation& activation : kActivations) {
      for (int m : {1, 3}) {
        for (int pairs : {1, 2, 5}) {
          for (bool with_bias : {false, true}) check_swiglu(v, activation, with_bias, m, pairs, random);
        }
      }
    }
  }
}

KT_TEST(swiglu_keeps_nan_in_its_element) {
  for (const Variant& v : kt_test::variants().run) {
    for (const Activation& activation : kActivations) {
      for (int at : {0, 5, 16, 31}) {
        Guarded<float> c(32);
        for (float& x : c) x = 1.5f;
        c[at] = NAN;
        Guarded<uint16_t> h(16);
        v.table->swiglu(pairs_of(c.data(), nullptr, 1), 1, 1, activation, h.data(), 16);
        for (int j = 0; j < 16; ++j) KT_CHECK_EQ(std::isnan(kt::bf16_to_f32(h[j])), j == at % 16);
        Guarded<float> one(32);
        for (float& x : one) x = 1;
        v.table->swiglu(pairs_of(one.data(), c.data(), 1), 1, 1, activation, h.data(), 16);
        for (int j = 0; j < 16; ++j) KT_CHECK_EQ(std::isnan(kt::bf16_to_f32(h[j])), j == at % 16);
      }
    }
  }
}

KT_TEST(relu2_looks_at_up_only) {
  Random random(6);
  for (const Variant& v : kt_test::variants().run) {
    for (const int pairs : {1, 3}) {
      Guarded<float> up(static_cast<size_t>(2) * pairs * 16);
      for (float& x : up) x = 4 * random.gaussian();
      up[3] = 1e30f;
      up[4] = NAN;
      up[5] = -0.0f;
      up.seal();
      Guarded<uint16_t> h(up.size());
      v.table->swiglu({nullptr, up.data(), static_cast<size_t>(16) * pairs, 16, nullptr}, 2, pairs, {Kind::relu2},
                      h.data(), static_cast<size_t>(16) * pairs);
      KT_CHECK(h.front_intact());
      for (size_t i = 0; i < up.size(); ++i) {
        const float u = up[i] < 0 ? 0 : up[i];
        KT_CHECK_EQ(h[i], kt::f32_to_bf16(u * u));
      }
    }
  }
}

KT_TEST(swiglu_gives_the_same_bytes_on_every_variant) {
  Random random(5);
  Guarded<float> c(64 * 32), bias(8 * 32);
  for (float& x : c) x = 6 * random.gaussian();
  for (float& x : bias) x = random.gaussian();
  for (const Activation& activation : kActivations) {
    for (const float* added : {static_cast<const float*>(nullptr), static_cast<const float*>(bias.data())}) {
      Guarded<uint16_t> first(64 * 16);
      kt_test::variants().run.front().table->swiglu(pairs_of(c.data(), added, 8), 8, 8, activation, first.data(),
                                                    8 * 16);
      for (const Variant& v : kt_test::variants().run) {
        Guarded<uint16_t> h(64 * 16);
        v.table->swiglu(pairs_of(c.data(), added, 8), 8, 8, activation, h.data(), 8 * 16);
        KT_CHECK(same_bytes(h, first));
        // The same values, gate and up in two matrices.
        std::vector<float> apart[2];
        for (size_t i = 0; i < c.size(); ++i) apart[i % 32 / 16].push_back(c[i]);
        v.table->swiglu({apart[0].data(), apart[1].data(), 8 * 16, 16, added}, 8, 8, activation, h.data(), 8 * 16);
        KT_CHECK(same_bytes(h, first));
      }
    }
  }
}

KT_TEST(accumulate_is_a_fused_multiply_add) {
  Random random(6);
  for (const Variant& v : kt_test::variants().run) {
    for (int n : {16, 32, 48, 112, 1024}) {
      Guarded<float> acc(n), c(n);
      std::vector<float> expected(n);
      const float weight = random.gaussian();
      for (int j = 0; j < n; ++j) {
        acc[j] = random.gaussian();
        c[j] = random.gaussian();
        expected[j] = std::fma(c[j], weight, acc[j]);
      }
      c.seal();
      kt_test::now_running("%s accumulate n=%d", v.name, n);
      v.table->accumulate(acc.data(), c.data(), weight, n);
      KT_CHECK(acc.front_intact());
      KT_CHECK(std::memcmp(acc.data(), expected.data(), acc.bytes()) == 0);
    }
  }
}

enum class Addend { none, output, other };

KT_TEST(store_sums_parts_in_order_and_rounds_once) {
  Random random(7);
  for (const Variant& v : kt_test::variants().run) {
    for (int n : {1, 7, 8, 9, 15, 16, 17, 31, 33, 100, 128}) {
      for (int n_parts : {1, 2, 3, 5}) {
        for (Addend kind : {Addend::none, Addend::output, Addend::other}) {
          std::vector<std::unique_ptr<Guarded<float>>> parts;
          std::vector<const float*> pointers;
          for (int p = 0; p < n_parts; ++p) {
            parts.push_back(std::make_unique<Guarded<float>>(n));
            for (float& x : *parts.back()) x = random.gaussian();
            parts.back()->seal();
            pointers.push_back(parts.back()->data());
          }
          Guarded<uint16_t> out(n), other(n);
          kt_test::fill_gaussian_bf16(out, random);
          kt_test::fill_gaussian_bf16(other, random);
          other.seal();
          const uint16_t* addend = kind == Addend::none ? nullptr : kind == Addend::output ? out.data() : other.data();
          std::vector<uint16_t> expected(n);
          for (int j = 0; j < n; ++j) {
            float sum = pointers[0][j];
            for (int p = 1; p < n_parts; ++p) sum += pointers[p][j];
            expected[j] = kt::f32_to_bf16(addend ? sum + kt::bf16_to_f32(addend[j]) : sum);
          }
          kt_test::now_running("%s store n=%d n_parts=%d addend=%d", v.name, n, n_parts, static_cast<int>(kind));
          v.table->store(pointers.data(), n_parts, n, addend, out.data());
          KT_CHECK(out.front_intact());
          KT_CHECK(std::memcmp(out.data(), expected.data(), out.bytes()) == 0);
        }
      }
    }
  }
}

KT_TEST(combine_adds_weighted_rows_in_their_order) {
  Random random(8);
  constexpr int kRows = 7, kRow = kt::kPairColumns;
  Guarded<float> c(kRows * kRow);
  for (float& x : c) x = random.gaussian();
  c.seal();
  for (const Variant& v : kt_test::variants().run) {
    for (int columns : {1, 7, 8, 15, 16, 17, 31, 32}) {
      for (int n : {0, 1, 2, 8}) {
        Guarded<int32_t> rows(n);
        Guarded<float> weights(n);
        for (int i = 0; i < n; ++i) {
          rows[i] = (5 * i + 3) % kRows;  // not in order, one of them twice
          weights[i] = random.gaussian();
        }
        std::vector<float> sums(kRow);
        for (int i = 0; i < n; ++i) {
          for (int j = 0; j < kRow; ++j) sums[j] = std::fma(c[rows[i] * kRow + j], weights[i], sums[j]);
        }
        kt_test::now_running("%s combine columns=%d n=%d", v.name, columns, n);
        Guarded<float> f32(kRow);
        v.table->combine({c.data(), rows.data(), weights.data(), n, columns, nullptr, nullptr, f32.data()});
        KT_CHECK(f32.front_intact());
        KT_CHECK(std::memcmp(f32.data(), sums.data(), f32.bytes()) == 0);
        for (Addend kind : {Addend::none, Addend::output, Addend::other}) {
          Guarded<uint16_t> out(columns), other(columns);
          kt_test::fill_gaussian_bf16(out, random);
          kt_test::fill_gaussian_bf16(other, random);
          other.seal();
          const uint16_t* addend = kind == Addend::none ? nullptr : kind == Addend::output ? out.data() : other.data();
          std::vector<uint16_t> expected(columns);
          for (int j = 0; j < columns; ++j) {
            expected[j] = kt::f32_to_bf16(addend ? sums[j] + kt::bf16_to_f32(addend[j]) : sums[j]);
          }
          v.table->combine({c.data(), rows.data(), weights.data(), n, columns, addend, out.data(), nullptr});
          KT_CHECK(out.front_intact());
          KT_CHECK(std::memcmp(out.data(), expected.data(), out.bytes()) == 0);
        }
      }
    }
  }
}

KT_TEST(store_rounds_to_nearest_even) {
  struct Case {
    uint32_t f32;
    uint16_t bf16;
  };
  constexpr Case kCases[] = {
      {0x3f800000, 0x3f80}, {0x3f808000, 0x3f80}, {0x3f818000, 0x3f82}, {0x3f808001, 0x3f81}, {0x3f807fff, 0x3f80},
      {0xbf808000, 0xbf80}, {0xbf818000, 0xbf82}, {0x7f7fffff, 0x7f80}, {0x7f7f7fff, 0x7f7f}, {0x7f800000, 0x7f80},
      {0xff800000, 0xff80}, {0x00000000, 0x0000}, {0x80000000, 0x8000}, {0x00008001, 0x0001}, {0x00018000, 0x0002},
      {0x7fc00000, 0x7fc0}, {0xffc00000, 0xffc0}, {0x7f800001, 0x7fc0}, {0x7fffffff, 0x7fff}, {0xffffffff, 0xffff},
  };
  for (const Variant& v : kt_test::variants().run) {
    for (const Case& edge : kCases) {
      Guarded<float> part(17);  // a vector and a tail
      for (float& x : part) std::memcpy(&x, &edge.f32, 4);
      Guarded<uint16_t> out(17);
      const float* parts[] = {part.data()};
      v.table->store(parts, 1, 17, nullptr, out.data());
      for (uint16_t bits : out) KT_CHECK_EQ(bits, edge.bf16);
    }
  }
}

KT_TEST(coverage) { kt_test::print_coverage(); }
