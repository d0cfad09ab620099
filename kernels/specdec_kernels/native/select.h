// The best entries of rows of logits, for the ops that rank tokens: one pass that looks at blocks by their maximum.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>

#include "common.h"

namespace specdec {

constexpr int64_t kBlock = 256;  // elements that one maximum stands for
constexpr int64_t kLanes = 32;   // independent maxima and sums, the same on every machine: results are too
constexpr int64_t kTops = 1024;  // blocks whose maxima are kept between two passes
constexpr int64_t kMaxWidth = 256;

// A larger key is better: score descending, then index ascending. No two entries of a pool have the same.
inline uint64_t to_key(float score, int64_t index) {
  uint32_t bits;
  std::memcpy(&bits, &score, sizeof bits);
  bits ^= bits >> 31 ? 0xFFFFFFFF : 0x80000000;  // the same order as the floats
  return static_cast<uint64_t>(bits) << 32 | (0xFFFFFFFF - static_cast<uint32_t>(index));
}
inline int64_t index_of(uint64_t key) { return 0xFFFFFFFF - static_cast<uint32_t>(key); }
inline float score_of(uint64_t key) {
  const uint32_t bits = static_cast<uint32_t>(key >> 32);
  return from_bits(bits ^ (bits >> 31 ? 0x80000000 : 0xFFFFFFFF));
}

// log-softmax of a row is (x - maximum) - log_sum, in this order, as torch computes it.
struct Normaliser {
  float maximum, log_sum;
};

// The best `width` entries among those offered, and the bound below which an entry need not be offered.
class Best {
 public:
  Best(int64_t width, float log_mu) : width_(width), log_mu_(log_mu) {}

  float bound() const { return bound_; }

  // There is an entry of this score: what is below mu times the best will not be kept.
  void saw(float score) {
    best_ = std::max(best_, score);
    bound_ = std::max(bound_, best_ + log_mu_);
  }

  // Entries come by ascending index, so one that equals the last of `width` others is behind it.
  void offer(float score, int64_t index) {
    keys_[size_++] = to_key(score, index);
    if (size_ == 2 * kMaxWidth || size_ == 2 * width_ + 8) {
      cut();
      bound_ = std::max(bound_, std::nextafter(score_of(keys_[width_ - 1]), kInfinity));
    }
  }

  // Sorts what passed the gate; returns how many of `width` that is.
  int64_t finish() {
    if (size_ > width_) cut();
    std::sort(keys_, keys_ + size_, std::greater<>());
    while (size_ && !(score_of(keys_[size_ - 1]) >= best_ + log_mu_)) --size_;
    return size_;
  }

  uint64_t key(int64_t rank) const { return keys_[rank]; }

 private:
  void cut() {
    std::nth_element(keys_, keys_ + width_ - 1, keys_ + size_, std::greater<>());
    size_ = width_;
  }

