// Every gemm of every row of cmake/isa.cmake that runs here against fp64, over shapes that meet every tail.
//
// Two comparisons separate rounding of the activations from mistakes of the kernel: with the original activations, as
// relative L2 error under a limit per format and kind; with the activations as quantised, per element and tight.
#include <array>
#include <map>
#include <tuple>

#include "check.h"
#include "gemm_case.h"

using kt::ActKind;
using kt::Format;
using kt_test::GemmCase;
using kt_test::Random;
using kt_test::Rows;
using kt_test::Shape;
using kt_test::Variant;

namespace {

constexpr Rows kBoth[] = {Rows::list, Rows::consecutive};

// Largest relative L2 error against exact activations, and largest error of the kernel alone, per element, relative to
// |a| |w|: one term left out of 2048 is 5e-4.
struct Limit {
  double input, kernel;
};
constexpr double kFloatSums = 2e-6;  // f32 sums over k <= 2048

// Formats that hold the codes of files take bf16 activations; what a kernel does to them and to the weights is its own
// error.
Limit grouped_limit(const Variant& v, Format format, const Shape& shape) {
  const kt::GroupedKind& kind = *kt::grouped_kind(format);
  const bool is_type = kt::gguf_block(format).weights > 1 && !kt::is_checkpoint(format);
  const std::string name = v.name;
  // Weights rounded to bf16 once, by half of 2^-7 at most and 1.6e-3 on average, or exact in f32.
  const bool rounded = name.find("bf16") != std::string::npos || kt_test::has_tiles(v);
  if (shape.m <= (is_type ? 4 : kt_test::has_tiles(v) ? 8 : rounded ? 12 : 16)) {
    // 4 bits: half a step of 1/8191 of the largest of 256.
    const bool exact = kind.codes == kt::Codes::e4m3 || kind.codes == kt::Codes::f16 || kind.codes == kt::Codes::f32;
    return exact ? Limit{kFloatSums, kFloatSums} : Limit{3e-4, 1e-4};
  }
  // Types of GGUF make activations 8 bits there, or 16: half a step of the largest of 256. More rows are for tiles.
  if (is_type && !(kt_test::has_tiles(v) && shape.m > 24)) return {1.2e-2, 6.5e-3};
  // With zero points or mins weights may all have one sign, and products cancel; with scales of e4m3 a few weights make
  // up the sum.
  const bool cancels = shape.k < 64 || kind.mins != kt::Mins::none || kind.scales == kt::Scales::e4m3;
  const double sums = kind.mins == kt::Mins::none ? kFloatSums : 1e-5;
  // Equal codes with one scale are rounded alike, so that their errors do not average out: 2.6e-3 with 8 groups.
  return rounded ? Limit{cancels ? 3.91e-3 : 3e-3, 3.91e-3} : Limit{sums, sums};
}

Limit limit_of(const Variant& v, Format format, ActKind act, const Shape& shape) {
  if (kt::grouped_kind(format)) return grouped_limit(v, format, shape);
  if (format == Format::bf16) return {kFloatSums, kFloatSums};
  // Half a step of 1/32767 or of 1/127 of the group's largest.
  return {act == ActKind::s16 ? 1e-4 : 1.2e-2, kFloatSums};
}

struct Worst {
  double input = 0, kernel = 0;
};
std::map<std::pair<std::string, int>, Worst> worst;

std::vector<Shape> shapes() {
  constexpr int kM[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 64, 65};
  constexpr int kPanels[] = {1, 2, 3, 5};
  constexpr int kK[] = {1, 7, 31, 32, 64, 65, 200, 256, 257, 512, 768, 1100, 2048};
  std::vector<Shape> list;
  int i = 0;
  for (int k : kK) {
    for (int m : kM) list.push_back({m, kPanels[i++ % 4], k});
    ++i;  // 18 m and 4 panel counts: shift, so that each m meets each count
  }
  return list;
}

Worst measure(const GemmCase& test, Rows how, const std::vector<float>& c, const kt_test::Reference& input,
              const kt_test::Reference& kernel) {
  double squared_error = 0, squared = 0;
  Worst w;
  for (int i = 0; i < test.shape.m; ++i) {
    const int r = test.row(how, i);
    for (int j = 0; j < test.n; ++j) {
      const double got = c[static_cast<size_t>(i) * test.n + j];
      const size_t at = static_cast<size_t>(r) * test.n + j;
      squared_error += (got - input.c[at]) * (got - input.c[at]);
      squared += input.c[at] * input.c[at];
      const double scale = kernel.row_norms[r] * kernel.cols_norms[j];
      const double error = scale > 0 ? std::fabs(got - kernel.c[at]) / scale : std::fabs(got);
      if (!(error <= w.kernel)) w.kernel = error;
    }
  }
  w.input = squared > 0 ? std::sqrt(squared_error / squared) : std::sqrt(squared_error);
  return w;
}

void judge(const Variant& v, Format format, ActKind act, const Shape& shape, const Worst& w) {
  const Limit limit = limit_of(v, format, act, shape);
  if (!(w.input <= limit.input) || !(w.kernel <= limit.kernel)) {
    char text[400];
    std::snprintf(text, sizeof(text), "%s: inexact; error %.2e (limit %.2e), of the kernel alone %.2e (limit %.2e)",
                  kt_test::running, w.input, limit.input, w.kernel, limit.kernel);
    kt_test::fail(__FILE__, __LINE__, text);
  }
  Worst& all = worst[{v.name, static_cast<int>(format)}];
  all.input = std::max(all.input, w.input);
  all.kernel = std::max(all.kernel, w.kernel);
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), 4 * a.size()) == 0;
}

