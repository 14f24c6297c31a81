// What a decoder does between its products, of every row of cmake/isa.cmake that runs here, against plain double loops.
#include <algorithm>
#include <vector>

#include "check.h"
#include "guarded.h"
#include "variants.h"

using kt_test::Guarded;
using kt_test::Random;
using kt_test::Variant;

namespace {

constexpr int kSizes[] = {1, 7, 8, 9, 15, 16, 17, 31, 33, 100, 128, 2048};

double value(uint16_t bits) { return kt::bf16_to_f32(bits); }

// Half a unit of bf16, and f32 noise.
bool near_bf16(uint16_t bits, double expected) {
  return std::fabs(value(bits) - expected) <= std::fabs(expected) * (1 / 256.0) + 1e-30;
}

void fill(Guarded<float>& buffer, Random& random) {
  for (float& x : buffer) x = random.gaussian();
}

}  // namespace

KT_TEST(finish_adds_and_scales_in_order) {
  Random random(1);
  for (const Variant& v : kt_test::variants().run) {
    for (const int n : kSizes) {
      for (int with = 0; with < 4; ++with) {
        Guarded<float> c(n), bias(n), f32(n);
        Guarded<uint16_t> addend(n), bf16(n);
        fill(c, random);
        fill(bias, random);
        kt_test::fill_gaussian_bf16(addend, random);
        c.seal();
        bias.seal();
        addend.seal();
        const float scale = random.gaussian();
        kt::FinishArgs args{
            c.data(),  with & 1 ? bias.data() : nullptr, scale, with & 2 ? addend.data() : nullptr, n, nullptr,
            f32.data()};
        kt_test::now_running("%s finish n=%d with=%d", v.name, n, with);
        v.table->finish(args);
        args.f32 = nullptr;
        args.bf16 = bf16.data();
        v.table->finish(args);
        KT_CHECK(f32.front_intact() && bf16.front_intact());
        for (int j = 0; j < n; ++j) {
          float x = scale * (with & 1 ? c[j] + bias[j] : c[j]);
          if (with & 2) x += kt::bf16_to_f32(addend[j]);
          KT_CHECK_EQ(f32[j], x);
          KT_CHECK_EQ(bf16[j], kt::f32_to_bf16(x));
        }
      }
    }
  }
}

KT_TEST(squares_are_summed_and_rows_normalised) {
  Random random(2);
  for (const Variant& v : kt_test::variants().run) {
    for (const int n : kSizes) {
      Guarded<uint16_t> x(n), out(n);
      Guarded<float> weight(n);
      kt_test::fill_gaussian_bf16(x, random);
      fill(weight, random);
      x.seal();
      weight.seal();
      double sum = 0;
      for (const uint16_t bits : x) sum += value(bits) * value(bits);
      kt_test::now_running("%s norm n=%d", v.name, n);
      KT_CHECK(std::fabs(v.table->sum_of_squares(x.data(), n) - sum) <= 1e-5 * sum);
      v.table->normalise(x.data(), 0.7f, weight.data(), n, out.data());
      KT_CHECK(out.front_intact());
      for (int j = 0; j < n; ++j) KT_CHECK(near_bf16(out[j], value(x[j]) * 0.7f * weight[j]));
    }
  }
}

KT_TEST(rotate_turns_halves_or_neighbours) {
  Random random(3);
  for (const Variant& v : kt_test::variants().run) {
    for (const int n : {16, 64, 80, 128}) {
      for (const int rotary : {0, 2, 16, n / 2, n}) {
        for (int with = 0; with < 6; ++with) {
          const kt::RotaryPairs pairs =
              std::vector{kt::RotaryPairs::halves, kt::RotaryPairs::neighbours, kt::RotaryPairs::gathered}[with % 3];
          const bool of_neighbours = pairs != kt::RotaryPairs::halves, apart = pairs != kt::RotaryPairs::neighbours;
          Guarded<uint16_t> x(n);
          Guarded<float> weight(n), cos(rotary / 2), sin(rotary / 2), out(n);
          kt_test::fill_gaussian_bf16(x, random);
          for (auto* buffer : {&weight, &cos, &sin}) fill(*buffer, random);
          x.seal();
          kt_test::now_running("%s rotate n=%d rotary=%d with=%d", v.name, n, rotary, with);
          v.table->rotate({x.data(), 0.6f, with & 1 ? weight.data() : nullptr, n, cos.data(), sin.data(), rotary, pairs,
                           out.data()});
          KT_CHECK(out.front_intact());
          const auto y = [&](int i) { return value(x[i]) * 0.6f * (with & 1 ? weight[i] : 1.0f); };
          for (int i = 0; i < n; ++i) {
            const int pair = apart ? i % std::max(1, rotary / 2) : i / 2;
            const bool second = apart ? i >= rotary / 2 : i % 2;
            const int low = of_neighbours ? 2 * pair : pair, high = of_neighbours ? low + 1 : low + rotary / 2;
            if (i >= rotary) {
              KT_CHECK(std::fabs(out[i] - y(i)) <= 1e-6 * std::fabs(y(i)));
              continue;
            }
            const double expected =
                second ? y(high) * cos[pair] + y(low) * sin[pair] : y(low) * cos[pair] - y(high) * sin[pair];
            KT_CHECK(std::fabs(out[i] - expected) <= 2e-6 * (std::fabs(y(low)) + std::fabs(y(high)) + 1));
          }
        }
      }
    }
  }
}

