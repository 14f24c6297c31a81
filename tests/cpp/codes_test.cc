// Codes in and out of panels, and the layouts files keep them in.
#include "formats/codes.h"

#include <algorithm>

#include "check.h"
#include "formats/code_layouts.h"
#include "guarded.h"
#include "variants.h"

using kt::Format;
using kt_test::Guarded;
using kt_test::Random;

namespace {

constexpr int kDepths[] = {1, 31, 32, 64, 65, 200, 256, 257, 300, 768, 1100};
constexpr Format kCoded[] = {Format::int8, Format::int4, Format::int4g};

// Where a code lies in the layout `blocks`, element by element: the formula its writers use.
size_t block_index(int rows, int depth, int n, int k, int bits) {
  const int row_block = bits == 8 ? 64 : 128, step = bits == 8 ? 64 : 128;
  const int nb = n / row_block * row_block, kb = k / 3584 * 3584;
  const int block_rows = std::min(row_block, rows - nb), block_depth = std::min(3584, depth - kb);
  const int ns = (n - nb) / 32 * 32, ks = (k - kb) / step * step, h = (n - nb) % 32 / 16;
  const size_t start = (static_cast<size_t>(nb) * depth + static_cast<size_t>(kb) * block_rows +
                        static_cast<size_t>(ns) * block_depth + 32u * ks) *
                       bits / 8;
  return start + 1024u * h + 64u * ((k - kb) % 64 / 4) + 4u * (n % 16) + k % 4;
}

void put_block(uint8_t* data, int rows, int depth, int n, int k, int bits, int code) {
  uint8_t& byte = data[block_index(rows, depth, n, k, bits)];
  if (bits == 8) {
    byte = static_cast<uint8_t>(code);
  } else if (k % 128 < 64) {
    byte = static_cast<uint8_t>((byte & 0xf0) | (code & 15));
  } else {
    byte = static_cast<uint8_t>((byte & 0x0f) | (code & 15) << 4);
  }
}

}  // namespace

KT_TEST(a_panel_survives_its_codes) {
  Random random(1);
  const kt::IsaTable& table = *kt_test::variants().run.front().table;
  for (Format format : kCoded) {
    for (int k : kDepths) {
      for (int rows : {1, 7, 16}) {
        kt_test::now_running("codes of %s rows=%d k=%d", kt::format_name(format), rows, k);
        Guarded<uint16_t> source(static_cast<size_t>(rows) * k);
        kt_test::fill_gaussian_bf16(source, random);
        if (rows > 1) source[0] = 0x7fc0;  // a row that is no number keeps its bytes as well
        Guarded<uint8_t> panel(kt::panel_bytes(format, k)), again(panel.bytes());
        table.formats[static_cast<int>(format)].pack(source.data(), k, rows, k, panel.data());
        kt::PanelCodes codes;
        kt::get_codes(format, panel.data(), k, &codes);
        kt::put_codes(format, codes, again.data());
        KT_CHECK(std::memcmp(panel.data(), again.data(), panel.bytes()) == 0);
        KT_CHECK(again.front_intact());
      }
    }
  }
}

KT_TEST(codes_mean_what_the_decoder_says) {
  Random random(2);
  for (Format format : kCoded) {
    for (int k : kDepths) {
      kt::PanelCodes codes;
      codes.reset(k);
      const int least = kt::code_bits(format) == 8 ? -128 : -8;
      for (int n = 0; n < 16; ++n) {
        codes.scales[n] = random.gaussian();
        for (int i = 0; i < k; ++i) codes.row(n)[i] = static_cast<int8_t>(least + random.below(-2 * least));
        for (int g = 0; g < (k + 63) / 64; ++g) codes.row_steps(n)[g] = static_cast<uint8_t>(1 + random.below(16));
      }
      Guarded<uint8_t> panel(kt::panel_bytes(format, k));
      kt::put_codes(format, codes, panel.data());
      std::vector<float> decoded(static_cast<size_t>(16) * codes.pitch);
      kt::decode_panel(format, panel.data(), k, codes.pitch, decoded.data());
      for (int n = 0; n < 16; ++n) {
        for (int i = 0; i < codes.pitch; ++i) {
          const int step = format == Format::int8 ? 1 : format == Format::int4 ? 16 : codes.row_steps(n)[i / 64];
          KT_CHECK_EQ(decoded[static_cast<size_t>(n) * codes.pitch + i],
                      codes.scales[n] * static_cast<float>(step * (i < k ? codes.row(n)[i] : 0)));
        }
      }
    }
  }
}