void check_same_bits(const std::vector<float>& a, const std::vector<float>& b, const std::string& other) {
  if (!same_bits(a, b)) kt_test::fail(__FILE__, __LINE__, std::string(kt_test::running) + ": other bits than " + other);
}

// Tile kernels take the offset of the weights in another step than vector kernels, so bits agree among either kind
// only.
bool runs_on_tiles(const Variant& v, int m) { return kt_test::has_tiles(v) && m > 8; }

void check_shape(GemmCase& test, Format format, int turn) {
  test.set_format(format);
  const std::vector<double> w = test.decoded_weights();
  const kt_test::Reference input = kt_test::reference(test.exact_acts(), w, test.shape.k);
  std::map<ActKind, kt_test::Reference> kernel;
  std::map<std::tuple<ActKind, Rows, bool>, std::pair<std::vector<float>, std::string>> first;
  for (const Variant& v : kt_test::variants().run) {
    // 7 divides none of the counts in shapes(): all m, panels and k come up.
    if (turn % 7 != 0 && kt_test::has_native_twin(v)) continue;
    const ActKind act = v.table->formats[static_cast<int>(format)].act;
    if (!kernel.count(act)) kernel[act] = kt_test::reference(test.dequantised_acts(act), w, test.shape.k);
    for (Rows how : kBoth) {
      const std::vector<float> c = test.run(v, how, test.shape.m);
      judge(v, format, act, test.shape, measure(test, how, c, input, kernel[act]));
      if (act == ActKind::bf16) continue;  // the order of float sums may differ
      const auto [it, added] = first.try_emplace({act, how, runs_on_tiles(v, test.shape.m)}, c, v.name);
      if (!added) check_same_bits(c, it->second.first, it->second.second);
    }
  }
}

template <class Body>
void for_each_kernel(Body body) {
  for (int f = 0; f < kt::kFormatCount; ++f) {
    for (const Variant& v : kt_test::variants().run) body(v, static_cast<Format>(f));
  }
}

}  // namespace

KT_TEST(every_kernel_agrees_with_fp64_and_integer_kernels_with_each_other) {
  Random random(1);
  int turn = 0;
  for (const Shape& shape : shapes()) {
    GemmCase test(shape, random);
    for (int f = 0; f < kt::kFormatCount; ++f) {
      const auto format = static_cast<Format>(f);
      // Most types of GGUF share one kernel: each takes a fifth of the shapes.
      const bool shared = kt::grouped_kind(format) && !kt::is_checkpoint(format);
      if (kt_test::legal_depth(format, shape.k) == shape.k && (!shared || (turn + f) % 5 == 0))
        check_shape(test, format, turn + f);
    }
    ++turn;
  }
}

// The largest call a table asks for; scratch must suffice.
KT_TEST(largest_calls) {
  Random random(2);
  for_each_kernel([&](const Variant& v, Format format) {
    for (Shape shape : {Shape{v.table->max_rows, 3, 100}, Shape{17, v.table->max_panels, 1100}}) {
      shape.k = kt_test::legal_depth(format, shape.k);
      GemmCase test(shape, random);
      test.set_format(format);
      const ActKind act = v.table->formats[static_cast<int>(format)].act;
      const std::vector<double> w = test.decoded_weights();
      const kt_test::Reference input = kt_test::reference(test.exact_acts(), w, shape.k);
      const kt_test::Reference kernel = kt_test::reference(test.dequantised_acts(act), w, shape.k);
      for (Rows how : kBoth) judge(v, format, act, shape, measure(test, how, test.run(v, how, shape.m), input, kernel));
    }
  });
}

// Integer sums are exact, so a row does not feel which rows share its tile.
KT_TEST(integer_rows_do_not_depend_on_their_neighbours) {
  Random random(3);
  for (const Shape& shape : {Shape{33, 3, 1100}, Shape{65, 2, 320}}) {
    GemmCase test(shape, random);
    for_each_kernel([&](const Variant& v, Format format) {
      if (v.table->formats[static_cast<int>(format)].act == ActKind::bf16) return;
      test.set_format(format);
      const std::vector<float> all = test.run(v, Rows::list, shape.m);
      const bool tiles = runs_on_tiles(v, shape.m);
      for (int m : {tiles ? 9 : 1, tiles ? 16 : 2, tiles ? 17 : 5, tiles ? 32 : 8}) {
        const int i = random.below(shape.m - m + 1);
        const std::vector<float> part = test.run(v, Rows::list, m, i);
        const auto from = all.begin() + static_cast<std::ptrdiff_t>(i) * test.n;
        check_same_bits(part, {from, from + static_cast<std::ptrdiff_t>(m) * test.n}, "in the product of all rows");
      }
    });
  }
}

