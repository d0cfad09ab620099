#include <cmath>

#include "common.h"

namespace {

constexpr double kUnit = 17592186044416.0;  // 2^44

inline double left(const float* p, const float* q, float c, int64_t token) {  // max(p - c q, 0); NaN stays NaN
  const double value = double{p[token]} - double{c} * double{q[token]};
  return value <= 0.0 ? 0.0 : value;
}

inline double term(const float* p, const float* q, float c, int64_t token) {
  const double value = left(p, q, c, token);
  return std::floor((value > 1.0 ? 1.0 : value) * kUnit) * (1.0 / kUnit);
}

SPECDEC_CLONES double mass(const float* p, const float* q, float c, int64_t vocab) {
  double sums[16] = {};  // whole multiples of 2^-44: exact, so their order does not matter
  int64_t token = 0;
  for (; token + 16 <= vocab; token += 16) {
    for (int64_t lane = 0; lane < 16; ++lane) sums[lane] += term(p, q, c, token + lane);
  }
  for (; token < vocab; ++token) sums[0] += term(p, q, c, token);
  double total = 0.0;
  for (double sum : sums) total += sum;
  return total;
}

// The first token at which the mass cumulated from the lowest on exceeds draw * total.
int64_t draw_from(const float* p, const float* q, float c, int64_t vocab, double draw) {
  double total = mass(p, q, c, vocab);
  if (total == 0.0) total = mass(p, q, c = 0.0f, vocab);
  if (!(total > 0.0)) return -1;
  const double threshold = draw * total;
  constexpr int64_t kChunk = 4096;
  double before = 0.0;
  for (int64_t first = 0; first < vocab; first += kChunk) {
    const int64_t size = vocab - first < kChunk ? vocab - first : kChunk;
    const double inside = mass(p + first, q + first, c, size);
    if (before + inside > threshold) {
      for (int64_t token = first; token < first + size; ++token) {
        before += term(p, q, c, token);
        if (before > threshold) return token;
      }
    }
    before += inside;
  }
  return -1;
}

}  // namespace

extern "C" int specdec_cpu_rejection_walk(int64_t* path, int64_t* length, int64_t* bonus, const int64_t* tokens,
                                          const int64_t* parents, const int64_t* count, const float* p, const float* q,
                                          const double* coins, const double* draw, int64_t rows, int64_t nodes,
                                          int64_t vocab, int64_t stride_p_row, int64_t stride_p_node,
                                          int64_t stride_q_row, int64_t stride_q_node, int64_t replacement) {
  if (rows < 0 || nodes < 1 || vocab < 1) return SPECDEC_INVALID;
  for (int64_t row = 0; row < rows; ++row, tokens += nodes, parents += nodes, coins += nodes, path += nodes - 1) {
    int64_t node = 0, steps = 0;
    float c = 0.0f;
    double left_mass = 1.0, draft_mass = 1.0;
    const float* node_p = p + row * stride_p_row;
    const float* node_q = q + row * stride_q_row;
    // parents come before their children, so one pass meets every child after the node that it belongs to
    for (int64_t child = 1; child < count[row] && child < nodes; ++child) {
      const int64_t token = tokens[child];
      if (parents[child] != node || token < 0 || token >= vocab) continue;
      const double drafted = node_q[token];
      if (coins[child] * left_mass * drafted < left(node_p, node_q, c, token) * draft_mass) {
        path[steps++] = node = child;
        node_p = p + row * stride_p_row + node * stride_p_node;
        node_q = q + row * stride_q_row + node * stride_q_node;
        c = 0.0f;
        left_mass = draft_mass = 1.0;
      } else {
        c = static_cast<float>(c + left_mass / draft_mass);
        left_mass = mass(node_p, node_q, c, vocab);
        if (!replacement) draft_mass = draft_mass - drafted < 1.0 / kUnit ? 1.0 / kUnit : draft_mass - drafted;
      }
    }
    length[row] = steps;
    bonus[row] = draw_from(node_p, node_q, c, vocab, draw[row]);
    while (steps < nodes - 1) path[steps++] = -1;
  }
  return SPECDEC_OK;
}
