// Linears on every row of cmake/isa.cmake that runs here: against fp64, and what never changes a bit.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "dense/linear.h"
#include "guarded.h"
#include "variants.h"

using kt::Format;
using kt_test::Guarded;
using kt_test::Random;
using kt_test::Variant;

namespace {

constexpr Format kFormats[] = {Format::bf16, Format::int8, Format::int4, Format::int4g};

struct Machine {
  std::unique_ptr<kt::Pool> pool;
  std::shared_ptr<kt::Workspace> workspace;

  explicit Machine(const std::vector<int>& threads) {
    kt::PoolConfig config;
    config.spin_us = 0;
    for (const int n : threads) config.nodes.push_back({-1, n, {}});
    KT_CHECK(kt::Pool::create(config, &pool).is_ok());
    workspace = std::make_shared<kt::Workspace>(pool.get());
  }
};

struct Case {
  std::unique_ptr<kt::Linear> linear;
  int rows, columns;
  std::vector<float> decoded, bias;

  Case(const Machine& machine, const Variant& v, Format format, int n, int k, bool with_bias, uint64_t seed)
      : rows(n), columns(k), decoded(static_cast<size_t>(n) * k) {
    Random random(seed);
    Guarded<uint16_t> weights(decoded.size());
    kt_test::fill_gaussian_bf16(weights, random);
    weights.seal();
    KT_CHECK(kt::Linear::create(machine.workspace, v.table, {format, n, k, with_bias}, &linear).is_ok());
    kt_test::now_running("%s load %s %d x %d", v.name, kt::format_name(format), n, k);
    KT_CHECK(linear->load(weights.data()).is_ok());
    if (with_bias) {
      for (int i = 0; i < n; ++i) bias.push_back(random.gaussian());
      KT_CHECK(linear->load_bias(bias.data()).is_ok());
    }
    linear->decode(decoded.data());
  }

  double exact(const uint16_t* x, int row) const {
    double sum = bias.empty() ? 0 : bias[row];
    for (int k = 0; k < columns; ++k)
      sum += static_cast<double>(kt::bf16_to_f32(x[k])) * decoded[static_cast<size_t>(row) * columns + k];
    return sum;
  }
  double size(const uint16_t* x, int row) const {
    double a = 0, w = 0;
    for (int k = 0; k < columns; ++k) {
      a += std::pow(kt::bf16_to_f32(x[k]), 2);
      w += std::pow(decoded[static_cast<size_t>(row) * columns + k], 2);
    }
    return std::sqrt(a * w);
  }
};

kt::LinearArgs to_f32(int count, const Guarded<uint16_t>& x, size_t pitch, Guarded<float>& out, size_t out_pitch) {
  kt::LinearArgs args;
  args.count = count;
  args.input = x.data();
  args.input_pitch = pitch;
  args.f32 = out.data();
  args.output_pitch = out_pitch;
  return args;
}

// Half a step of the largest of 256 activations, 1/127 or 1/32767 of it, against |x| |w|.
double limit(const kt::Linear& linear) {
  return linear.act() == kt::ActKind::bf16 ? 2e-6 : linear.act() == kt::ActKind::s16 ? 1e-4 : 2e-2;
}

struct Size {
  int rows, columns;
};

}  // namespace

KT_TEST(products_agree_with_fp64) {
  const Machine machine({2});
  const Size sizes[] = {{1, 1}, {16, 64}, {17, 65}, {40, 300}, {100, 257}, {33, 1100}};
  int seed = 0;
  for (const Variant& v : kt_test::variants().run) {
    for (const Format format : kFormats) {
      for (const Size& size : sizes) {
        const int count = std::vector<int>{1, 2, 5, 9, 33, 70}[++seed % 6];
        const Case test(machine, v, format, size.rows, size.columns, seed % 2, seed);
        Random random(seed + 1000);
        const size_t pitch = size.columns + 3, out_pitch = size.rows + 5;
        Guarded<uint16_t> x((count - 1) * pitch + size.columns);
        kt_test::fill_gaussian_bf16(x, random);
        x.seal();
        Guarded<float> out((count - 1) * out_pitch + size.rows);
        kt_test::now_running("%s %s %d x %d, %d rows", v.name, kt::format_name(format), size.rows, size.columns, count);
        KT_CHECK(test.linear->forward(to_f32(count, x, pitch, out, out_pitch)).is_ok());
        KT_CHECK(out.front_intact());
        double worst = 0;
        for (int t = 0; t < count; ++t) {
          for (int n = 0; n < size.rows; ++n) {
            const uint16_t* row = x.data() + t * pitch;
            worst = std::max(worst, std::fabs(out[t * out_pitch + n] - test.exact(row, n)) / test.size(row, n));
          }
        }
        if (worst > limit(*test.linear)) std::printf("  %s: %g\n", kt_test::running, worst);
        KT_CHECK(worst <= limit(*test.linear));
      }
    }
  }
  kt_test::print_coverage();
}

