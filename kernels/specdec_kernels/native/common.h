// What the native ops share: reading bf16, fp16 and fp32 as float, and one build for several vector widths.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "specdec_cpu.h"

// One function, compiled for AVX-512, for AVX2 and for any x86-64; the loader picks. Elsewhere the compiler's default.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SPECDEC_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SPECDEC_CLONES
#endif

// For what is inlined into functions that are compiled for several vector widths.
#if defined(__GNUC__)
#define SPECDEC_INLINE inline __attribute__((always_inline))
#else
#define SPECDEC_INLINE inline
#endif

namespace specdec {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The second argument if either is NaN: the instruction's own rule, so no more than one instruction.
SPECDEC_INLINE float larger(float a, float b) { return a > b ? a : b; }

struct BFloat16 {
  uint16_t bits;
  operator float() const { return from_bits(static_cast<uint32_t>(bits) << 16); }
};

struct Float16 {
  uint16_t bits;
  operator float() const {  // shifts the exponent by a multiplication, so subnormals come out right
    const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7FFF) << 13;
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
    const float scaled = from_bits(magnitude) * from_bits(0x77800000);  // 2^112
    uint32_t out;
    std::memcpy(&out, &scaled, sizeof out);
    if (magnitude >= 0x0F800000) out = magnitude | 0x7F800000;  // infinity and NaN
    return from_bits(out | sign);
  }
};

// Calls `run` with a typed pointer: visit(dtype, data, [&](const auto* x) { ... }).
template <typename Run>
int visit(int64_t dtype, const void* data, Run run) {
  switch (dtype) {
    case SPECDEC_FLOAT32: return run(static_cast<const float*>(data));
    case SPECDEC_FLOAT16: return run(static_cast<const Float16*>(data));
    case SPECDEC_BFLOAT16: return run(static_cast<const BFloat16*>(data));
    default: return SPECDEC_INVALID;
  }
}

}  // namespace specdec
