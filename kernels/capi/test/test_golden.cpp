// The CPU entry points against files that make_golden.py wrote from the reference.
//
// A file holds cases, each after a line "case <name>"; a line of a case is "<array>: <number> <number> ...". Integers
// have to be equal, floats within 1e-5 (the logsumexp's order of summation is free).
#include <cmath>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "specdec_kernels.h"

namespace {

class Case {
 public:
  std::string name;
  std::map<std::string, std::vector<double>> arrays;

  template <typename T = int64_t>
  std::vector<T> get(const std::string& array) const {
    const std::vector<double>& held = arrays.at(array);
    return {held.begin(), held.end()};
  }
  int64_t number(const std::string& array) const { return static_cast<int64_t>(arrays.at(array).at(0)); }

  template <typename T>
  void same(const std::string& array, const std::vector<T>& found) const {
    const std::vector<double>& expected = arrays.at(array);
    bool equal = found.size() == expected.size();
    for (size_t i = 0; equal && i < expected.size(); ++i) {
      const double a = static_cast<double>(found[i]), b = expected[i];
      equal = a == b || (std::isnan(a) && std::isnan(b)) ||
              (std::is_floating_point_v<T> && std::abs(a - b) <= 1e-5 * (1 + std::abs(b)));
    }
    if (equal) return;
    ++failures;
    std::cerr << name << ": " << array << " is";
    for (T value : found) std::cerr << ' ' << value;
    std::cerr << "; expected";
    for (double value : expected) std::cerr << ' ' << value;
    std::cerr << '\n';
  }
};

using Ints = std::vector<int64_t>;
using Floats = std::vector<float>;

struct Walk {
  Ints path, length, bonus;
  explicit Walk(int64_t rows, int64_t nodes) : path(rows * (nodes - 1)), length(rows), bonus(rows) {}
  void check(const Case& c) const {
    c.same("path", path);
    c.same("length", length);
    c.same("bonus", bonus);
  }
};

// Logits of the case's dtype: 16-bit ones are given as their bits.
struct Logits {
  Floats wide;
  std::vector<uint16_t> narrow;
  int64_t dtype;
  explicit Logits(const Case& c) : dtype(c.number("dtype")) {
    if (dtype == SPECDEC_FLOAT32) wide = c.get<float>("logits");
    else narrow = c.get<uint16_t>("logits");
  }
  const void* data() const { return dtype == SPECDEC_FLOAT32 ? static_cast<const void*>(wide.data()) : narrow.data(); }
};

void verify_walk(const Case& c) {
  const Ints tokens = c.get("tokens"), parents = c.get("parents"), count = c.get("count"), chosen = c.get("chosen");
  const int64_t rows = count.size(), nodes = tokens.size() / rows;
  Walk out(rows, nodes);
  CHECK_EQUAL(specdec_cpu_verify_walk(out.path.data(), out.length.data(), out.bonus.data(), tokens.data(),
                                      parents.data(), count.data(), chosen.data(), rows, nodes), SPECDEC_OK);
  out.check(c);
}

void trust_walk(const Case& c) {
  const Ints tokens = c.get("tokens"), parents = c.get("parents"), count = c.get("count"), chosen = c.get("chosen");
  const Floats margins = c.get<float>("margins");
  const int64_t rows = count.size(), nodes = tokens.size() / rows;
  Walk out(rows, nodes);
  Ints escalated(rows);
  CHECK_EQUAL(specdec_cpu_trust_walk(out.path.data(), out.length.data(), out.bonus.data(), escalated.data(),
                                     tokens.data(), parents.data(), count.data(), chosen.data(), margins.data(), rows,
                                     nodes, c.arrays.at("threshold")[0]), SPECDEC_OK);
  out.check(c);
  c.same("escalated", escalated);
}

void rejection_walk(const Case& c) {
  const Ints tokens = c.get("tokens"), parents = c.get("parents"), count = c.get("count");
  const Floats p = c.get<float>("p"), q = c.get<float>("q");
  const std::vector<double> coins = c.arrays.at("coins"), draw = c.arrays.at("draw");
  const int64_t rows = count.size(), nodes = tokens.size() / rows, vocab = p.size() / tokens.size();
  Walk out(rows, nodes);
  CHECK_EQUAL(specdec_cpu_rejection_walk(out.path.data(), out.length.data(), out.bonus.data(), tokens.data(),
                                         parents.data(), count.data(), p.data(), q.data(), coins.data(), draw.data(),
                                         rows, nodes, vocab, nodes * vocab, vocab, nodes * vocab, vocab,
                                         c.number("replacement")), SPECDEC_OK);
  out.check(c);
}

void kv_commit(const Case& c) {
  Floats cache = c.get<float>("cache");
  const Ints source = c.get("source"), start = c.get("start"), count = c.get("count"), table = c.get("block_table");
  const Ints shape = c.get("shape");  // layers, rows or pages, slots or page size, entry
  const int64_t rows = count.size(), entry = shape[3] * sizeof(float);
  CHECK_EQUAL(specdec_cpu_kv_commit(cache.data(), source.data(), start.data(), count.data(),
                                    table.empty() ? nullptr : table.data(), shape[0], rows, source.size() / rows,
                                    table.empty() ? 1 : table.size() / rows, shape[2], entry,
                                    entry * shape[2] * shape[1], entry * shape[2], entry), SPECDEC_OK);
  c.same("moved", cache);
}

void topk_logprobs(const Case& c) {
  const Logits logits(c);
  const int64_t rows = c.number("rows"), k = c.number("k");
  Floats logprobs(rows * k);
  Ints token(rows * k);
  CHECK_EQUAL(specdec_cpu_topk_logprobs(logprobs.data(), token.data(), logits.data(), logits.dtype, rows,
                                        c.number("vocab"), k), SPECDEC_OK);
  c.same("token", token);
  c.same("logprobs", logprobs);
}

void confidence_gate(const Case& c) {
  const Logits logits(c);
  const Floats scores = c.get<float>("parent_scores");
  const Ints budget = c.get("budget");
  const int64_t rows = budget.size(), parents = scores.size() / rows, width = c.number("width");
  Ints parent(rows * width), token(rows * width), count(rows);
  Floats score(rows * width);
  CHECK_EQUAL(specdec_cpu_confidence_gate(parent.data(), token.data(), score.data(), count.data(), logits.data(),
                                          scores.data(), budget.data(), logits.dtype, c.arrays.at("mu")[0],
                                          c.number("normalized"), rows, parents, c.number("vocab"), width), SPECDEC_OK);
  c.same("count", count);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = row * width + count[row]; i < (row + 1) * width; ++i) parent[i] = token[i] = 0, score[i] = 0;
  }
  c.same("parent", parent);
  c.same("token", token);
  c.same("score", score);
}

