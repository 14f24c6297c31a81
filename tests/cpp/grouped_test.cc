// Formats that hold the codes of files: every code decodes to what its standard says in every kernel, and panels give
// back what they got.
#include <memory>

#include "check.h"
#include "formats/unpack.h"
#include "grouped_case.h"
#include "guarded.h"
#include "variants.h"

using kt::Codes;
using kt::Format;
using kt::GroupedKind;
using kt_test::Guarded;
using kt_test::Random;

namespace {

template <class Body>
void for_each_format(Body body) {
  for (int f = 0; f < kt::kFormatCount; ++f) {
    const auto format = static_cast<Format>(f);
    if (const GroupedKind* kind = kt::grouped_kind(format); kind && !kt::is_raw(format)) {
      for (int group : kt_test::legal_groups(format)) body(format, *kind, group);
    }
  }
}

// OCP 8-bit floating point, e4m3: bias 7, no infinities, s.1111.111 is NaN.
double e4m3(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double magnitude =
      exponent == 0 ? mantissa / 8.0 * std::pow(2, -6) : (1 + mantissa / 8.0) * std::pow(2, exponent - 7);
  return code & 0x80 ? -magnitude : magnitude;
}

// IEEE 754 half, of ordinary size.
double half(int bits) {
  const double magnitude = (1 + (bits & 1023) / 1024.0) * std::pow(2, (bits >> 10 & 31) - 15);
  return bits & 0x8000 ? -magnitude : magnitude;
}

// With scales of 1, and without zeros or mins.
double value_of(const GroupedKind& kind, const uint8_t* at) {
  static constexpr double kE2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};
  static constexpr double kIq4[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  float f32;
  switch (kind.codes) {
    case Codes::e4m3:
      return e4m3(*at);
    case Codes::e2m1:
      return kE2m1[*at];
    case Codes::iq4:
      return kIq4[*at];
    case Codes::f16:
      return half(at[0] | at[1] << 8);
    case Codes::f32:
      std::memcpy(&f32, at, 4);
      return f32;
    default:
      return *at - kind.offset;
  }
}

bool is_nan_code(Codes codes, int code) { return codes == Codes::e4m3 && (code & 0x7f) == 0x7f; }

void one_scale(kt::Scales scales, uint8_t* at) {
  const float one = 1.0f;
  if (scales == kt::Scales::f32) std::memcpy(at, &one, 4);
  const uint16_t half = scales == kt::Scales::bf16 ? 0x3f80 : 0x3c00;
  if (scales == kt::Scales::bf16 || scales == kt::Scales::f16) std::memcpy(at, &half, 2);
  if (scales == kt::Scales::e8m0) *at = 127;
  if (scales == kt::Scales::e4m3) *at = 0x38;
  if (kt::has_super(scales)) *at = 1;
}

// The product of one panel with m rows of bf16.
std::vector<float> product(const kt::IsaTable& table, Format format, int group, const std::vector<uint8_t>& panel,
                           int k, const std::vector<uint16_t>& x, int m) {
  const int room = kt::round_up(m, kt::kRowUnit);
  std::vector<uint16_t> rows(x);
  rows.resize(static_cast<size_t>(room) * k);
  Guarded<uint8_t> scratch(table.gemm_scratch_bytes(k, 1));
  std::vector<float> c(static_cast<size_t>(room) * kt::kPanelRows);
  kt::GemmArgs g{};
  g.panels = panel.data();
  g.n_panels = 1;
  g.k = k;
  g.acts.data = reinterpret_cast<const uint8_t*>(rows.data());
  g.acts.pitch = 2 * static_cast<size_t>(k);
  g.m = m;
  g.c = c.data();
  g.scratch = scratch.data();
  g.lay_out_rows();
  g.group = group;
  g.format = format;
  table.formats[static_cast<int>(format)].gemm(g);
  return c;
}

}  // namespace