// A kernel finds the same in rows that were gathered for all products as in those that it gathers itself. One row, a
// few and many take turns: kernels of all instruction sets come from the same templates.
KT_TEST(gathered_rows_change_nothing) {
  Random random(6);
  int turn = 0;
  for_each_kernel([&](const Variant& v, Format format) {
    const Shape shape = std::array{Shape{1, 5, 520}, Shape{3, 2, 300}, Shape{9, 3, 600}}[turn++ % 3];
    if (!v.table->formats[static_cast<int>(format)].gather_of(shape.m).gather) return;
    GemmCase test({shape.m, shape.n_panels, kt_test::legal_depth(format, shape.k)}, random);
    test.set_format(format);
    const std::vector<float> own = test.run(v, Rows::list, shape.m);
    check_same_bits(test.run(v, Rows::list, shape.m, 0, true), own, "from rows gathered in the call");
  });
}

KT_TEST(nan_and_inf_stay_in_their_row) {
  Random random(4);
  constexpr uint16_t kPoison[] = {0x7fc0, 0x7f80, 0xff80, 0xffff};
  int turn = 0;
  for (const Shape& shape : {Shape{2, 1, 65}, Shape{5, 2, 257}, Shape{17, 3, 90}, Shape{40, 2, 600}}) {
    for_each_kernel([&](const Variant& v, Format format) {
      GemmCase test({shape.m, shape.n_panels, kt_test::legal_depth(format, shape.k)}, random);
      test.set_format(format);
      const int bad = GemmCase::kFirstRow + random.below(shape.m);
      for (Rows how : kBoth) {
        const std::vector<float> clean = test.run(v, how, shape.m);
        const size_t at = static_cast<size_t>(bad) * test.shape.k + random.below(shape.k);
        const uint16_t before = std::exchange(test.x[at], kPoison[turn++ % 4]);
        test.x_changed();
        const std::vector<float> c = test.run(v, how, shape.m);
        test.x[at] = before;
        test.x_changed();
        for (int i = 0; i < shape.m; ++i) {
          const float* row = &c[static_cast<size_t>(i) * test.n];
          if (test.row(how, i) != bad) {
            KT_CHECK(std::memcmp(row, &clean[static_cast<size_t>(i) * test.n], 4 * test.n) == 0);
          } else {
            KT_CHECK(std::none_of(row, row + test.n, [](float f) { return std::isfinite(f); }));
          }
        }
      }
    });
  }
}

KT_TEST(zeros_give_zeros) {
  Random random(5);
  for (const Shape& shape : {Shape{3, 2, 100}, Shape{33, 3, 300}, Shape{3, 2, 256}, Shape{33, 2, 512}}) {
    GemmCase test(shape, random);
    const int zero_row = GemmCase::kFirstRow + 1, zero_column = kt::kPanelRows + 5;
    std::fill_n(test.x.begin() + static_cast<std::ptrdiff_t>(zero_row) * shape.k, shape.k, uint16_t{0});
    std::fill_n(test.weights.begin() + static_cast<std::ptrdiff_t>(zero_column) * shape.k, shape.k, uint16_t{0});
    for_each_kernel([&](const Variant& v, Format format) {
      // Blocks of codebooks do not follow from weights.
      if (kt::is_raw(format) || kt_test::legal_depth(format, shape.k) != shape.k) return;
      test.set_format(format);
      for (Rows how : kBoth) {
        const std::vector<float> c = test.run(v, how, shape.m);
        for (int i = 0; i < shape.m; ++i) {
          const float* row = &c[static_cast<size_t>(i) * test.n];
          KT_CHECK(row[zero_column] == 0.0f);
          if (test.row(how, i) == zero_row) KT_CHECK(std::all_of(row, row + test.n, [](float f) { return f == 0.0f; }));
        }
      }
    });
  }
}

KT_TEST(summary) {
  kt_test::print_coverage();
  std::printf("  largest error: relative L2 against exact activations | of the kernel alone, per element\n  %-18s", "");
  for (int f = 0; f < kt::kFormatCount; ++f) std::printf(" %-17s", kt::format_name(static_cast<Format>(f)));
  for (const Variant& v : kt_test::variants().run) {
    std::printf("\n  %-18s", v.name);
    for (int f = 0; f < kt::kFormatCount; ++f) {
      const Worst& w = worst[{v.name, f}];
      std::printf(" %.1e | %.1e", w.input, w.kernel);
    }
  }
  std::printf("\n");
}
