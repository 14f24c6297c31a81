#include "kernels/dispatch.h"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <string_view>

extern "C" {
#define KT_ISA_ROW(name, emulated, needs) const kt::IsaTable* kt_isa_##name();
#include "isa_list.inc"
#undef KT_ISA_ROW
}

namespace kt {
namespace {

struct Row {
  const char* name;
  bool emulated;
  FeatureSet needs;
  const IsaTable* (*table)();
};

constexpr Row kRows[] = {
#define KT_ISA_ROW(name, emulated, needs) {#name, emulated != 0, needs, kt_isa_##name},
#include "isa_list.inc"
#undef KT_ISA_ROW
};

constexpr FeatureSet kTileFeatures = feature::amx_tile | feature::amx_int8 | feature::amx_bf16;
constexpr std::string_view kAvx512 = "avx512";

std::string runnable_names(FeatureSet cpu) {
  std::string names;
  for (const VariantInfo& v : variants(cpu)) {
    if (!v.runnable) continue;
    if (!names.empty()) names += ", ";
    names += v.name;
  }
  return names;
}

std::string all_names() {
  std::string names(kAvx512);
  for (const Row& row : kRows) names += std::string(", ") + row.name;
  return names;
}

const Row* find(std::string_view name) {
  auto row = std::find_if(std::begin(kRows), std::end(kRows), [&](const Row& r) { return r.name == name; });
  return row == std::end(kRows) ? nullptr : row;
}

std::string lower(const char* text) {
  std::string result(text);
  for (char& c : result) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return result;
}

Status choose_row(const char* forced, FeatureSet cpu, const Row** out) {
  const std::string name = forced ? lower(forced) : "";
  auto runs = [cpu](const Row& row) { return (row.needs & ~cpu) == 0; };

  if (name.empty() || name == kAvx512) {
    for (const Row& row : kRows) {
      const bool eligible = !row.emulated && (name.empty() || std::string_view(row.name).substr(0, 7) == "avx512_");
      if (eligible && runs(row)) {
        *out = &row;
        return Status::ok();
      }
    }
    if (name == kAvx512) {
      return Status::unsupported("KT_KERNEL_CPU_VARIANT=avx512: this CPU runs no avx512_* variant; it can run: " +
                                 runnable_names(cpu));
    }
    const Row* last = nullptr;
    for (const Row& row : kRows) last = row.emulated ? last : &row;
    return Status::unsupported("kt-kernel needs a CPU with AVX2" +
                               (last ? "; this one lacks: " + feature_names(last->needs & ~cpu) : std::string()) +
                               (find("emu") ? ". To run anyway, slowly, set KT_KERNEL_CPU_VARIANT=emu" : ""));
  }

  const Row* row = find(name);
  if (!row) {
    return Status::invalid("KT_KERNEL_CPU_VARIANT=" + std::string(forced) + " is no variant of this build; known: " +
                           all_names() + "; this CPU can run: " + runnable_names(cpu));
  }
  if (!runs(*row)) {
    return Status::unsupported("KT_KERNEL_CPU_VARIANT=" + std::string(forced) + ": this CPU lacks " +
                               feature_names(row->needs & ~cpu) + "; it can run: " + runnable_names(cpu));
  }
  *out = row;
  return Status::ok();
}

std::atomic<const IsaTable*> g_active{nullptr};

}  // namespace

std::vector<VariantInfo> variants(FeatureSet cpu) {
  std::vector<VariantInfo> list;
  for (const Row& row : kRows) {
    const FeatureSet missing = row.needs & ~cpu;
    list.push_back({row.name, row.emulated, row.needs, missing == 0,
                    missing ? "this CPU lacks " + feature_names(missing) : std::string()});
  }
  return list;
}

Status choose(const char* forced, FeatureSet cpu, const char** name) {
  const Row* row = nullptr;
  KT_RETURN_IF_ERROR(choose_row(forced, cpu, &row));
  *name = row->name;
  return Status::ok();
}

Status select(const char* forced, const IsaTable** out) {
  FeatureSet cpu = cpu_features();
  const Row* row = nullptr;
  KT_RETURN_IF_ERROR(choose_row(forced, cpu, &row));
  if (row->needs & kTileFeatures) {
    Status permission = request_tile_permission();
    if (!permission.is_ok()) {
      cpu &= ~kTileFeatures;
      if (forced && *forced) {
        return Status::unsupported("KT_KERNEL_CPU_VARIANT=" + std::string(forced) + ": " + permission.message() +
                                   "; this CPU can run: " + runnable_names(cpu));
      }
      KT_RETURN_IF_ERROR(choose_row(nullptr, cpu, &row));
    }
  }
  *out = row->table();
  return Status::ok();
}

void set_active(const IsaTable* table) { g_active.store(table, std::memory_order_release); }
const IsaTable* active() { return g_active.load(std::memory_order_acquire); }

}  // namespace kt