// Row n holds the codes at k + n, so that every code meets every place in a line; activations are 1 at one k and 0
// elsewhere.
KT_TEST(every_code_is_exact_in_every_kernel) {
  constexpr int kDepth = 256;
  for_each_format([&](Format format, const GroupedKind& kind, int group) {
    kt::GroupedPanel panel;
    panel.reset(kind, kDepth, group);
    for (int n = 0; n < kt::kPanelRows; ++n) {
      for (int k = 0; k < kDepth; ++k) {
        uint8_t* at = panel.row(n) + k * panel.code_bytes;
        const int code = (k + 17 * n) % (1 << std::min(8, kt::grouped_code_bits(kind.codes)));
        *at = is_nan_code(kind.codes, code) ? 0 : static_cast<uint8_t>(code);
        // Floats that bf16 holds too.
        if (kind.codes == Codes::f16) {
          at[0] &= 0xf8;
          at[1] = static_cast<uint8_t>(0x20 | (n & 3) | (k & 1) << 7);
        }
        const float f32 = static_cast<float>(code + 1);
        if (kind.codes == Codes::f32) std::memcpy(at, &f32, 4);
      }
      for (int g = 0; g < panel.groups; ++g)
        one_scale(kind.scales, panel.row_scales(n) + static_cast<size_t>(g) * panel.width);
      std::fill_n(panel.mins.begin(), panel.mins.size(), uint8_t{0});
      if (!panel.supers.empty()) panel.row_supers(n)[0] = 0x3c00;
      panel.rows[n] = 1.0f;
    }
    std::vector<uint8_t> packed(kt::panel_bytes({format, group}, kDepth));
    kt::put_grouped(kind, group, panel, packed.data());
    for (const auto& v : kt_test::variants().run) {
      for (int m : {1, 2, 7, 33}) {
        kt_test::now_running("%s %s group=%d m=%d", v.name, kt::format_name(format), group, m);
        int wrong = 0;
        for (int at = 0; at < kDepth; at += m) {
          std::vector<uint16_t> x(static_cast<size_t>(m) * kDepth);
          for (int i = 0; i < m; ++i) x[static_cast<size_t>(i) * kDepth + (at + i) % kDepth] = kt::f32_to_bf16(1.0f);
          const std::vector<float> c = product(*v.table, format, group, packed, kDepth, x, m);
          for (int i = 0; i < m; ++i) {
            for (int n = 0; n < kt::kPanelRows; ++n) {
              const double expected = value_of(kind, panel.row(n) + (at + i) % kDepth * panel.code_bytes);
              const double got = c[static_cast<size_t>(i) * kt::kPanelRows + n];
              if (!(std::fabs(got - expected) <= 1e-6 * std::fabs(expected))) ++wrong;
            }
          }
        }
        KT_CHECK_EQ(wrong, 0);
      }
    }
  });
}

KT_TEST(panels_give_back_what_they_got) {
  Random random(2);
  for_each_format([&](Format format, const GroupedKind& kind, int group) {
    for (int k : {1, 31, 64, 65, 200, 256, 257, 576, 1100}) {
      for (int rows : {1, 7, 16}) {
        std::vector<uint16_t> weights(static_cast<size_t>(rows) * k);
        kt_test::fill_gaussian_bf16(weights, random);
        const kt::GroupedPanel in = kt_test::random_panel(kind, group, weights.data(), rows, k, random);
        Guarded<uint8_t> packed(kt::panel_bytes({format, group}, k));
        kt::put_grouped(kind, group, in, packed.data());
        KT_CHECK(packed.front_intact());
        kt::GroupedPanel out;
        kt::get_grouped(kind, group, packed.data(), k, &out);
        KT_CHECK(in.codes == out.codes && in.scales == out.scales && in.mins == out.mins && in.supers == out.supers);
        KT_CHECK(std::memcmp(in.rows, out.rows, sizeof(in.rows)) == 0);
      }
    }
  });
}

