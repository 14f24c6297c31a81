// Raw blocks of GGUF, for the kernels: no std:: templates here.
#pragma once

#include <cstdint>

#include "formats/list.h"

namespace kt {

// 16 blocks of a raw format, row after row, to a block of kExpanded, or, without mins, of kSigned16. Tables are made by
// the first call.
void expand_raw(Format format, const uint8_t* blocks, bool without_mins, uint8_t* out);

}  // namespace kt
