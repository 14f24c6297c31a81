// Packing and decoding: what each format promises about its rounding, its padding and its size.
#include <memory>
#include <utility>

#include "check.h"
#include "guarded.h"
#include "variants.h"

using kt::Format;
using kt_test::Guarded;
using kt_test::Random;

namespace {

constexpr int kDepths[] = {1, 3, 31, 32, 63, 64, 65, 200, 255, 256, 257, 300, 576, 768, 1100};

// Formats that are made from bf16 weights; grouped_test.cc has the others.
constexpr int kQuantised = static_cast<int>(Format::fp8);

using Panel = Guarded<uint8_t>;

std::unique_ptr<Panel> pack(const kt::IsaTable& table, Format format, const Guarded<uint16_t>& source, int rows, int k,
                            bool search = false) {
  kt_test::now_running("pack%s %s %s rows=%d k=%d", search ? "_searched" : "", table.name, kt::format_name(format),
                       rows, k);
  auto panel = std::make_unique<Panel>(kt::panel_bytes(format, k));
  const kt::FormatKernels& kernels = table.formats[static_cast<int>(format)];
  (search ? kernels.pack_searched : kernels.pack)(source.data(), k, rows, k, panel->data());
  KT_CHECK(panel->front_intact());
  return panel;
}

const kt::IsaTable& any_table() { return *kt_test::variants().run.front().table; }

// Weights of one row; out of 16 rows this one is row 9.
std::vector<float> round_trip(Format format, const std::vector<float>& row, bool search = false) {
  const int k = static_cast<int>(row.size());
  Guarded<uint16_t> source(16 * row.size());
  for (uint16_t& x : source) x = kt::f32_to_bf16(1.0f);
  for (int i = 0; i < k; ++i) source[9 * row.size() + i] = kt::f32_to_bf16(row[i]);
  const auto panel = pack(any_table(), format, source, 16, k, search);
  std::vector<float> decoded(16 * row.size());
  kt::decode_panel(format, panel->data(), k, k, decoded.data());
  return {decoded.begin() + 9 * k, decoded.begin() + 10 * k};
}

std::vector<float> gaussian_row(int k, Random& random) {
  std::vector<float> row(k);
  for (float& w : row) w = kt::bf16_to_f32(random.gaussian_bf16());
  return row;
}

float largest(const std::vector<float>& row) {
  float m = 0;
  for (float w : row) m = std::max(m, std::fabs(w));
  return m;
}

double squared_error(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
  return sum;
}

}  // namespace

KT_TEST(names_round_trip) {
  for (int f = 0; f < kt::kFormatCount; ++f) {
    const auto format = static_cast<Format>(f);
    KT_CHECK(kt::format_by_name(kt::format_name(format)) == format);
  }
  KT_CHECK(!kt::format_by_name("int5"));
  KT_CHECK(!kt::format_by_name(""));
}

// Bits per weight, and the headers: 16 row scales; for int4g 16 words of group steps per 512 k.
KT_TEST(panel_sizes) {
  for (int k : kDepths) {
    const size_t padded = (k + 63) / 64 * 64;
    KT_CHECK_EQ(kt::panel_bytes(Format::bf16, k), 16 * padded * 2);
    KT_CHECK_EQ(kt::panel_bytes(Format::int8, k), 64 + 16 * padded);
    KT_CHECK_EQ(kt::panel_bytes(Format::int4, k), 64 + 16 * padded / 2);
    KT_CHECK_EQ(kt::panel_bytes(Format::int4g, k), 64 + (padded + 511) / 512 * 64 + 16 * padded / 2);
    for (int f = 0; f < kQuantised; ++f) KT_CHECK_EQ(kt::panel_bytes(static_cast<Format>(f), k) % 64, size_t{0});
  }
}

// A file packed on one machine is right on every other.
KT_TEST(every_variant_packs_the_same_bytes_and_padding_decodes_to_zero) {
  Random random(1);
  const auto check = [](Format format, bool search, const Guarded<uint16_t>& source, int rows, int k) {
    const auto first = pack(any_table(), format, source, rows, k, search);
    for (const auto& v : kt_test::variants().run) {
      const auto other = pack(*v.table, format, source, rows, k, search);
      if (std::memcmp(first->data(), other->data(), first->bytes()) != 0) {
        kt_test::fail(__FILE__, __LINE__, std::string(kt_test::running) + ": other bytes than " + any_table().name);
      }
    }
    const int depth = kt::padded_depth(k);
    std::vector<float> decoded(static_cast<size_t>(16) * depth);
    kt::decode_panel(format, first->data(), k, depth, decoded.data());
    bool zero = true;
    for (int n = 0; n < 16; ++n) {
      for (int i = n < rows ? k : 0; i < depth; ++i) zero &= decoded[static_cast<size_t>(n) * depth + i] == 0.0f;
    }
    KT_CHECK(zero);
  };
  for (int k : kDepths) {
    for (int rows : {1, 5, 15, 16}) {
      Guarded<uint16_t> source(static_cast<size_t>(rows) * k);
      kt_test::fill_gaussian_bf16(source, random);
      for (int f = 0; f < kQuantised; ++f) {
        check(static_cast<Format>(f), false, source, rows, k);
        if (f != static_cast<int>(Format::bf16)) check(static_cast<Format>(f), true, source, rows, k);
      }
    }
  }
}