// Codes at the width of the file, the rest is scales and less than a line per 256 k beside them.
KT_TEST(panel_sizes) {
  for_each_format([&](Format format, const GroupedKind& kind, int group) {
    const size_t bytes = kt::panel_bytes({format, group}, 4096), blocks = 16;
    const size_t codes = 16 * 4096 * kt::grouped_code_bits(kind.codes) / 8;
    const size_t scales = 16 * 4096 / group * (kt::scale_bytes(kind.scales) + kt::min_bytes(kind.mins));
    const size_t supers = blocks * 32 * (kt::has_super(kind.scales) + kt::has_super_min(kind.mins));
    const size_t least = codes + scales + supers + (kind.row ? 64 : 0);
    KT_CHECK(bytes >= least && bytes < least + 64 * blocks);
    KT_CHECK_EQ(bytes % 32, size_t{0});
  });
}

// Of a matrix with 4096 columns, against its rows in a file.
KT_TEST(panels_of_gguf_are_as_large_as_the_file) {
  for (int f = 0; f < kt::kFormatCount; ++f) {
    const auto format = static_cast<Format>(f);
    const kt::GgufBlock block = kt::gguf_block(format);
    if (!block.weights) continue;
    const int group = kt::grouped_kind(format) ? kt::grouped_kind(format)->least_group : 0;
    const double in_file = 16.0 * 4096 / block.weights * block.bytes;
    KT_CHECK(static_cast<double>(kt::panel_bytes({format, group}, 4096)) <= 1.05 * in_file);
  }
}

KT_TEST(scales_of_every_width) {
  const auto scale = [](kt::Scales scales, uint32_t bits) {
    uint8_t bytes[4];
    std::memcpy(bytes, &bits, 4);
    return kt::decode_scale(scales, bytes);
  };
  KT_CHECK_EQ(scale(kt::Scales::e8m0, 0), 0x1p-127f);
  KT_CHECK_EQ(scale(kt::Scales::e8m0, 127), 1.0f);
  KT_CHECK_EQ(scale(kt::Scales::e8m0, 254), 0x1p127f);
  KT_CHECK(std::isnan(scale(kt::Scales::e8m0, 255)));
  KT_CHECK_EQ(scale(kt::Scales::f16, 0x0001), 0x1p-24f);
  KT_CHECK_EQ(scale(kt::Scales::f16, 0x7bff), 65504.0f);
  KT_CHECK_EQ(scale(kt::Scales::f16, 0xc000), -2.0f);
  KT_CHECK_EQ(scale(kt::Scales::bf16, 0x4049), 3.140625f);
  for (int code = 0; code < 256; ++code) {
    if (!is_nan_code(Codes::e4m3, code)) KT_CHECK_EQ(double{kt::decode_e4m3(uint8_t(code))}, e4m3(code));
  }
}

