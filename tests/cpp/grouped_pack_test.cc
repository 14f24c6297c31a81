// Matrices of checkpoints become panels: as put_grouped makes them from codes taken one by one, in every order, and
// without a byte read or written beyond.
#include "check.h"
#include "formats/format.h"
#include "grouped_case.h"
#include "guarded.h"
#include "moe/grouped_expert.h"

using kt::CodeOrder;
using kt::Codes;
using kt::Format;
using kt::GroupedKind;
using kt_test::Guarded;
using kt_test::Random;

namespace {

constexpr int kAwqPlace[] = {0, 4, 1, 5, 2, 6, 3, 7};  // the nibble of n % 8

// A matrix [N, K] in a file, beside its codes one by one.
struct File {
  int n, k, group, groups;
  std::vector<uint8_t> codes;  // [n][k]
  Guarded<uint8_t> data, scales, zeros;
  Guarded<float> rows;
  kt::GroupedMatrix matrix;

  File(const GroupedKind& kind, CodeOrder order, int rows_n, int depth, int group_size, Random& random)
      : n(rows_n),
        k(depth),
        group(group_size),
        groups(kt::div_up(depth, group_size)),
        codes(static_cast<size_t>(n) * k),
        data(bytes(kind, order)),
        scales(static_cast<size_t>(n) * groups * kt::scale_bytes(kind.scales)),
        zeros(static_cast<size_t>(n) * groups),
        rows(static_cast<size_t>(n)) {
    std::memset(data.data(), 0, data.bytes());
    for (int i = 0; i < n; ++i) {
      for (int j = 0; j < k; ++j)
        put(kind, order, i, j, kt_test::code_of(kind, static_cast<uint16_t>(random.below(65536))));
      for (int g = 0; g < groups; ++g) {
        kt_test::random_scale(kind.scales, random, scale(kind, i, g));
        zeros.data()[i * groups + g] = static_cast<uint8_t>(random.below(17));
      }
      rows.data()[i] = static_cast<float>(1 + random.below(100));
    }
    matrix.order = order;
    matrix.codes = data.data();
    matrix.code_pitch = data.bytes() / static_cast<size_t>(order == CodeOrder::rows   ? n
                                                           : order == CodeOrder::gptq ? kt::div_up(k, 8)
                                                                                      : k);
    matrix.scales = scales.data();
    matrix.scale_row = static_cast<size_t>(groups) * kt::scale_bytes(kind.scales);
    matrix.scale_group = static_cast<size_t>(kt::scale_bytes(kind.scales));
    matrix.zeros = kind.mins == kt::Mins::zeros ? zeros.data() : nullptr;
    matrix.zero_row = static_cast<size_t>(groups);
    matrix.zero_group = 1;
    matrix.rows = rows.data();
    matrix.row_step = 1;
  }

  size_t bytes(const GroupedKind& kind, CodeOrder order) const {
    if (order == CodeOrder::gptq) return static_cast<size_t>(kt::div_up(k, 8)) * n * 4;
    if (order == CodeOrder::awq) return static_cast<size_t>(k) * kt::div_up(n, 8) * 4;
    return static_cast<size_t>(n) * kt::div_up(k * kt::grouped_code_bits(kind.codes), 8);
  }
  uint8_t* scale(const GroupedKind& kind, int i, int g) {
    return scales.data() + (static_cast<size_t>(i) * groups + g) * kt::scale_bytes(kind.scales);
  }
  void put(const GroupedKind& kind, CodeOrder order, int i, int j, uint8_t code) {
    codes[static_cast<size_t>(i) * k + j] = code;
    if (kt::grouped_code_bits(kind.codes) == 8) {
      data.data()[static_cast<size_t>(i) * k + j] = code;
      return;
    }
    size_t nibble = static_cast<size_t>(i) * 2 * kt::div_up(k, 2) + j;
    if (order == CodeOrder::gptq) nibble = (static_cast<size_t>(j / 8) * n + i) * 8 + j % 8;
    if (order == CodeOrder::awq) nibble = (static_cast<size_t>(j) * kt::div_up(n, 8) + i / 8) * 8 + kAwqPlace[i % 8];
    data.data()[nibble / 2] |= static_cast<uint8_t>(code << nibble % 2 * 4);
  }
};

// The slow twin of pack_matrix.
kt::GroupedPanel panel_of(const GroupedKind& kind, File& file, int row, int rows, int k0, int k1, int panel_group) {
  kt::GroupedPanel panel;
  panel.reset(kind, k1 - k0, panel_group);
  for (int r = 0; r < rows; ++r) {
    for (int k = k0; k < k1; ++k) panel.row(r)[k - k0] = file.codes[static_cast<size_t>(row + r) * file.k + k];
    if (kind.row) panel.rows[r] = file.rows.data()[row + r];
    for (int g = 0; g < kt::div_up(k1 - k0, panel_group); ++g) {
      const int from = (k0 + g * panel_group) / file.group;
      if (panel.width)
        std::memcpy(panel.row_scales(r) + static_cast<size_t>(g) * panel.width, file.scale(kind, row + r, from),
                    panel.width);
      if (kind.mins == kt::Mins::zeros) panel.row_mins(r)[g] = file.zeros.data()[(row + r) * file.groups + from];
    }
  }
  return panel;
}

std::vector<CodeOrder> orders(const GroupedKind& kind) {
  if (kind.codes != Codes::u4) return {CodeOrder::rows};
  return {CodeOrder::rows, CodeOrder::gptq, CodeOrder::awq};
}

template <class Body>
void for_each_format(Body body) {
  for (int f = 0; f < kt::kFormatCount; ++f) {
    const auto format = static_cast<Format>(f);
    if (kt::is_checkpoint(format)) body(format, *kt::grouped_kind(format));
  }
}

}  // namespace

