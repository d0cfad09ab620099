// A TALON tree (arXiv 2601.07353, Algorithm 2) from a draft's logits, on the CPU: top-K at the root, then layer by layer
// the children whose path probability is at least mu times the best one's, until the budget is spent.
//
//     example_talon [first word]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "specdec_kernels.h"

namespace {

// The draft of this example: a table of what follows which word.
const char* const words[] = {"the", "sky", "sea", "is", "was", "blue", "grey", "deep", "and", "clear", "today", "."};
constexpr int64_t vocab = sizeof words / sizeof *words;

struct Follow {
  int word, next;
  float logit;
};
const Follow follows[] = {{0, 1, 5}, {0, 2, 4}, {1, 3, 6}, {1, 4, 3}, {2, 3, 4}, {2, 4, 4}, {3, 5, 5}, {3, 6, 4},
                          {3, 7, 2}, {3, 9, 3}, {4, 6, 5}, {4, 5, 3}, {4, 7, 3}, {5, 8, 4}, {5, 11, 4}, {5, 10, 3},
                          {6, 11, 5}, {6, 10, 4}, {7, 8, 4}, {7, 11, 5}, {8, 9, 5}, {8, 7, 4}, {8, 0, 3}, {9, 10, 4},
                          {9, 11, 5}, {10, 11, 7}, {11, 0, 6}};

void draft_forward(int64_t word, float* logits) {
  std::fill_n(logits, vocab, 0.0f);
  for (const Follow& follow : follows) {
    if (follow.word == word) logits[follow.next] = follow.logit;
  }
}

struct Node {
  int64_t token, parent;
  float score;  // log-probability of the path
};

void print(const std::vector<Node>& tree, int64_t parent, int depth) {
  for (int64_t node = 0; node < static_cast<int64_t>(tree.size()); ++node) {
    if (tree[node].parent != parent) continue;
    std::printf("%*s%-*s %.3f\n", 2 * depth, "", 24 - 2 * depth, words[tree[node].token], std::exp(tree[node].score));
    print(tree, node, depth + 1);
  }
}

[[noreturn]] void fail(int status) {
  std::fprintf(stderr, "%s\n", specdec_status_string(status));
  std::exit(1);
}

}  // namespace

int main(int count, char** arguments) {
  constexpr int64_t budget = 20, top_k = 4;
  constexpr double mu = 0.1;
  int64_t first = 0;
  for (int64_t word = 0; count > 1 && word < vocab; ++word) {
    if (std::strcmp(words[word], arguments[1]) == 0) first = word;
  }
  std::vector<Node> tree = {{first, -1, 0.0f}};

  std::vector<float> logits(vocab), scores(top_k);
  std::vector<int64_t> tokens(top_k), parents;
  draft_forward(first, logits.data());
  if (int status = specdec_cpu_topk_logprobs(scores.data(), tokens.data(), logits.data(), SPECDEC_FLOAT32, 1, vocab, top_k))
    fail(status);
  for (int64_t i = 0; i < top_k; ++i) tree.push_back({tokens[i], 0, scores[i]});

  // the gate's pool is one layer: the children of all nodes that the layer before it brought
  for (int64_t begin = 1; begin < static_cast<int64_t>(tree.size());) {
    const int64_t end = tree.size(), width = end - begin, left = budget - end;
    if (left <= 0) break;
    const int64_t columns = std::min(left, width * vocab);
    logits.resize(width * vocab);
    std::vector<float> parent_scores(width);
    for (int64_t i = 0; i < width; ++i) {
      draft_forward(tree[begin + i].token, &logits[i * vocab]);
      parent_scores[i] = tree[begin + i].score;
    }
    int64_t kept = 0;
    parents.resize(columns), tokens.resize(columns), scores.resize(columns);
    if (int status = specdec_cpu_confidence_gate(parents.data(), tokens.data(), scores.data(), &kept, logits.data(),
                                                 parent_scores.data(), &left, SPECDEC_FLOAT32, mu, 0, 1, width, vocab,
                                                 columns))
      fail(status);
    for (int64_t i = 0; i < kept; ++i) tree.push_back({tokens[i], begin + parents[i], scores[i]});
    begin = end;
  }
  print(tree, -1, 0);
  std::printf("%zu nodes\n", tree.size());
}
