#include "tile.h"
#include "philox.h"

namespace specdec {
namespace {

constexpr float kMostNoise = 22.9f;  // of the word 0: 33 log(2) = 22.874
constexpr int kPiece = 128;          // tokens whose noise is made together

struct Largest {
  float value;
  bool ordered;  // no NaN
};

template <int kSize>
inline __attribute__((always_inline)) Largest largest(const float* x) {
  float value[kLanes];
  int32_t unordered[kLanes];
  for (int i = 0; i < kLanes; ++i) value[i] = -kInfinity, unordered[i] = 0;
  for (int start = 0; start < kSize; start += 2 * kLanes) {
    if (kSize == kTile) prefetch<2 * kLanes>(x + start);
    for (int i = 0; i < kLanes; ++i) {
      const float a = x[start + i], b = x[start + kLanes + i];
      value[i] = larger(value[i], larger(a, b));
      unordered[i] |= __builtin_isunordered(a, b) ? -1 : 0;
    }
  }
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) {
      value[i] = larger(value[i], value[i + half]);
      unordered[i] |= unordered[i + half];
    }
  }
  return {value[0], unordered[0] == 0};
}

SPECDEC_CLONES void largest_of_tile(const float* x, Largest& out) { out = largest<kTile>(x); }

// The words of a piece, and what each token can come to at most. False if nothing can come to more than `best`.
SPECDEC_CLONES bool bound(float* upper, uint32_t* words, const float* x, float best, uint64_t key, uint32_t position,
                          uint32_t stream, uint32_t first) {
  if (largest<kPiece>(x).value + kMostNoise <= best) return false;
  constexpr int kBlocks = kPiece / 4;
  philox<kBlocks>(words, key, position, stream, first);
  for (int i = 0; i < kBlocks; ++i)
    for (int j = 0; j < 4; ++j) upper[4 * i + j] = x[4 * i + j] + gumbel_bound(words[j * kBlocks + i]);
  return largest<kPiece>(upper).value > best;
}

template <typename T>
int64_t greedy(const T* x, int64_t vocab) {
  alignas(64) float buffer[kTile];
  float best = -kInfinity;
  int64_t token = -1;
  for (int64_t start = 0; start < vocab; start += kTile) {
    Largest found;
    largest_of_tile(tile_at(x + start, std::min(kTile, vocab - start), buffer), found);
    if (!found.ordered || found.value == kInfinity) return -1;
    if (found.value > best) best = found.value, token = start;
  }
  if (token >= 0)
    while (x[token] != best) ++token;
  return token;
}

template <typename T>
int64_t sample(const T* x, int64_t vocab, uint64_t key, uint32_t stream, uint32_t position) {
  alignas(64) float buffer[kTile], upper[kPiece];
  alignas(64) uint32_t words[kPiece];
  float best = -kInfinity;
  int64_t token = -1;
  for (int64_t start = 0; start < vocab; start += kTile) {
    const int64_t held = std::min(kTile, vocab - start);
    const float* tile = tile_at(x + start, held, buffer);
    Largest found;
    largest_of_tile(tile, found);
    if (!found.ordered || found.value == kInfinity) return -1;
    // where nothing can win, as in most of the vocabulary after top-p, no noise is made
    if (found.value + kMostNoise <= best) continue;
    for (int64_t piece = 0; piece < held; piece += kPiece) {
      const float* values = tile + piece;
      const uint32_t first = static_cast<uint32_t>((start + piece) / 4);
      if (!bound(upper, words, values, best, key, position, stream, first)) continue;
      for (int i = 0; i < kPiece; ++i) {
        if (!(upper[i] > best)) continue;
        const float value = values[i] + gumbel(words[i % 4 * (kPiece / 4) + i / 4]);
        if (value > best) best = value, token = start + piece + i;
      }
    }
  }
  return token;
}

}  // namespace
}  // namespace specdec

extern "C" int specdec_cpu_sample_tokens(int64_t* token, const void* logits, int64_t dtype, const int64_t* seeds,
                                         int64_t stream, const int64_t* positions, int64_t rows, int64_t nodes,
                                         int64_t vocab, int64_t stride_row, int64_t stride_node) {
  if (rows < 0 || nodes < 0 || vocab < 1) return SPECDEC_INVALID;
  return specdec::visit(dtype, logits, [&](const auto* x) {
    for (int64_t i = 0; i < rows * nodes; ++i) {
      const auto* row = x + i / nodes * stride_row + i % nodes * stride_node;
      token[i] = seeds ? specdec::sample(row, vocab, static_cast<uint64_t>(seeds[i / nodes]),
                                         static_cast<uint32_t>(stream), static_cast<uint32_t>(positions[i]))
                       : specdec::greedy(row, vocab);
    }
    return SPECDEC_OK;
  });
}

extern "C" int specdec_cpu_gumbel(float* noise, float* bound, const int64_t* words, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    noise[i] = specdec::gumbel(static_cast<uint32_t>(words[i]));
    bound[i] = specdec::gumbel_bound(static_cast<uint32_t>(words[i]));
  }
  return SPECDEC_OK;
}
