// One token from each row of logits. What is drawn stands in segue_model/sampling.py, the slow twin, which draws the
// same tokens to the bit; so does every instruction set.
#pragma once
#include <cstdint>
#include <vector>

#include "candidates.h"
#include "pool.h"
#include "softmax.h"

namespace segue {

// What a row is asked for. Mirrored by library.py.
struct Draw {
  const float* logits;                     // [vocab]
  double temperature;                      // 0: the best token
  double top_p, min_p;                     // off: 1, 0
  double repetition, frequency, presence;  // off: 1, 0, 0
  int64_t seed, position;
  int64_t top_k;  // at least 1; vocab or more: off
  const int64_t* bias_ids;
  const double* biases;
  const int64_t* history;  // what the penalties look at
  const int64_t* banned;
  int64_t bias_count, history_count, banned_count;
  int64_t best_count;  // of tokens wanted with logprobs, up to vocab; -1: no logprobs
  int64_t* best;       // [best_count] best first
};

// Nothing can be drawn from the model's logits, or once they are adjusted; or a list names a token beyond the vocabulary.
enum class Refusal : int32_t { none = 0, logits, adjusted, bias, history, banned };

// Mirrored by library.py.
struct Drawn {
  int64_t token;  // drawn, or the one that the refusal is about
  int64_t mass;   // with best_count >= 0: the weights of all logits at temperature 1
  float peak;     // the best of the model's logits, or the one that the refusal is about
  Refusal refusal;
};

// Draws from one row at a time; each thread has one.
class RowSampler {
 public:
  explicit RowSampler(int vocab);
  Drawn draw(const Draw& draw);

 private:
  const float* adjust(const Draw& draw, Drawn& drawn);
  int64_t weigh_all(const float* scores, const Softmax& softmax);
  int64_t pick(const float* scores, const Softmax& softmax, const Draw& draw);
  int64_t pick_from_all(const float* scores, const Softmax& softmax, const Draw& draw);
  void take_nucleus(const float* scores, const Softmax& softmax, double top_p);

  const int vocab_;
  Candidates candidates_;
  std::vector<int64_t> sums_;    // of the weights, for each block of the vocabulary
  std::vector<float> adjusted_;  // [vocab] logits with bias, penalties and bans
  std::vector<int32_t> counts_;  // [vocab] of tokens in a history; all zero between rows
};

class Sampler {
 public:
  explicit Sampler(Pool& pool) : pool_(pool) {}
  void draw(const Draw* draws, int count, int vocab, Drawn* drawn);

 private:
  Pool& pool_;
  int vocab_ = 0;
  std::vector<RowSampler> rows_;  // for each thread
};

}  // namespace segue