KT_TEST(matrices_become_the_panels_of_their_codes) {
  Random random(3);
  for_each_format([&](Format format, const GroupedKind& kind) {
    for (CodeOrder order : orders(kind)) {
      for (int k : {33, 64, 200, 257, 320, 640}) {
        for (int n : {5, 16, 39}) {
          for (int panel_group : kt_test::legal_groups(format)) {
            const int group = kind.scales == kt::Scales::none ? 256 : panel_group * (1 + random.below(3));
            File file(kind, order, n, k, group, random);
            for (int k0 : {0, 64, 256}) {
              if (k0 >= k || (k0 % group && k0 % panel_group)) continue;
              for (int row = 0; row < n; row += kt::kPanelRows) {
                const int rows = std::min(kt::kPanelRows, n - row);
                kt_test::now_running("%s order %d [%d, %d] from %d, %d", kt::format_name(format),
                                     static_cast<int>(order), n, k, row, k0);
                const size_t size = kt::panel_bytes({format, panel_group}, k - k0);
                Guarded<uint8_t> fast(size);
                std::vector<uint8_t> slow(size);
                const unsigned faults =
                    kt::pack_matrix(kind, file.matrix, group, row, rows, k0, k, panel_group, fast.data(), 0);
                kt::put_grouped(kind, panel_group, panel_of(kind, file, row, rows, k0, k, panel_group), slow.data());
                KT_CHECK_EQ(faults, 0u);
                KT_CHECK(fast.front_intact());
                if (std::memcmp(fast.data(), slow.data(), size)) kt_test::fail(__FILE__, __LINE__, kt_test::running);
              }
            }
          }
        }
      }
    }
  });
}

// Several panels at once are what each of them is alone.
KT_TEST(panels_that_are_packed_together) {
  Random random(7);
  for (CodeOrder order : orders(kt::kInt4z)) {
    const int n = 16 * kt::panels_together(order) + 21, k = 320, group = 64;
    File file(kt::kInt4z, order, n, k, group, random);
    const size_t size = kt::panel_bytes({Format::int4z, group}, k);
    const int panels = kt::panel_count(n);
    Guarded<uint8_t> all(2 * size * panels);
    std::memset(all.data(), 0x5a, all.bytes());
    KT_CHECK_EQ(kt::pack_matrix(kt::kInt4z, file.matrix, group, 0, n, 0, k, group, all.data(), 2 * size), 0u);
    for (int p = 0; p < panels; ++p) {
      std::vector<uint8_t> one(size), between(size, 0x5a);
      const int rows = std::min(kt::kPanelRows, n - 16 * p);
      KT_CHECK_EQ(kt::pack_matrix(kt::kInt4z, file.matrix, group, 16 * p, rows, 0, k, group, one.data(), 0), 0u);
      KT_CHECK(std::memcmp(all.data() + 2 * p * size, one.data(), size) == 0);
      KT_CHECK(std::memcmp(all.data() + (2 * p + 1) * size, between.data(), size) == 0);
    }
  }
}

