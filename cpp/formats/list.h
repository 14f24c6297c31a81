// The one list of weight formats. A row gives the enum value, the name users and files see, and the tests.
#pragma once

namespace kt {

// KT_FORMATS(X): X(name). The first four are made by quantising bf16 weights (formats/<name>.h); the others hold the
// codes and scales of a file as they are (formats/grouped.h): of checkpoints, and of GGUF under the names of ggml.
// clang-format off
#define KT_FORMATS(X) \
  X(bf16) X(int8) X(int4) X(int4g) \
  X(fp8) X(fp8c) X(mxfp8) X(mxfp4) X(nvfp4) X(rawint4) X(int4z) \
  X(f32) X(f16) X(q4_0) X(q4_1) X(q5_0) X(q5_1) X(q8_0) X(q2_k) X(q3_k) X(q4_k) X(q5_k) X(q6_k) X(iq4_nl) X(iq4_xs) \
  X(tq2_0) X(tq1_0) X(iq1_s) X(iq1_m) X(iq2_xxs) X(iq2_xs) X(iq2_s) X(iq3_xxs) X(iq3_s)
// clang-format on

enum class Format : int {
#define KT_FORMAT_ENUM(name) name,
  KT_FORMATS(KT_FORMAT_ENUM)
#undef KT_FORMAT_ENUM
};

#define KT_FORMAT_COUNT(name) +1
constexpr int kFormatCount = 0 KT_FORMATS(KT_FORMAT_COUNT);
#undef KT_FORMAT_COUNT

}  // namespace kt
