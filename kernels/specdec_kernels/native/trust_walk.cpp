#include "common.h"

extern "C" int specdec_cpu_trust_walk(int64_t* path, int64_t* length, int64_t* bonus, int64_t* escalated,
                                      const int64_t* tokens, const int64_t* parents, const int64_t* count,
                                      const int64_t* chosen, const float* margins, int64_t rows, int64_t nodes,
                                      double threshold) {
  if (rows < 0 || nodes < 1) return SPECDEC_INVALID;
  for (int64_t row = 0; row < rows; ++row) {
    const auto trusted = [&](int64_t node) {
      return chosen[node] >= 0 && margins[node] >= static_cast<float>(threshold) &&
             margins[node] < specdec::kInfinity;
    };
    int64_t node = 0, steps = 0;
    for (int64_t child = 1; child < count[row] && child < nodes && trusted(node); ++child) {
      if (parents[child] != node || tokens[child] != chosen[node]) continue;
      node = child;
      path[steps++] = child;
    }
    length[row] = steps;
    bonus[row] = trusted(node) ? chosen[node] : -1;
    escalated[row] = trusted(node) ? -1 : node;
    while (steps < nodes - 1) path[steps++] = -1;
    tokens += nodes, parents += nodes, chosen += nodes, margins += nodes, path += nodes - 1;
  }
  return SPECDEC_OK;
}