namespace {

// Values of another depth than the keys lie in them, as latents do.
struct AttendCase {
  int heads, head_dim, value_dim, count;
  size_t pitch;
  float scale, softcap;
  Guarded<float> q;
  Guarded<uint16_t> keys, values;
  Guarded<float> out, most, sum;

  AttendCase(int h, int d, int dv, int n, float cap, Random& random)
      : heads(h),
        head_dim(d),
        value_dim(dv),
        count(n),
        pitch(d + 16),
        scale(2 / std::sqrt(static_cast<float>(d))),
        softcap(cap),
        q(static_cast<size_t>(h) * d),
        keys((n - 1) * pitch + d),
        values((n - 1) * pitch + d),
        out(static_cast<size_t>(h) * dv),
        most(h),
        sum(h) {
    fill(q, random);
    kt_test::fill_gaussian_bf16(keys, random);
    kt_test::fill_gaussian_bf16(values, random);
  }

  kt::AttendArgs args() {
    return {q.data(), heads, head_dim, value_dim,  keys.data(), value_data(), pitch,
            count,    scale, softcap,  out.data(), most.data(), sum.data()};
  }

  const uint16_t* value_data() const { return value_dim == head_dim ? values.data() : keys.data(); }

  void check() const {
    for (int h = 0; h < heads; ++h) {
      std::vector<double> score(count);
      for (int j = 0; j < count; ++j) {
        for (int d = 0; d < head_dim; ++d)
          score[j] += static_cast<double>(q[h * head_dim + d]) * value(keys[j * pitch + d]);
        score[j] *= scale;
        if (softcap > 0) score[j] = softcap * std::tanh(score[j] / softcap);
      }
      const double largest = *std::max_element(score.begin(), score.end());
      double total = 0;
      std::vector<double> mixed(value_dim);
      for (int j = 0; j < count; ++j) {
        const double weight = std::exp(score[j] - largest);
        total += weight;
        for (int d = 0; d < value_dim; ++d) mixed[d] += weight * value(value_data()[j * pitch + d]);
      }
      KT_CHECK(std::fabs(most[h] - largest) <= 1e-4);
      KT_CHECK(std::fabs(sum[h] - total) <= 1e-4 * total);
      for (int d = 0; d < value_dim; ++d)
        KT_CHECK(std::fabs(out[h * value_dim + d] / sum[h] - mixed[d] / total) <= 2e-4);
    }
  }
};

}  // namespace

KT_TEST(attend_agrees_with_fp64) {
  Random random(4);
  for (const Variant& v : kt_test::variants().run) {
    for (const int head_dim : {16, 48, 64, 80, 128}) {
      for (const int count : {1, 2, 7, 8, 16, 17, 100, 128, 129, 300}) {
        const int heads = 1 + random.below(7);
        const int value_dim = random.below(2) ? head_dim : 16 * (1 + random.below(head_dim / 16));
        AttendCase test(heads, head_dim, value_dim, count, random.below(2) ? 0.0f : 3.0f, random);
        for (auto* sealed : {&test.keys, &test.values}) sealed->seal();
        test.q.seal();
        kt_test::now_running("%s attend heads=%d head_dim=%d count=%d", v.name, heads, head_dim, count);
        v.table->attend(test.args());
        KT_CHECK(test.out.front_intact() && test.most.front_intact() && test.sum.front_intact());
        test.check();
      }
    }
  }
}

// Scores from -3000 to 3000, so that blocks differ by more than an exponential holds.
KT_TEST(attend_survives_large_scores) {
  Random random(5);
  for (const Variant& v : kt_test::variants().run) {
    AttendCase test(2, 64, 64, 400, 0, random);
    test.scale = 300;
    v.table->attend(test.args());
    for (int h = 0; h < test.heads; ++h) KT_CHECK(std::isfinite(test.sum[h]) && test.sum[h] >= 1);
    for (const float x : test.out) KT_CHECK(std::isfinite(x));
  }
}

KT_TEST(heads_do_not_depend_on_each_other) {
  Random random(6);
  for (const Variant& v : kt_test::variants().run) {
    AttendCase test(7, 64, 64, 200, 0, random);
    v.table->attend(test.args());
    const std::vector<float> together(test.out.begin(), test.out.end());
    kt::AttendArgs args = test.args();
    args.heads = 1;
    for (int h = 0; h < 7; ++h) {
      args.q = test.q.data() + h * 64;
      v.table->attend(args);
      KT_CHECK(std::equal(together.begin() + h * 64, together.begin() + (h + 1) * 64, test.out.begin()));
    }
  }
}

KT_TEST(coverage) { kt_test::print_coverage(); }