namespace {

// Scales and zeros that only the extremes of their width have, through every kernel: 2^-127 and 2^90 times codes,
// subnormal e4m3 and f16 scales, zeros of 0 and 16. Larger ones would overflow in sums of integers, and loaders refuse
// them.
void check_extreme_scales(int least_e8m0) {
  constexpr int kDepth = 256;
  for_each_format([&](Format format, const GroupedKind& kind, int group) {
    if (!kt::is_checkpoint(format)) return;
    kt::GroupedPanel panel;
    panel.reset(kind, kDepth, group);
    for (int n = 0; n < kt::kPanelRows; ++n) {
      for (int k = 0; k < kDepth; ++k) panel.row(n)[k] = static_cast<uint8_t>(1 + k % 6);
      for (int g = 0; g < panel.groups; ++g) {
        uint8_t* at = panel.row_scales(n) + static_cast<size_t>(g) * panel.width;
        const uint32_t f32 = n % 2 ? 0x6c800000 : 0x00800000;
        const uint16_t f16 = n % 2 ? 0x7bff : static_cast<uint16_t>(1 + n), bf16 = n % 2 ? 0x6c80 : 0x0080;
        if (kind.scales == kt::Scales::f32) std::memcpy(at, &f32, 4);
        if (kind.scales == kt::Scales::f16) std::memcpy(at, &f16, 2);
        if (kind.scales == kt::Scales::bf16) std::memcpy(at, &bf16, 2);
        if (kind.scales == kt::Scales::e8m0) *at = static_cast<uint8_t>(n % 2 ? 217 : least_e8m0 + n / 2);
        if (kind.scales == kt::Scales::e4m3) *at = static_cast<uint8_t>(n % 2 ? 0x7e - n : n / 2);
        if (kind.mins == kt::Mins::zeros) panel.row_mins(n)[g] = n % 3 ? 16 : 0;
      }
      panel.rows[n] = 1.0f;
    }
    std::vector<uint8_t> packed(kt::panel_bytes({format, group}, kDepth));
    kt::put_grouped(kind, group, panel, packed.data());
    std::vector<float> w(16 * kDepth);
    kt::decode_panel({format, group}, packed.data(), kDepth, kDepth, w.data());
    for (const auto& v : kt_test::variants().run) {
      for (int m : {1, 7, 33}) {
        kt_test::now_running("%s %s group=%d m=%d", v.name, kt::format_name(format), group, m);
        const std::vector<uint16_t> x(static_cast<size_t>(m) * kDepth, kt::f32_to_bf16(1.0f));
        const std::vector<float> c = product(*v.table, format, group, packed, kDepth, x, m);
        for (int n = 0; n < kt::kPanelRows; ++n) {
          double expected = 0;
          for (int k = 0; k < kDepth; ++k) expected += w[static_cast<size_t>(n) * kDepth + k];
          // Weights below 2^-126 may become 0 where they are rounded to bf16.
          KT_CHECK(std::fabs(c[n] - expected) <= 4e-3 * std::fabs(expected) + kDepth * 0x1p-126);
        }
      }
    }
  });
}

}  // namespace

// From 2^-125 on, kernels may add exponents of mxfp4 as integers.
KT_TEST(extreme_scales) {
  for (int least_e8m0 : {0, 2}) check_extreme_scales(least_e8m0);
}

KT_TEST(unpacked_rows_are_those_of_a_panel) {
  for_each_format([](Format format, const GroupedKind& kind, int group) {
    if (!kt::is_checkpoint(format)) return;
    Random random(group);
    const int k = 328, bits = kt::row_bits(format);
    std::vector<uint16_t> weights(static_cast<size_t>(kt::kPanelRows) * k);
    kt_test::fill_gaussian_bf16(weights, random);
    const kt::GroupedPanel from = kt_test::random_panel(kind, group, weights.data(), kt::kPanelRows, k, random);
    const kt::GroupedLayout layout(kind, group);
    Guarded<uint8_t> panel(layout.panel_bytes(k));
    kt::put_grouped(kind, group, from, panel.data());
    panel.seal();
    const size_t pitch = static_cast<size_t>(kt::kUnpackDepth) * bits / 8;
    Guarded<uint8_t> rows(kt::kPanelRows * pitch);
    for (int kb = 0; kb < k; kb += kt::kUnpackDepth) {
      kt::unpack_block({format, group}, panel.data(), k, kb, rows.data(), pitch);
      int wrong = 0;
      for (int n = 0; n < kt::kPanelRows; ++n) {
        for (int i = 0; i < std::min(kt::kUnpackDepth, k - kb); ++i) {
          const uint8_t byte = rows[n * pitch + static_cast<size_t>(i) * bits / 8];
          wrong += (bits == 8 ? byte : byte >> i % 2 * 4 & 15) != from.row(n)[kb + i];
        }
      }
      KT_CHECK_EQ(wrong, 0);
    }
    KT_CHECK(rows.front_intact());
  });
}