KT_TEST(scales_of_blocks_and_one_factor_of_all_rows) {
  Random random(4);
  const GroupedKind& fp8 = kt::kFp8;
  File file(fp8, CodeOrder::rows, 48, 128, 128, random);
  file.matrix.block_rows = 24;
  Guarded<uint8_t> panel(kt::panel_bytes({Format::fp8, 128}, 128));
  KT_CHECK_EQ(kt::pack_matrix(fp8, file.matrix, 128, 16, 16, 0, 128, 128, panel.data(), 0), 0u);
  for (int r = 0; r < kt::kPanelRows; ++r)
    KT_CHECK(std::memcmp(panel.data() + 4 * r, file.scale(fp8, r < 8 ? 0 : 1, 0), 4) == 0);

  File whole(kt::kFp8c, CodeOrder::rows, 16, 64, 256, random);
  whole.matrix.row_step = 0;
  Guarded<uint8_t> one(kt::panel_bytes({Format::fp8c, 256}, 64));
  KT_CHECK_EQ(kt::pack_matrix(kt::kFp8c, whole.matrix, 0, 0, 16, 0, 64, 256, one.data(), 0), 0u);
  for (int r = 0; r < kt::kPanelRows; ++r) KT_CHECK(std::memcmp(one.data() + 4 * r, whole.rows.data(), 4) == 0);
}

KT_TEST(faults_are_found_wherever_they_are) {
  Random random(5);
  for_each_format([&](Format format, const GroupedKind& kind) {
    const int group = kt_test::legal_groups(format).front(), k = 200;
    std::vector<uint8_t> panel(kt::panel_bytes({format, group}, k));
    for (int row : {0, 16}) {
      const int rows = row ? 9 : 16;
      for (int r : {0, rows - 1}) {
        const auto faults = [&](auto spoil) {
          File file(kind, CodeOrder::rows, 25, k, group, random);
          spoil(file);
          return kt::pack_matrix(kind, file.matrix, group, row, rows, 0, k, group, panel.data(), 0);
        };
        if (kind.codes == Codes::e4m3) {
          for (int at : {0, 63, 130, 199}) {
            for (int nan : {0x7f, 0xff}) {
              KT_CHECK_EQ(faults([&](File& f) { f.data.data()[(row + r) * k + at] = static_cast<uint8_t>(nan); }),
                          kt::kCodeFault);
            }
          }
        }
        if (kind.scales != kt::Scales::none) {
          const auto worst = [&](File& f) {
            std::memset(f.scale(kind, row + r, f.groups - 1), 0xff, kt::scale_bytes(kind.scales));
          };
          KT_CHECK_EQ(faults(worst), kt::kScaleFault);
        }
        if (kind.row) {
          KT_CHECK_EQ(faults([&](File& f) { f.rows.data()[row + r] = std::ldexp(1.0f, 90); }), kt::kRowFault);
        }
        if (kind.mins == kt::Mins::zeros) {
          KT_CHECK_EQ(faults([&](File& f) { f.zeros.data()[(row + r) * f.groups] = 17; }), kt::kZeroFault);
        }
      }
    }
  });
}

KT_TEST(the_largest_scales_that_are_taken) {
  Random random(6);
  const float f32 = std::nextafterf(std::ldexp(1.0f, 90), 0.0f);
  const auto taken = [&](const GroupedKind& kind, Format format, const void* scale) {
    const int group = kt_test::legal_groups(format).front();
    File file(kind, CodeOrder::rows, 16, 64, group, random);
    std::memcpy(file.scale(kind, 3, 0), scale, kt::scale_bytes(kind.scales));
    std::vector<uint8_t> panel(kt::panel_bytes({format, group}, 64));
    return kt::pack_matrix(kind, file.matrix, group, 0, 16, 0, 64, group, panel.data(), 0) == 0;
  };
  const float above = std::ldexp(1.0f, 90), below_0 = -f32;
  KT_CHECK(taken(kt::kFp8, Format::fp8, &f32) && taken(kt::kFp8, Format::fp8, &below_0) &&
           !taken(kt::kFp8, Format::fp8, &above));
  const uint16_t bf16[] = {static_cast<uint16_t>((217 << 7) - 1), static_cast<uint16_t>(217 << 7)};
  KT_CHECK(taken(kt::kRawint4, Format::rawint4, &bf16[0]) && !taken(kt::kRawint4, Format::rawint4, &bf16[1]));
  const uint16_t f16[] = {0x7bff, 0x7c00};
  KT_CHECK(taken(kt::kInt4z, Format::int4z, &f16[0]) && !taken(kt::kInt4z, Format::int4z, &f16[1]));
  const uint8_t e8m0[] = {216, 217, 255}, e4m3[] = {0x7e, 0x7f, 0x80};
  KT_CHECK(taken(kt::kMxfp8, Format::mxfp8, &e8m0[0]) && !taken(kt::kMxfp8, Format::mxfp8, &e8m0[1]));
  KT_CHECK(!taken(kt::kMxfp4, Format::mxfp4, &e8m0[2]));
  KT_CHECK(taken(kt::kNvfp4, Format::nvfp4, &e4m3[0]) && !taken(kt::kNvfp4, Format::nvfp4, &e4m3[1]));
  KT_CHECK(!taken(kt::kNvfp4, Format::nvfp4, &e4m3[2]));
}
