#include "cpu/features.h"

#include "check.h"

namespace {

constexpr uint64_t kSse = 0x3, kYmm = 0x7, kZmm = 0xe7, kTile = 0x600e7;

kt::RawCpuid every_bit(uint64_t xcr0, bool tile_on_request) {
  kt::RawCpuid raw;
  raw.leaf1_ecx = raw.leaf7_ebx = raw.leaf7_ecx = raw.leaf7_edx = raw.leaf7_1_eax = ~0u;
  raw.xcr0 = xcr0;
  raw.tile_on_request = tile_on_request;
  return raw;
}

}  // namespace

KT_TEST(names_round_trip) {
  const kt::FeatureSet set = kt::feature::avx2 | kt::feature::amx_int8;
  kt::FeatureSet parsed = 0;
  KT_CHECK(kt::parse_features(" " + kt::feature_names(set) + "  ", &parsed).is_ok());
  KT_CHECK_EQ(parsed, set);
  KT_CHECK_EQ(kt::feature_names(0), "");
}

KT_TEST(unknown_name_is_named_in_the_error) {
  kt::FeatureSet parsed = 0;
  const kt::Status status = kt::parse_features("avx2 avx9", &parsed);
  KT_CHECK(status.code() == kt::Status::Code::invalid);
  KT_CHECK(status.message().find("'avx9'") != std::string::npos);
}

KT_TEST(cpuid_alone_is_not_enough) {
  using namespace kt::feature;
  const kt::FeatureSet sse = kt::decode(every_bit(kSse, true));
  KT_CHECK(sse & popcnt);
  KT_CHECK(!(sse & (avx2 | avx512f | amx_tile)));
  const kt::FeatureSet ymm = kt::decode(every_bit(kYmm, true));
  KT_CHECK(ymm & avx2);
  KT_CHECK(!(ymm & (avx512f | amx_tile)));
  const kt::FeatureSet zmm = kt::decode(every_bit(kZmm, true));
  KT_CHECK(zmm & avx512_bf16);
  KT_CHECK(!(zmm & amx_tile));
}

KT_TEST(tiles_need_a_kernel_that_gives_them_on_request) {
  KT_CHECK(!(kt::decode(every_bit(kTile, false)) & kt::feature::amx_tile));
  KT_CHECK(kt::decode(every_bit(kTile, true)) & kt::feature::amx_tile);
}

KT_TEST(bits_are_read_from_their_registers) {
  kt::RawCpuid raw;
  raw.xcr0 = kTile;
  raw.tile_on_request = true;
  raw.leaf7_1_eax = 1u << 5;
  raw.leaf7_edx = 1u << 24;
  KT_CHECK_EQ(kt::feature_names(kt::decode(raw)), "avx512_bf16 amx_tile");
}

KT_TEST(this_machine_is_read) { KT_CHECK_EQ(kt::cpu_features(), kt::decode(kt::read_cpuid())); }
