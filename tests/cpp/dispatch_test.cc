#include "kernels/dispatch.h"

#include <cctype>
#include <string>

#include "check.h"
#include "kernels/kernel.h"

namespace {

kt::FeatureSet needs_of(const std::string& name) {
  for (const auto& v : kt::variants(0)) {
    if (name == v.name) return v.needs;
  }
  return 0;
}

std::string chosen(const char* forced, kt::FeatureSet cpu) {
  const char* name = nullptr;
  const kt::Status status = kt::choose(forced, cpu, &name);
  return status.is_ok() ? name : "error: " + status.message();
}

bool is_built(const std::string& name) {
  for (const auto& v : kt::variants(0)) {
    if (name == v.name) return true;
  }
  return false;
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

KT_TEST(every_native_row_is_chosen_where_it_is_the_best_that_runs) {
  for (const auto& v : kt::variants(0)) {
    if (!v.emulated) KT_CHECK_EQ(chosen(nullptr, v.needs), v.name);
  }
}

KT_TEST(every_row_can_be_forced_by_name_in_any_case) {
  for (const auto& v : kt::variants(0)) {
    std::string upper = v.name;
    for (char& c : upper) c = static_cast<char>(std::toupper(c));
    KT_CHECK_EQ(chosen(upper.c_str(), v.needs), v.name);
  }
}

KT_TEST(emulated_rows_are_never_chosen_by_themselves) {
  KT_CHECK_EQ(contains(chosen(nullptr, 0), "KT_KERNEL_CPU_VARIANT=emu"), is_built("emu"));
  KT_CHECK(contains(chosen("", 0), "AVX2"));
  if (is_built("emu")) KT_CHECK_EQ(chosen("emu", 0), "emu");
}

KT_TEST(errors_name_what_is_missing_and_what_would_work) {
  if (is_built("avx2")) {
    const std::string refused = chosen("avx2", 0);
    KT_CHECK(contains(refused, "lacks"));
    KT_CHECK(contains(refused, "fma"));
    KT_CHECK(contains(refused, "it can run: "));
    KT_CHECK_EQ(contains(refused, "emu"), is_built("emu"));
  }
  const std::string unknown = chosen("avx3", needs_of("avx2"));
  KT_CHECK(contains(unknown, "KT_KERNEL_CPU_VARIANT=avx3"));
  KT_CHECK(contains(unknown, "known: avx512, "));
}

KT_TEST(avx512_means_the_best_avx512_row) {
  const kt::FeatureSet vnni = needs_of("avx512_vnni");
  if (!vnni) return;  // a build of some rows only
  KT_CHECK_EQ(chosen("avx512", vnni), "avx512_vnni");
  KT_CHECK_EQ(chosen("AVX512", needs_of("amx")), "avx512_bf16");
  KT_CHECK(contains(chosen("avx512", needs_of("avx2")), "no avx512_* variant"));
}

KT_TEST(select_hands_out_the_table_of_the_row) {
  for (const auto& v : kt::variants()) {
    const kt::IsaTable* table = nullptr;
    const kt::Status status = kt::select(v.name, &table);
    KT_CHECK_EQ(status.is_ok(), v.runnable);
    if (status.is_ok()) KT_CHECK_EQ(std::string(table->name), v.name);
    std::printf("  %s: %s\n", v.name, v.runnable ? "runs here" : v.reason.c_str());
  }
}
