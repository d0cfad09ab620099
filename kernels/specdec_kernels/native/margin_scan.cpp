#include <cmath>

#include "tile.h"

namespace specdec {
namespace {

struct Top {
  float first, sum;  // the largest; of e^(x - reference)
  bool ordered;      // no NaN
};

template <bool kSum>
inline __attribute__((always_inline)) void scan_tile(const float* x, float reference, Top& top) {
  float first[kLanes], sum[kLanes];
  int32_t unordered[kLanes];
  for (int i = 0; i < kLanes; ++i) first[i] = -kInfinity, sum[i] = 0, unordered[i] = 0;
  for (int start = 0; start < kTile; start += 4 * kLanes) {
    prefetch<4 * kLanes>(x + start);
    for (int i = 0; i < kLanes; ++i) {
      const float a = x[start + i], b = x[start + kLanes + i];
      const float c = x[start + 2 * kLanes + i], d = x[start + 3 * kLanes + i];
      first[i] = larger(first[i], larger(larger(a, b), larger(c, d)));
      unordered[i] |= (__builtin_isunordered(a, b) ? -1 : 0) | (__builtin_isunordered(c, d) ? -1 : 0);
      if (kSum)
        sum[i] += (exponential(a - reference) + exponential(b - reference)) +
                  (exponential(c - reference) + exponential(d - reference));
    }
  }
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) {
      first[i] = larger(first[i], first[i + half]);
      sum[i] += sum[i + half];
      unordered[i] |= unordered[i + half];
    }
  }
  top = {first[0], sum[0], unordered[0] == 0};
}

SPECDEC_CLONES void scan(const float* x, Top& top) { scan_tile<false>(x, 0, top); }
SPECDEC_CLONES void scan_and_sum(const float* x, float reference, Top& top) { scan_tile<true>(x, reference, top); }

// The second largest of a tile without a NaN, which few tiles are asked for.
SPECDEC_CLONES void find_second(const float* x, float& out) {
  float first[kLanes], second[kLanes];
  for (int i = 0; i < kLanes; ++i) first[i] = second[i] = -kInfinity;
  for (int start = 0; start < kTile; start += kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      second[i] = larger(second[i], smaller(first[i], x[start + i]));
      first[i] = larger(first[i], x[start + i]);
    }
  }
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) {
      second[i] = larger(larger(second[i], second[i + half]), smaller(first[i], first[i + half]));
      first[i] = larger(first[i], first[i + half]);
    }
  }
  out = second[0];
}

// token and values[0..5] at a distance of `rows`: top1, top2, logsumexp, probability, margin, logit margin.
template <typename T>
void scan_row(int64_t* token, float* values, int64_t rows, const T* x, int64_t vocab, bool normalise) {
  alignas(64) float buffer[kTile];
  float best = -kInfinity, second = -kInfinity, reference = 0;
  double sum = 0;  // of e^(x - reference); the tiles' own sums are floats
  int64_t place = 0;
  Top top{};
  for (int64_t start = 0; start < vocab; start += kTile) {
    const float* tile = tile_at(x + start, std::min(kTile, vocab - start), buffer);
    normalise ? scan_and_sum(tile, reference, top) : scan(tile, top);
    if (!top.ordered || top.first == kInfinity) break;
    if (normalise && top.first > -kInfinity && (best == -kInfinity || top.first > reference + 10)) {
      sum *= best == -kInfinity ? 0 : std::exp(static_cast<double>(reference) - top.first);
      reference = top.first;
      scan_and_sum(tile, reference, top);
    }
    sum += top.sum;
    if (top.first > best) {
      float next;
      find_second(tile, next);
      second = larger(best, next);
      best = top.first;
      place = start;
    } else {
      second = larger(second, top.first);
    }
  }
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  float* out[6];
  for (int i = 0; i < 6; ++i) out[i] = values + i * rows, *out[i] = kNan;
  *token = -1;
  *out[4] = *out[5] = 0;
  if (!top.ordered || top.first == kInfinity || best == -kInfinity) return;
  while (x[place] != best) ++place;
  *token = place;
  *out[0] = best;
  *out[1] = second;
  *out[5] = best - second;
  *out[4] = kNan;
  if (!normalise) return;
  sum *= std::exp(static_cast<double>(reference) - best);
  *out[2] = static_cast<float>(best + std::log(sum));
  *out[3] = static_cast<float>(1 / sum);
  *out[4] = static_cast<float>(-std::expm1(static_cast<double>(second) - best) / sum);
}

}  // namespace
}  // namespace specdec

extern "C" int specdec_cpu_margin_scan(int64_t* token, float* values, const void* logits, int64_t dtype, int64_t rows,
                                       int64_t nodes, int64_t vocab, int64_t stride_row, int64_t stride_node,
                                       int64_t normalise) {
  if (rows < 0 || nodes < 0 || vocab < 1) return SPECDEC_INVALID;
  return specdec::visit(dtype, logits, [&](const auto* x) {
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t node = 0; node < nodes; ++node, ++token, ++values)
        specdec::scan_row(token, values, rows * nodes, x + row * stride_row + node * stride_node, vocab,
                          normalise != 0);
    return SPECDEC_OK;
  });
}