  uint64_t keys_[2 * kMaxWidth];
  int64_t size_ = 0, width_;
  float log_mu_, best_ = -kInfinity, bound_ = std::numeric_limits<float>::lowest();  // -inf is never kept
};

// `count` elements as a whole block of floats, filled up with -inf; fp32 is read in place.
template <typename T>
SPECDEC_INLINE const float* load_block(const T* data, int64_t count, float* buffer) {
  if constexpr (std::is_same_v<T, float>) {
    if (count >= kBlock) return data;
  }
  if (count >= kBlock) {
    for (int64_t i = 0; i < kBlock; ++i) buffer[i] = data[i];
  } else {
    for (int64_t i = 0; i < kBlock; ++i) buffer[i] = i < count ? static_cast<float>(data[i]) : -kInfinity;
  }
  return buffer;
}

// Reduces a block by halves; widths are constants, so that each step becomes a few vector operations.
template <typename Combine>
SPECDEC_INLINE float fold(float* x, Combine combine) {
  for (int64_t j = 0; j < 128; ++j) x[j] = combine(x[j], x[j + 128]);
  for (int64_t j = 0; j < 64; ++j) x[j] = combine(x[j], x[j + 64]);
  for (int64_t j = 0; j < 32; ++j) x[j] = combine(x[j], x[j + 32]);
  for (int64_t j = 0; j < 16; ++j) x[j] = combine(x[j], x[j + 16]);
  for (int64_t j = 0; j < 8; ++j) x[j] = combine(x[j], x[j + 8]);
  for (int64_t j = 0; j < 4; ++j) x[j] = combine(x[j], x[j + 4]);
  return combine(combine(x[0], x[1]), combine(x[2], x[3]));
}

SPECDEC_INLINE float maximum_of(const float* x) {
  float lane[kLanes];
  for (int64_t j = 0; j < kLanes; ++j) {
    float m = -kInfinity;
    for (int64_t i = 0; i < kBlock; i += kLanes) m = larger(x[i + j], m);
    lane[j] = m;
  }
  for (int64_t half = kLanes / 2; half; half /= 2)
    for (int64_t j = 0; j < half; ++j) lane[j] = larger(lane[j + half], lane[j]);
  return lane[0];
}

// exp(x) for x <= 0, relative error 2.1e-7; 1.6e-38 below -87, NaN for NaN. No fused products: the same on every machine.
SPECDEC_INLINE float exp_nonpositive(float x) {
  x = -87.0f > x ? -87.0f : x;
  const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the low bits are x / ln 2, rounded
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // ln 2 in two parts, the first product exact
  const float r2 = r * r;
  const float high = (8.29030667e-3f * r + 4.18979749e-2f) * r2 + (1.66676372e-1f * r + 4.99991506e-1f);
  const float y = high * r2 + (9.99999702e-1f * r + 1.0f);
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  return y * from_bits((bits << 23) + 0x3F800000);
}

SPECDEC_INLINE float sum_of_exp(const float* x, float shift) {
  float lane[kBlock];
  for (int64_t j = 0; j < kBlock; ++j) lane[j] = exp_nonpositive(x[j] - shift);
  return fold(lane, [](float a, float b) { return a + b; });
}

// Leaves the maximum of each block in `tops`. log_sum is NaN for a row with a NaN or without a finite maximum, and so is
// then every score of the row.
template <typename T>
SPECDEC_INLINE Normaliser normalise(const T* row, int64_t vocab, float* tops) {
  float buffer[kBlock];
  float maximum = -kInfinity;
  double sum = 0.0;
  for (int64_t start = 0; start < vocab; start += kBlock) {
    const float* x = load_block(row + start, vocab - start, buffer);
    const float top = maximum_of(x);
    if (top > maximum) {
      sum *= std::exp(static_cast<double>(maximum) - top);
      maximum = top;
    }
    sum += sum_of_exp(x, maximum == -kInfinity ? 0.0f : maximum);  // a NaN counts, wherever it is
    if (tops) tops[start / kBlock] = top;
  }
  if (!std::isfinite(maximum)) sum = std::numeric_limits<double>::quiet_NaN();
  return {maximum, static_cast<float>(std::log(sum))};
}

SPECDEC_INLINE float score(float x, Normaliser by, float parent) {
  return (((x - by.maximum) - by.log_sum) + parent) + 0.0f;  // + 0.0 makes -0.0 equal to 0.0
}

// Offers the entries of a row; its first has the index `offset`. `tops` as `normalise` left them, or null.
template <typename T>
SPECDEC_INLINE void scan(Best& best, const T* row, int64_t vocab, Normaliser by, float parent, int64_t offset,
                         const float* tops) {
  float buffer[kBlock];
  uint8_t hit[kBlock];
  for (int64_t start = 0; start < vocab; start += kBlock) {
    const float x_top = tops ? tops[start / kBlock] : maximum_of(load_block(row + start, vocab - start, buffer));
    const float top = score(x_top, by, parent);  // rounding keeps the order
    if (!(top >= best.bound())) continue;
    best.saw(top);
    const float bound = best.bound();
    const float* x = load_block(row + start, vocab - start, buffer);
    for (int64_t i = 0; i < kBlock; ++i) hit[i] = score(x[i], by, parent) >= bound;
    for (int64_t i = 0; i < kBlock; i += 8) {
      uint64_t any;
      std::memcpy(&any, hit + i, sizeof any);
      if (!any) continue;
      for (int64_t j = i; j < i + 8; ++j)
        if (hit[j]) best.offer(score(x[j], by, parent), offset + start + j);
    }
  }
}

}  // namespace specdec
