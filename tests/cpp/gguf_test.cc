// Blocks of GGUF become panels without a byte read or written beyond, on any cut of the columns; what blocks mean is
// held against the gguf package by test_gguf_layers.py.
#include "formats/gguf.h"

#include "check.h"
#include "formats/format.h"
#include "guarded.h"
#include "variants.h"

using kt::Format;
using kt_test::Guarded;
using kt_test::Random;

namespace {

template <class Body>
void for_each_type(Body body) {
  for (int f = 0; f < kt::kFormatCount; ++f) {
    const auto format = static_cast<Format>(f);
    if (kt::gguf_block(format).weights && kt::grouped_kind(format)) body(format, kt::gguf_block(format));
  }
}

// Bytes that are finite scales wherever a block has them: no f16 has the exponent of infinity.
void fill(Guarded<uint8_t>& rows, Random& random) {
  for (uint8_t& b : rows) b = static_cast<uint8_t>(random.below(256) & 0xbb);
}

std::vector<float> decoded(Format format, const Guarded<uint8_t>& panel, int k) {
  std::vector<float> out(static_cast<size_t>(kt::kPanelRows) * k);
  kt::decode_panel({format, kt::grouped_kind(format)->least_group}, panel.data(), k, k, out.data());
  return out;
}

size_t packed_bytes(Format format, int k) {
  return kt::panel_bytes({format, kt::grouped_kind(format)->least_group}, k);
}

}  // namespace

KT_TEST(columns_of_a_panel_are_those_of_the_file) {
  Random random(1);
  for_each_type([&](Format format, kt::GgufBlock block) {
    const int k = 768;
    const size_t pitch = static_cast<size_t>(k) / block.weights * block.bytes;
    for (int count : {1, 7, 16}) {
      kt_test::now_running("%s rows=%d", kt::format_name(format), count);
      Guarded<uint8_t> rows(count * pitch);
      fill(rows, random);
      rows.seal();
      kt::GroupedPanel scratch;
      Guarded<uint8_t> whole(packed_bytes(format, k));
      KT_CHECK(kt::pack_gguf(format, rows.data(), pitch, count, 0, k, &scratch, whole.data()));
      const std::vector<float> all = decoded(format, whole, k);
      Guarded<uint8_t> part(packed_bytes(format, 256));
      KT_CHECK(kt::pack_gguf(format, rows.data(), pitch, count, 256, 512, &scratch, part.data()));
      const std::vector<float> middle = decoded(format, part, 256);
      KT_CHECK(whole.front_intact() && part.front_intact());
      int wrong = 0;
      for (int n = 0; n < kt::kPanelRows; ++n) {
        for (int i = 0; i < 256; ++i) {
          const float expected = all[static_cast<size_t>(n) * k + 256 + i];
          wrong += !(middle[static_cast<size_t>(n) * 256 + i] == expected) || (n >= count && expected != 0.0f);
        }
      }
      KT_CHECK_EQ(wrong, 0);
    }
  });
}

// In every f16 of a block, in any row: one at a time is set to infinity, or e8m0 to NaN.
KT_TEST(scales_that_are_not_finite_are_found) {
  Random random(2);
  for_each_type([&](Format format, kt::GgufBlock block) {
    if (block.weights == 1) return;
    const int k = 512, count = 5;
    const size_t pitch = static_cast<size_t>(k) / block.weights * block.bytes;
    kt::GroupedPanel scratch;
    Guarded<uint8_t> rows(count * pitch), panel(packed_bytes(format, k));
    fill(rows, random);
    KT_CHECK(kt::pack_gguf(format, rows.data(), pitch, count, 0, k, &scratch, panel.data()));
    int found = 0;
    for (int byte = 0; byte < block.bytes; ++byte) {
      uint8_t* at = rows.data() + 3 * pitch + block.bytes + byte;
      // The high byte of an f16, and that of e8m0.
      const uint8_t before = *at;
      *at = format == Format::mxfp4 ? 0xff : 0x7c;
      if (format == Format::iq1_m && byte >= 48 && byte % 2) *at = static_cast<uint8_t>(before | 0xf0);
      found += !kt::pack_gguf(format, rows.data(), pitch, count, 0, k, &scratch, panel.data());
      *at = before;
    }
    const bool two =
        kt::has_super_min(kt::grouped_kind(format)->mins) || kt::grouped_kind(format)->mins == kt::Mins::f16;
    kt_test::now_running("%s", kt::format_name(format));
    if (format == Format::iq1_m) {
      KT_CHECK(found <= 4);  // a scale in four words: one of them alone need not make infinity
    } else {
      KT_CHECK_EQ(found, two ? 2 : 1);
    }
  });
}