void margin_scan(const Case& c) {
  const Logits logits(c);
  const int64_t rows = c.number("rows"), vocab = c.number("vocab");
  Ints token(rows);
  Floats values(6 * rows);
  CHECK_EQUAL(specdec_cpu_margin_scan(token.data(), values.data(), logits.data(), logits.dtype, 1, rows, vocab,
                                      rows * vocab, vocab, 1), SPECDEC_OK);
  c.same("token", token);
  c.same("values", values);
}

void sample_tokens(const Case& c) {
  const Logits logits(c);
  const Ints seeds = c.get("seeds"), positions = c.get("positions");
  const int64_t rows = seeds.size(), nodes = positions.size() / rows, vocab = c.number("vocab");
  Ints token(rows * nodes);
  CHECK_EQUAL(specdec_cpu_sample_tokens(token.data(), logits.data(), logits.dtype, seeds.data(), c.number("stream"),
                                        positions.data(), rows, nodes, vocab, nodes * vocab, vocab), SPECDEC_OK);
  c.same("token", token);
}

const std::map<std::string, std::function<void(const Case&)>> ops = {
    {"verify_walk", verify_walk},         {"trust_walk", trust_walk},   {"rejection_walk", rejection_walk},
    {"kv_commit", kv_commit},             {"margin_scan", margin_scan}, {"topk_logprobs", topk_logprobs},
    {"confidence_gate", confidence_gate}, {"sample_tokens", sample_tokens},
};

std::vector<Case> read(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error(path + " cannot be read");
  std::vector<Case> cases;
  std::string line, word;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    words >> word;
    if (word == "case") {
      words >> word;
      cases.push_back({word, {}});
      continue;
    }
    std::vector<double>& array = cases.back().arrays[word.substr(0, word.size() - 1)];
    while (words >> word) array.push_back(std::stod(word));
  }
  return cases;
}

}  // namespace

int main(int, char** arguments) {
  int checked = 0;
  for (const auto& [name, check] : ops) {
    for (const Case& c : read(std::string(arguments[1]) + "/" + name + ".txt")) check(c), ++checked;
  }
  std::cout << checked << " cases, " << failures << " failures\n";
  return failures != 0;
}
