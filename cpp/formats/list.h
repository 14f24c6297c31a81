// The one list of weight formats. A row gives the enum value, the name users and files see, and the tests.
#pragma once

namespace kt {

// KT_FORMATS(X): X(name). Each name has a header formats/<name>.h with its layout.
#define KT_FORMATS(X) X(bf16) X(int8) X(int4) X(int4g)

enum class Format : int {
#define KT_FORMAT_ENUM(name) name,
  KT_FORMATS(KT_FORMAT_ENUM)
#undef KT_FORMAT_ENUM
};

#define KT_FORMAT_COUNT(name) +1
constexpr int kFormatCount = 0 KT_FORMATS(KT_FORMAT_COUNT);
#undef KT_FORMAT_COUNT

}  // namespace kt
