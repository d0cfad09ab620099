// What vectorised loops over logits share: tiles of floats, and arithmetic that gcc turns into vector instructions.
#pragma once

#include <algorithm>

#include "common.h"

namespace specdec {

constexpr int64_t kTile = 1024;  // floats; a tile stays in the L1 cache between two loops over it
constexpr int kLanes = 64;       // running values a tile; the result does not depend on the machine's vector width

// Asks for the floats that a loop over tiles comes to 2 KB after `x`: the machine's own prefetching ends at each page. What
// lies behind the last row is not read.
template <int kFloats>
SPECDEC_INLINE void prefetch(const float* x) {
  for (int i = 0; i < kFloats; i += 16) __builtin_prefetch(x + 512 + i);
}

inline float smaller(float a, float b) { return a < b ? a : b; }

// a * b + c with one rounding where vectors have that; elsewhere with two, since calling libm would cost far more.
#if (defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)) || defined(__FMA__) || defined(__ARM_FEATURE_FMA)
inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
inline float fused(float a, float b, float c) { return a * b + c; }
#endif

// e^x for x <= 80, within 2e-7 of it; below -86 a number near 1e-38 instead. 2^n by the exponent's bits, 2^f by a
// polynomial (minimax on [-1/2, 1/2], relative).
inline float exponential(float x) {
  constexpr float kLog2e = 1.44269504f, kRound = 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
  x = x < -86.0f ? -86.0f : x;
  const float shifted = fused(x, kLog2e, kRound);
  const float f = fused(x, kLog2e, kRound - shifted);
  float p = fused(0.00132647273f, f, 0.00967151299f);
  p = fused(p, f, 0.0555073358f);
  p = fused(p, f, 0.240222424f);
  p = fused(p, f, 0.693147004f);
  p = fused(p, f, 1.0f);
  uint32_t power, exponent;
  std::memcpy(&power, &p, sizeof power);
  std::memcpy(&exponent, &shifted, sizeof exponent);
  return from_bits(power + (exponent << 23));
}

SPECDEC_CLONES static void widen(float* tile, const Float16* x, int64_t held) {
  for (int64_t i = 0; i < held; ++i) tile[i] = x[i];
}

SPECDEC_CLONES static void widen(float* tile, const BFloat16* x, int64_t held) {
  for (int64_t i = 0; i < held; ++i) tile[i] = x[i];
}

inline void widen(float* tile, const float* x, int64_t held) { std::memcpy(tile, x, held * sizeof *x); }

inline const float* as_floats(const float* x) { return x; }
template <typename T>
const float* as_floats(const T*) {
  return nullptr;
}

// The tile that starts at `x`, as floats; what the row lacks (`held` < kTile) is -inf. `buffer` holds kTile floats.
template <typename T>
const float* tile_at(const T* x, int64_t held, float* buffer) {
  if (held == kTile && as_floats(x)) return as_floats(x);
  widen(buffer, x, held);
  std::fill(buffer + held, buffer + kTile, -kInfinity);
  return buffer;
}

}  // namespace specdec
