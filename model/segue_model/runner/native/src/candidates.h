// The tokens of a row that may still be drawn, by id ascending: taken by their scores, then thinned out by weight.
#pragma once
#include <vector>

#include "softmax.h"

namespace segue {

class Candidates {
 public:
  explicit Candidates(int vocab);

  void take(const float* scores, float least);     // every token that scores `least` or more
  void take_best(const float* scores, int count);  // 1 <= count <= vocab; of equal tokens the lowest ids

  int64_t weigh(const Softmax& softmax);  // returns the sum of the weights; what follows needs them
  int64_t mass_from(int64_t least) const;  // the sum of those that are `least` or more
  void keep_from(int64_t least);           // the candidates that weigh `least` or more
  void keep_nucleus(int64_t needed);       // the fewest, heaviest first, whose sum reaches `needed`

  int count() const { return count_; }
  const int32_t* ids() const { return ids_.data(); }
  const int64_t* weights() const { return weights_.data(); }

 private:
  float kth_best(const float* scores, int k);
  template <class Value>
  void keep(const std::vector<Value>& values, Value least, int count);

  const int vocab_;
  int count_ = 0;
  std::vector<int32_t> ids_;      // [vocab], as all these
  std::vector<float> scores_;
  std::vector<int64_t> weights_;
  std::vector<float> best_;       // of groups of tokens, then of tokens
  std::vector<int64_t> bin_;      // weights of about the same size
};

}  // namespace segue