// Concurrent requests must get the tokens that they would get alone.
KT_TEST(a_row_gets_the_same_bits_whatever_else_is_in_the_call) {
  const Machine machine({2});
  constexpr int kRows = 50, kColumns = 1100;
  for (const Variant& v : kt_test::variants().run) {
    for (const Format format : kFormats) {
      const Case test(machine, v, format, kRows, kColumns, false, 3);
      Random random(4);
      Guarded<uint16_t> x(static_cast<size_t>(kt::kSteadyRows) * kColumns);
      kt_test::fill_gaussian_bf16(x, random);
      std::vector<float> alone(static_cast<size_t>(kt::kSteadyRows) * kRows);
      kt::LinearArgs args;
      args.count = 1;
      args.input_pitch = kColumns;
      args.output_pitch = kRows;
      for (int t = 0; t < kt::kSteadyRows; ++t) {
        args.input = x.data() + static_cast<size_t>(t) * kColumns;
        args.f32 = alone.data() + static_cast<size_t>(t) * kRows;
        KT_CHECK(test.linear->forward(args).is_ok());
      }
      for (int count = 2; count <= kt::kSteadyRows; ++count) {
        Guarded<float> out(static_cast<size_t>(count) * kRows);
        KT_CHECK(test.linear->forward(to_f32(count, x, kColumns, out, kRows)).is_ok());
        const bool same = std::equal(out.begin(), out.end(), alone.begin());
        if (!same) std::printf("  %s %s: %d rows\n", v.name, kt::format_name(format), count);
        KT_CHECK(same);
      }
    }
  }
}

KT_TEST(threads_and_nodes_change_no_bit) {
  const Variant& v = kt_test::variants().run.front();
  constexpr int kRows = 200, kColumns = 333, kCount = 7;
  Random random(5);
  Guarded<uint16_t> x(kCount * kColumns);
  kt_test::fill_gaussian_bf16(x, random);
  for (const Format format : kFormats) {
    std::vector<float> first;
    for (const std::vector<int>& threads : {std::vector<int>{1}, {3}, {1, 2}, {1, 1, 1}}) {
      const Machine machine(threads);
      const Case test(machine, v, format, kRows, kColumns, true, 6);
      Guarded<float> out(kCount * kRows);
      KT_CHECK(test.linear->forward(to_f32(kCount, x, kColumns, out, kRows)).is_ok());
      if (first.empty()) first.assign(out.begin(), out.end());
      KT_CHECK(std::equal(out.begin(), out.end(), first.begin()));
    }
  }
}

KT_TEST(scale_and_addend_come_before_the_one_rounding) {
  const Machine machine({2});
  constexpr int kRows = 21, kColumns = 40, kCount = 3;
  for (const Variant& v : kt_test::variants().run) {
    const Case test(machine, v, Format::bf16, kRows, kColumns, true, 7);
    Random random(8);
    Guarded<uint16_t> x(kCount * kColumns), addend(kCount * kRows), out(kCount * kRows);
    kt_test::fill_gaussian_bf16(x, random);
    kt_test::fill_gaussian_bf16(addend, random);
    Guarded<float> product(kCount * kRows);
    KT_CHECK(test.linear->forward(to_f32(kCount, x, kColumns, product, kRows)).is_ok());
    const float scales[kCount] = {0.25f, -1.5f, 3.0f};
    kt::LinearArgs args = to_f32(kCount, x, kColumns, product, kRows);
    args.f32 = nullptr;
    args.bf16 = out.data();
    args.addend = addend.data();
    args.addend_pitch = kRows;
    args.row_scales = scales;
    KT_CHECK(test.linear->forward(args).is_ok());
    for (int i = 0; i < kCount * kRows; ++i) {
      const float want = scales[i / kRows] * product[i] + kt::bf16_to_f32(addend[i]);
      KT_CHECK_EQ(out[i], kt::f32_to_bf16(want));
    }
    // In place.
    args.bf16 = addend.data();
    KT_CHECK(test.linear->forward(args).is_ok());
    KT_CHECK(std::equal(out.begin(), out.end(), addend.begin()));
  }
}

