#include "common.h"

extern "C" int specdec_cpu_verify_walk(int64_t* path, int64_t* length, int64_t* bonus, const int64_t* tokens,
                                       const int64_t* parents, const int64_t* count, const int64_t* chosen,
                                       int64_t rows, int64_t nodes) {
  if (rows < 0 || nodes < 1) return SPECDEC_INVALID;
  for (int64_t row = 0; row < rows; ++row, tokens += nodes, parents += nodes, chosen += nodes, path += nodes - 1) {
    int64_t node = 0, steps = 0;
    // parents come before their children, so one pass meets every child after the node that it belongs to
    for (int64_t child = 1; child < count[row] && child < nodes; ++child) {
      if (parents[child] != node || tokens[child] != chosen[node]) continue;
      node = child;
      path[steps++] = child;
    }
    length[row] = steps;
    bonus[row] = chosen[node];
    while (steps < nodes - 1) path[steps++] = -1;
  }
  return SPECDEC_OK;
}
