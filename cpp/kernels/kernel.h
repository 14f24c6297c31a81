// Placeholder: the contract between the ISA objects and the rest.
#pragma once

namespace kt {

struct IsaTable {
  const char* name;
};

}  // namespace kt
