// Philox 4x32-10 and the Gumbel noise made from it: the same 32-bit words and the same floats as in reference.py.
#pragma once

#include <cmath>

#include "common.h"

namespace specdec {

// Words of `kBlocks` counters (position, stream, first + i, 0): words[j * kBlocks + i] belongs to token 4 (first + i) + j.
template <int kBlocks>
inline __attribute__((always_inline)) void philox(uint32_t* words, uint64_t key, uint32_t position, uint32_t stream,
                                                  uint32_t first) {
  for (int i = 0; i < kBlocks; ++i) {
    uint32_t a = position, b = stream, c = first + static_cast<uint32_t>(i), d = 0;
    uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const uint64_t x = uint64_t{0xD2511F53} * a, y = uint64_t{0xCD9E8D57} * c;
      a = static_cast<uint32_t>(y >> 32) ^ b ^ low;
      b = static_cast<uint32_t>(y);
      c = static_cast<uint32_t>(x >> 32) ^ d ^ high;
      d = static_cast<uint32_t>(x);
      low += 0x9E3779B9;
      high += 0xBB67AE85;
    }
    words[i] = a, words[kBlocks + i] = b, words[2 * kBlocks + i] = c, words[3 * kBlocks + i] = d;
  }
}

// -log(-log(1 - v)), a multiple of 2^-20: see reference.gumbel.
inline float gumbel(uint32_t word) {
  constexpr double kRound = 1.5 * (uint64_t{1} << 32);
  const float v = (static_cast<float>(word) + 0.5f) * 0x1p-32f;
  const double noise = -std::log(-std::log(1.0 - static_cast<double>(v < 1.0f ? v : 1.0f - 0x1p-24f)));
  return static_cast<float>((noise + kRound) - kRound);
}

// At least that noise, for a few instructions: -log(-log(1 - v)) <= -log(v), and the bits of a float are nearly its log2.
inline float gumbel_bound(uint32_t word) {
  const float v = static_cast<float>(static_cast<int32_t>(word >> 1));
  int32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return 109.5176f - static_cast<float>(bits) * (0.693147181f * 0x1p-23f);  // log(2) * 158, and 1e-4 for roundings
}

}  // namespace specdec
