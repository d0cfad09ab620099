#include "select.h"

namespace specdec {
namespace {

template <typename T>
SPECDEC_INLINE void topk_row(Best& best, const T* row, int64_t vocab, float* logprobs, int64_t* token, int64_t k) {
  float tops[kTops];
  float* held = vocab <= kTops * kBlock ? tops : nullptr;
  const Normaliser by = normalise(row, vocab, held);
  scan(best, row, vocab, by, 0.0f, 0, held);
  const int64_t found = best.finish();
  for (int64_t i = 0; i < found; ++i) {
    logprobs[i] = score_of(best.key(i));
    token[i] = index_of(best.key(i));
  }
  // what has no probability comes last, by token id
  for (int64_t i = found, id = 0; i < k; ++id) {
    if (score(row[id], by, 0.0f) > -kInfinity) continue;
    logprobs[i] = -kInfinity;
    token[i++] = id;
  }
}

// one body, three types: a template cannot be compiled for several vector widths
SPECDEC_CLONES void topk(Best& b, const float* x, int64_t v, float* l, int64_t* t, int64_t k) {
  topk_row(b, x, v, l, t, k);
}
SPECDEC_CLONES void topk(Best& b, const Float16* x, int64_t v, float* l, int64_t* t, int64_t k) {
  topk_row(b, x, v, l, t, k);
}
SPECDEC_CLONES void topk(Best& b, const BFloat16* x, int64_t v, float* l, int64_t* t, int64_t k) {
  topk_row(b, x, v, l, t, k);
}

}  // namespace
}  // namespace specdec

extern "C" int specdec_cpu_topk_logprobs(float* logprobs, int64_t* token, const void* logits, int64_t dtype,
                                         int64_t rows, int64_t vocab, int64_t k) {
  using namespace specdec;
  if (rows < 0 || k < 1 || k > kMaxWidth || k > vocab || vocab > int64_t{1} << 31) return SPECDEC_INVALID;
  return visit(dtype, logits, [&](const auto* x) -> int {
    for (int64_t row = 0; row < rows; ++row) {
      Best best(k, -kInfinity);
      topk(best, x + row * vocab, vocab, logprobs + row * k, token + row * k, k);
    }
    return SPECDEC_OK;
  });
}
