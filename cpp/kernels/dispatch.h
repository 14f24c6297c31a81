// Which row of cmake/isa.cmake computes: the best one the CPU can run, or the one that is asked for by name.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "cpu/features.h"

namespace kt {

struct IsaTable;  // kernels/kernel.h

struct VariantInfo {
  const char* name;
  bool emulated;
  FeatureSet needs;
  bool runnable;
  std::string reason;  // why not, when not runnable
};

// Every row of this build, best first, judged against a CPU.
std::vector<VariantInfo> variants(FeatureSet cpu = cpu_features());

// The row to use on a CPU. `forced` is a row name in any case, or "avx512" for the best avx512_* row that runs; null or
// empty means the best native row. An unknown name, or a row the CPU cannot run, is an error that names the way out.
Status choose(const char* forced, FeatureSet cpu, const char** name);

// choose() on this CPU, plus the permission that the tile registers need: without it amx is passed over, or is an error
// if it was asked for. Every table handed out can be run.
Status select(const char* forced, const IsaTable** out);

// The table of the process: set at import, read by everything that computes. Null before.
void set_active(const IsaTable* table);
const IsaTable* active();

}  // namespace kt
