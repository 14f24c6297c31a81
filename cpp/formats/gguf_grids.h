// Codebooks of the iq types: points of 8 or 4 levels, packed into 16 bits.
#pragma once

#include <cstdint>

namespace kt {

// 8 levels of 2 bits; level -> magnitude 8, 25, 43.
extern const uint16_t kIq2Xxs[256];
extern const uint16_t kIq2Xs[512];
extern const uint16_t kIq2S[1024];
// 4 levels of 3 bits; kIq3Xxs: magnitudes 4, 12, 20, 28, 36, 44, 52, 62; kIq3S: 1, 3, 5 .. 15.
extern const uint16_t kIq3Xxs[256];
extern const uint16_t kIq3S[512];
// 8 levels of 2 bits; level -> -1, 0, 1.
extern const uint16_t kIq1[2048];

}  // namespace kt