// What a search makes least: errors times the size of the weight, or its root.
static double search_error(Format format, const std::vector<float>& row, bool search) {
  const std::vector<float> found = round_trip(format, row, search);
  double sum = 0;
  for (size_t i = 0; i < row.size(); ++i) {
    const double e = static_cast<double>(row[i]) - found[i];
    sum += e * e * std::pow(std::fabs(row[i]), format == Format::int4g ? 0.5 : 1.0);
  }
  return sum;
}

// Never worse than the scales of the largest weights, but for the rounding of sums and, of int4, of codes, which are
// rounded twice with those; and much better where one scale serves a whole row with few levels.
KT_TEST(searched_scales_have_less_error) {
  Random random(11);
  for (const auto& [format, most] : {std::pair{Format::int8, 1.0}, {Format::int4, 0.8}, {Format::int4g, 1.0}}) {
    for (int k : {64, 1000, 2048}) {
      std::vector<float> row = gaussian_row(k, random);
      const auto ratio = [&] { return search_error(format, row, true) / search_error(format, row, false); };
      KT_CHECK(ratio() <= (k == 2048 ? most : 1.01) + 1e-2);
      row[k / 2] = 3 * largest(row);
      KT_CHECK(ratio() <= (k == 2048 ? most : 1.01) + 1e-2);
    }
  }
}

// Rows of nothing, of one weight, of numbers whose squares vanish or overflow: as without a search, or better.
KT_TEST(a_search_survives_extreme_rows) {
  for (int f = static_cast<int>(Format::int8); f < kQuantised; ++f) {
    const auto format = static_cast<Format>(f);
    for (float size : {0.0f, 1e-40f, 1e-30f, 1e-20f, 1.0f, 1e20f, 3e38f}) {
      for (int count : {1, 40}) {
        std::vector<float> row(96, 0.0f);
        for (int i = 0; i < count; ++i) row[2 * i] = kt::bf16_to_f32(kt::f32_to_bf16(i % 2 ? -size : size * 0.75f));
        const std::vector<float> found = round_trip(format, row, true);
        const float limit = format == Format::int8 ? 0.01f : 0.15f;
        for (size_t i = 0; i < row.size(); ++i) {
          KT_CHECK(std::fabs(found[i] - row[i]) <= limit * largest(row) + 1e-37f);
        }
      }
    }
  }
}

// Rows of a matrix that is part of a wider one.
KT_TEST(rows_may_lie_apart) {
  Random random(2);
  constexpr int kRows = 7, kDepth = 90, kPitch = 101;
  Guarded<uint16_t> wide(kPitch * (kRows - 1) + kDepth), dense(kRows * kDepth);
  kt_test::fill_gaussian_bf16(wide, random);
  for (int n = 0; n < kRows; ++n) std::memcpy(&dense[n * kDepth], &wide[n * kPitch], 2 * kDepth);
  for (int f = 0; f < kQuantised; ++f) {
    const auto format = static_cast<Format>(f);
    const auto expected = pack(any_table(), format, dense, kRows, kDepth);
    Panel panel(kt::panel_bytes(format, kDepth));
    any_table().formats[f].pack(wide.data(), kPitch, kRows, kDepth, panel.data());
    KT_CHECK(std::memcmp(panel.data(), expected->data(), panel.bytes()) == 0);
  }
}

KT_TEST(bf16_is_exact) {
  Random random(3);
  for (int k : kDepths) {
    const std::vector<float> row = gaussian_row(k, random);
    KT_CHECK(round_trip(Format::bf16, row) == row);
  }
}

KT_TEST(int8_rounds_to_nearest) {
  Random random(4);
  for (int k : kDepths) {
    const std::vector<float> row = gaussian_row(k, random);
    const std::vector<float> decoded = round_trip(Format::int8, row);
    const float half = largest(row) / 254.0f;
    for (int i = 0; i < k; ++i) KT_CHECK(std::fabs(row[i] - decoded[i]) <= half * 1.00001f);
  }
}

