#include "select.h"

namespace specdec {
namespace {

template <typename T>
SPECDEC_INLINE void gate_row(Best& best, const T* logits, const float* parent_scores, bool normalized, int64_t parents,
                             int64_t vocab) {
  float tops[kTops];
  float* held = vocab <= kTops * kBlock ? tops : nullptr;
  for (int64_t parent = 0; parent < parents; ++parent, logits += vocab) {
    if (!(parent_scores[parent] > -kInfinity)) continue;
    const Normaliser by = normalized ? Normaliser{0.0f, 0.0f} : normalise(logits, vocab, held);
    scan(best, logits, vocab, by, parent_scores[parent], parent * vocab, normalized ? nullptr : held);
  }
}

// one body, three types: a template cannot be compiled for several vector widths
SPECDEC_CLONES void gate(Best& b, const float* x, const float* s, bool n, int64_t p, int64_t v) {
  gate_row(b, x, s, n, p, v);
}
SPECDEC_CLONES void gate(Best& b, const Float16* x, const float* s, bool n, int64_t p, int64_t v) {
  gate_row(b, x, s, n, p, v);
}
SPECDEC_CLONES void gate(Best& b, const BFloat16* x, const float* s, bool n, int64_t p, int64_t v) {
  gate_row(b, x, s, n, p, v);
}

}  // namespace
}  // namespace specdec

extern "C" int specdec_cpu_confidence_gate(int64_t* parent, int64_t* token, float* score, int64_t* count,
                                           const void* logits, const float* parent_scores, const int64_t* budget,
                                           int64_t dtype, double mu, int64_t normalized, int64_t rows, int64_t parents,
                                           int64_t vocab, int64_t width) {
  using namespace specdec;
  if (rows < 0 || parents < 1 || vocab < 1 || width < 1 || width > kMaxWidth || !(mu >= 0 && mu <= 1)) {
    return SPECDEC_INVALID;
  }
  if (vocab > (int64_t{1} << 31) / parents || width > parents * vocab) return SPECDEC_INVALID;
  const float log_mu = static_cast<float>(std::log(mu));
  return visit(dtype, logits, [&](const auto* x) -> int {
    for (int64_t row = 0; row < rows; ++row) {
      Best best(width, log_mu);
      gate(best, x + row * parents * vocab, parent_scores + row * parents, normalized != 0, parents, vocab);
      const int64_t kept = std::min(best.finish(), std::max<int64_t>(budget[row], 0));
      for (int64_t i = 0; i < width; ++i, ++parent, ++token, ++score) {
        const int64_t index = i < kept ? index_of(best.key(i)) : 0;
        *parent = index / vocab;
        *token = index % vocab;
        *score = i < kept ? score_of(best.key(i)) : -kInfinity;
      }
      count[row] = kept;
    }
    return SPECDEC_OK;
  });
}
