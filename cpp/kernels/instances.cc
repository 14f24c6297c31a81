// Placeholder: compiled once per row of cmake/isa.cmake; exports one symbol.
#include "kernels/kernel.h"

#define KT_CONCAT_(a, b) a##b
#define KT_CONCAT(a, b)  KT_CONCAT_(a, b)

namespace {
constexpr kt::IsaTable kTable = {KT_ISA_NAME};
}  // namespace

extern "C" __attribute__((visibility("hidden"))) const kt::IsaTable* KT_CONCAT(kt_isa_, KT_ISA)();
extern "C" const kt::IsaTable* KT_CONCAT(kt_isa_, KT_ISA)() { return &kTable; }