KT_TEST(rows_are_read_from_any_place) {
  Random random(3);
  for (int bits : {8, 4}) {
    const kt::CodeLayout& layout = *kt::code_layout("rows", bits);
    for (int k : {1, 2, 63, 65, 127, 200}) {
      constexpr int kRows = 37;
      std::vector<int8_t> codes(static_cast<size_t>(kRows) * k);
      for (int8_t& c : codes) c = static_cast<int8_t>(random.below(1 << bits) - (1 << (bits - 1)));
      Guarded<uint8_t> data(layout.bytes(kRows, k));
      for (int n = 0; n < kRows; ++n) {
        const int8_t* row = codes.data() + static_cast<size_t>(n) * k;
        uint8_t* to = data.data() + layout.bytes(n, k);
        if (bits == 4) {
          kt::write_row_int4(row, k, to);
        } else {
          std::memcpy(to, row, k);
        }
      }
      for (int k0 = 0; k0 < k; k0 += 64) {
        const int k1 = std::min(k, k0 + 128);
        int8_t out[16 * 130];
        layout.read(data.data(), kRows, k, {32, 5, k0, k1}, out, 130);
        for (int r = 0; r < 5; ++r) {
          for (int i = k0; i < k1; ++i)
            KT_CHECK_EQ(out[r * 130 + i - k0], codes[(32 + r) * static_cast<size_t>(k) + i]);
        }
      }
    }
  }
}

KT_TEST(blocks_are_read_as_the_formula_says) {
  Random random(4);
  for (int bits : {8, 4}) {
    const kt::CodeLayout& layout = *kt::code_layout("blocks", bits);
    for (auto [rows, k] : {std::pair{64, 64}, {192, 320}, {128, 128}, {384, 256}, {128, 3584 + 256}}) {
      if (rows % layout.unit || k % layout.unit) continue;
      kt_test::now_running("blocks of %d bits %dx%d", bits, rows, k);
      std::vector<int8_t> codes(static_cast<size_t>(rows) * k);
      Guarded<uint8_t> data(layout.bytes(rows, k));
      for (int n = 0; n < rows; ++n) {
        for (int i = 0; i < k; ++i) {
          const int code = random.below(1 << bits) - (1 << (bits - 1));
          codes[static_cast<size_t>(n) * k + i] = static_cast<int8_t>(code);
          put_block(data.data(), rows, k, n, i, bits, code);
        }
      }
      std::vector<int8_t> out(static_cast<size_t>(16) * k);
      for (int row = 0; row < rows; row += 16) {
        for (int k0 : {0, 64}) {
          if (k0 >= k) continue;
          layout.read(data.data(), rows, k, {row, 16, k0, k}, out.data(), k);
          bool same = true;
          for (int r = 0; r < 16; ++r) {
            same &=
                std::equal(out.data() + static_cast<size_t>(r) * k, out.data() + static_cast<size_t>(r) * k + k - k0,
                           codes.data() + static_cast<size_t>(row + r) * k + k0);
          }
          KT_CHECK(same);
        }
      }
    }
  }
}

KT_TEST(layouts_are_found_by_name_and_width) {
  KT_CHECK(kt::code_layout("rows", 8) != kt::code_layout("rows", 4));
  KT_CHECK(!kt::code_layout("rows", 0));
  KT_CHECK(!kt::code_layout("columns", 8));
}
