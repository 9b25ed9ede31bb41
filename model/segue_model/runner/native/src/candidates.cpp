#include "candidates.h"

#include <functional>
#include <numeric>

namespace segue {
namespace {

constexpr int kGroup = 64;         // tokens of which only the best is looked at first
constexpr int kBins = 8 * 43;      // eight for each octave of a weight
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Calls each(i), i ascending, where values[i] >= least.
template <class Each>
void each_from(float least, const float* values, int count, Each each) {
  const F32 bound = splat(least);
  int i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (uint32_t lanes = at_least(load(values + i), bound); lanes != 0; lanes &= lanes - 1)
      each(i + __builtin_ctz(lanes));
  for (; i < count; i++)
    if (values[i] >= least) each(i);
}

// Ascending with the weight: its exponent and the three bits behind it.
int bin_of(int64_t weight) {
  return static_cast<int>((bits_of<int64_t>(static_cast<double>(weight + 1)) >> 49) - (1023 << 3));
}

}  // namespace

Candidates::Candidates(int vocab) : vocab_(vocab), ids_(vocab), scores_(vocab), weights_(vocab) {
  best_.reserve(vocab);  // now, because a thread of the pool could not say that there is no memory
  bin_.reserve(vocab);
}

void Candidates::take(const float* scores, float least) {
  count_ = 0;
  each_from(least, scores, vocab_, [&](int i) {
    ids_[count_] = i;
    scores_[count_++] = scores[i];
  });
}

void Candidates::take_best(const float* scores, int count) {
  const float least = kth_best(scores, count);
  take(scores, least);
  keep(scores_, least, count);
}

// The k-th best of the groups' best is no better than that of all tokens, and few are as good.
float Candidates::kth_best(const float* scores, int k) {
  const auto kth = [&] {
    std::nth_element(best_.begin(), best_.begin() + k - 1, best_.end(), std::greater<>());
    return best_[k - 1];
  };
  best_.clear();
  for (const float* x = scores; x + kGroup <= scores + vocab_; x += kGroup)
    best_.push_back(highest(max(max(load(x), load(x + 16)), max(load(x + 32), load(x + 48)))));
  const float least = static_cast<size_t>(k) <= best_.size() ? kth() : -kInfinity;
  best_.clear();
  each_from(least, scores, vocab_, [&](int i) { best_.push_back(scores[i]); });
  return kth();
}

int64_t Candidates::weigh(const Softmax& softmax) { return softmax.weigh(scores_.data(), count_, weights_.data()); }

int64_t Candidates::mass_from(int64_t least) const {
  int64_t mass = 0;
  for (int i = 0; i < count_; i++) mass += weights_[i] >= least ? weights_[i] : 0;
  return mass;
}

void Candidates::keep_from(int64_t least) { keep(weights_, least, count_); }

// The weights are added up in bins, and only the bin where the sum is reached is sorted.
void Candidates::keep_nucleus(int64_t needed) {
  int64_t masses[kBins] = {};
  for (int i = 0; i < count_; i++) masses[bin_of(weights_[i])] += weights_[i];
  int bin = kBins - 1;
  for (; masses[bin] < needed; bin--) needed -= masses[bin];
  int heavier = 0;
  bin_.clear();
  for (int i = 0; i < count_; i++) {
    heavier += bin_of(weights_[i]) > bin;
    if (bin_of(weights_[i]) == bin) bin_.push_back(weights_[i]);
  }
  std::sort(bin_.begin(), bin_.end(), std::greater<>());
  auto last = bin_.begin();
  for (; *last < needed; last++) needed -= *last;
  keep(weights_, *last, heavier + static_cast<int>(last - bin_.begin()) + 1);
}

// Keeps the `count` largest values, the smallest of which is `least`; of equal ones those that come first.
template <class Value>
void Candidates::keep(const std::vector<Value>& values, Value least, int count) {
  int ties = count;
  for (int i = 0; i < count_; i++) ties -= values[i] > least;
  int kept = 0;
  for (int i = 0; i < count_; i++) {  // no branch: which candidates stay is hard to guess
    const bool tie = values[i] == least, stays = (values[i] > least) | (tie & (ties > 0));
    ties -= tie;
    ids_[kept] = ids_[i], scores_[kept] = scores_[i], weights_[kept] = weights_[i];
    kept += stays;
  }
  count_ = kept;
}

}  // namespace segue