// x = nearest even of w * 112 / max, q = sign(x) * ((|x| + 8) >> 4), w' = 16 * max / 112 * q.
KT_TEST(int4_rounds_as_documented) {
  Random random(5);
  for (int k : kDepths) {
    const std::vector<float> row = gaussian_row(k, random);
    const std::vector<float> decoded = round_trip(Format::int4, row);
    const float d = largest(row) / 112.0f;
    for (int i = 0; i < k; ++i) {
      const int x = static_cast<int>(std::nearbyint(row[i] * (1.0f / d)));
      const int q = (std::abs(x) + 8) >> 4;
      KT_CHECK_EQ(decoded[i], d * static_cast<float>(16 * (x < 0 ? -q : q)));
    }
  }
}

KT_TEST(int4g_errs_less_than_int4) {
  Random random(6);
  double int4 = 0, int4g = 0, norm = 0;
  for (int trial = 0; trial < 40; ++trial) {
    const std::vector<float> row = gaussian_row(512, random);
    const double a = squared_error(row, round_trip(Format::int4, row));
    const double b = squared_error(row, round_trip(Format::int4g, row));
    KT_CHECK(b < a);
    int4 += a;
    int4g += b;
    norm += squared_error(row, std::vector<float>(row.size()));
  }
  std::printf("  relative error on Gaussian rows: int4 %.4f, int4g %.4f\n", std::sqrt(int4 / norm),
              std::sqrt(int4g / norm));
  KT_CHECK(int4g < 0.6 * int4);
}

// Groups of very different size keep their own precision, down to 1/16 of the row's largest.
KT_TEST(int4g_follows_the_groups) {
  constexpr int kDepth = 768;  // a block and a half
  std::vector<float> row(kDepth);
  for (int i = 0; i < kDepth; ++i) row[i] = (i % 2 ? 1.0f : -1.0f) * std::ldexp(1.0f, -(i / 64 % 4));
  const std::vector<float> decoded = round_trip(Format::int4g, row);
  for (int i = 0; i < kDepth; ++i) KT_CHECK(std::fabs(row[i] - decoded[i]) <= 0.08f * std::fabs(row[i]));
}

KT_TEST(a_single_value_survives) {
  for (int f = 0; f < kQuantised; ++f) {
    for (float value : {1.0f, -1.0f, 3e38f, -3e38f, 1e-30f}) {
      std::vector<float> row(70);
      row[67] = kt::bf16_to_f32(kt::f32_to_bf16(value));
      const std::vector<float> decoded = round_trip(static_cast<Format>(f), row);
      for (int i = 0; i < 70; ++i) {
        if (i != 67) KT_CHECK_EQ(decoded[i], 0.0f);
      }
      // int4g: 8 steps of max / 120 * 16 or 7 of the like.
      KT_CHECK(std::fabs(decoded[67] - row[67]) <=
               std::fabs(row[67]) * (f == static_cast<int>(Format::int4g) ? 0.07f : 1e-6f));
    }
  }
}

KT_TEST(zeros_and_denormals_decode_to_finite_values) {
  for (int f = 0; f < kQuantised; ++f) {
    for (uint16_t bits : {0x0000, 0x8000, 0x0001, 0x8001, 0x007f, 0x0080, 0x0100}) {
      const float w = kt::bf16_to_f32(bits);
      const std::vector<float> row(66, w);
      for (float decoded : round_trip(static_cast<Format>(f), row)) {
        KT_CHECK(std::fabs(decoded - w) <= std::fabs(w));
      }
    }
  }
}

// Weights that are no numbers are the caller's to find; packing must stay defined and keep to the row.
KT_TEST(nan_and_inf_stay_in_their_row) {
  Random random(7);
  for (uint16_t bits : {0x7fc0, 0xffc0, 0x7f80, 0xff80, 0xffff}) {
    for (int f = 0; f < kQuantised; ++f) {
      const auto format = static_cast<Format>(f);
      Guarded<uint16_t> source(16 * 100);
      kt_test::fill_gaussian_bf16(source, random);
      std::vector<float> clean(16 * 100), decoded(16 * 100);
      kt::decode_panel(format, pack(any_table(), format, source, 16, 100)->data(), 100, 100, clean.data());
      source[3 * 100 + 40] = bits;
      kt::decode_panel(format, pack(any_table(), format, source, 16, 100)->data(), 100, 100, decoded.data());
      for (int i = 0; i < 16 * 100; ++i) {
        if (i / 100 != 3) KT_CHECK_EQ(decoded[i], clean[i]);
      }
      KT_CHECK(!std::isfinite(decoded[3 * 100 + 40]));
    }
  }
}