// One matrix of 5 heads, each with an input of its own; outputs stand apart. Tasks and nodes cut through heads.
KT_TEST(groups_of_rows_read_inputs_of_their_own) {
  constexpr int kGroups = 5, kRows = 48, kColumns = 72, kIn = 80, kOut = 50;
  for (const Variant& v : kt_test::variants().run) {
    for (const std::vector<int>& threads : {std::vector<int>{1}, {3}, {2, 1}}) {
      const Machine machine(threads);
      const Case test(machine, v, Format::bf16, kGroups * kRows, kColumns, false, 7);
      for (const int count : {1, 3, 40}) {
        Random random(count);
        Guarded<uint16_t> x((count * kGroups - 1) * kIn + kColumns);
        kt_test::fill_gaussian_bf16(x, random);
        x.seal();
        Guarded<float> out((count * kGroups - 1) * kOut + kRows);
        kt::LinearArgs args = to_f32(count, x, kGroups * kIn, out, kGroups * kOut);
        args.groups = kGroups;
        args.input_step = kIn;
        args.output_step = kOut;
        kt_test::now_running("%s groups, %d rows", v.name, count);
        KT_CHECK(test.linear->forward(args).is_ok());
        for (int t = 0; t < count * kGroups; ++t) {
          for (int i = 0; i < kRows; ++i) {
            const int row = t % kGroups * kRows + i;
            const uint16_t* from = x.data() + t * kIn;
            KT_CHECK(std::fabs(out[t * kOut + i] - test.exact(from, row)) <= 1e-5 * test.size(from, row));
          }
        }
      }
    }
  }
}

KT_TEST(more_rows_than_a_pass_takes) {
  const Machine machine({2});
  constexpr int kRows = 20, kColumns = 70, kCount = kt::Linear::kChunkRows + 40;
  const Variant& v = kt_test::variants().run.front();
  for (const Format format : {Format::bf16, Format::int8}) {
    const Case test(machine, v, format, kRows, kColumns, false, 9);
    Random random(10);
    Guarded<uint16_t> x(static_cast<size_t>(kCount) * kColumns);
    kt_test::fill_gaussian_bf16(x, random);
    Guarded<float> out(static_cast<size_t>(kCount) * kRows);
    KT_CHECK(test.linear->forward(to_f32(kCount, x, kColumns, out, kRows)).is_ok());
    for (int t : {0, 31, 32, 1023, 1024, 1055, kCount - 1}) {
      const uint16_t* row = x.data() + static_cast<size_t>(t) * kColumns;
      for (int n = 0; n < kRows; ++n) {
        const double error = std::fabs(out[static_cast<size_t>(t) * kRows + n] - test.exact(row, n));
        KT_CHECK(error <= limit(*test.linear) * test.size(row, n));
      }
    }
  }
}

KT_TEST(a_row_that_is_not_finite_stays_alone) {
  const Machine machine({2});
  for (const Variant& v : kt_test::variants().run) {
    for (const Format format : kFormats) {
      const Case test(machine, v, format, 20, 100, false, 11);
      Random random(12);
      Guarded<uint16_t> x(5 * 100);
      kt_test::fill_gaussian_bf16(x, random);
      Guarded<float> clean(5 * 20), out(5 * 20);
      KT_CHECK(test.linear->forward(to_f32(5, x, 100, clean, 20)).is_ok());
      x[2 * 100 + 7] = 0x7fc0;
      KT_CHECK(test.linear->forward(to_f32(5, x, 100, out, 20)).is_ok());
      for (int i = 0; i < 5 * 20; ++i) KT_CHECK(i / 20 == 2 ? std::isnan(out[i]) : out[i] == clean[i]);
    }
  }
}

KT_TEST(errors_say_what_is_wrong) {
  const Machine machine({1});
  const kt::IsaTable* isa = kt_test::variants().run.front().table;
  std::unique_ptr<kt::Linear> linear;
  const auto fails = [](const kt::Status& status, const char* with) {
    const bool found = !status.is_ok() && status.message().find(with) != std::string::npos;
    if (!found) std::printf("  '%s' lacks '%s'\n", status.message().c_str(), with);
    return found;
  };
  KT_CHECK(fails(kt::Linear::create(machine.workspace, isa, {Format::bf16, 0, 8, false}, &linear), "rows is 0"));
  KT_CHECK(fails(kt::Linear::create(machine.workspace, isa, {Format::bf16, 8, -1, false}, &linear), "columns is -1"));
  KT_CHECK(fails(kt::Linear::create(machine.workspace, isa, {Format::fp8, 8, 8, false}, &linear), "fp8"));
  KT_CHECK(kt::Linear::create(machine.workspace, isa, {Format::bf16, 8, 8, true}, &linear).is_ok());
  std::vector<uint16_t> x(64);
  std::vector<float> out(8);
  kt::LinearArgs args;
  args.count = 1;
  args.input = x.data();
  args.input_pitch = args.output_pitch = 8;
  args.f32 = out.data();
  KT_CHECK(fails(linear->forward(args), "no weights"));
  KT_CHECK(linear->load(x.data()).is_ok());
  KT_CHECK(fails(linear->forward(args), "bias"));
  KT_CHECK(linear->load_bias(out.data()).is_ok());
  KT_CHECK(linear->forward(args).is_ok());
  args.output_pitch = 7;
  KT_CHECK(fails(linear->forward(args), "output"));
  args.output_pitch = 8;
  args.f32 = nullptr;
  KT_CHECK(fails(linear->forward(args), "address"));
  args.count = -1;
  KT_CHECK(fails(linear->forward(args), "-1 rows"));
  args.count = 0;
  KT_CHECK(linear->forward(args).is_ok());
}
