// The one list of weight formats. A row gives the enum value, the name users and files see, and the tests.
#pragma once

namespace kt {

// KT_FORMATS(X): X(name). The first four are made by quantising bf16 weights (formats/<name>.h); the others hold the
// codes and scales of a checkpoint as they are (formats/grouped.h).
#define KT_FORMATS(X) X(bf16) X(int8) X(int4) X(int4g) X(fp8) X(fp8c) X(mxfp8) X(mxfp4) X(nvfp4) X(rawint4) X(int4z)

enum class Format : int {
#define KT_FORMAT_ENUM(name) name,
  KT_FORMATS(KT_FORMAT_ENUM)
#undef KT_FORMAT_ENUM
};

#define KT_FORMAT_COUNT(name) +1
constexpr int kFormatCount = 0 KT_FORMATS(KT_FORMAT_COUNT);
#undef KT_FORMAT_COUNT

}  // namespace kt
