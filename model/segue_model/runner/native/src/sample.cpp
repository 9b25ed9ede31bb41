#include "sample.h"

#include <numeric>
#include <utility>

namespace segue {
namespace {

constexpr int kBlock = 256;  // tokens whose weights are added up together

// The first of the best values; NaN is above all.
int first_best(const float* values, int count) {
  int32_t top = INT32_MIN, nans = 0;
  for (int i = 0; i < count; i++) {
    const int32_t bits = bits_of<int32_t>(values[i]);
    top = std::max(top, bits ^ ((bits >> 31) & INT32_MAX));  // integers in the order of the floats
    nans += values[i] != values[i];
  }
  const float best = bits_of<float>(top ^ ((top >> 31) & INT32_MAX));
  int i = 0;
  while (nans > 0 ? values[i] == values[i] : values[i] != best) i++;
  return i;
}

constexpr uint64_t kGoldenGamma = 0x9E3779B97F4A7C15u;

uint64_t mix(uint64_t state) {  // splitmix64
  uint64_t z = state + kGoldenGamma;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// The random number of a seed and a position, in 0 .. total - 1.
int64_t random_below(int64_t total, const Draw& draw) {
  __extension__ using Wide = unsigned __int128;
  const uint64_t start = mix(static_cast<uint64_t>(draw.seed));
  const uint64_t random = mix(start + static_cast<uint64_t>(draw.position) * kGoldenGamma);
  return static_cast<int64_t>(Wide{random} * static_cast<uint64_t>(total) >> 64);
}

// Where the running sum of the weights passes `target`, which loses what lies before.
int passing(int64_t& target, const int64_t* weights) {
  int i = 0;
  while (target >= weights[i]) target -= weights[i++];
  return i;
}

int64_t share_of(int64_t total, double top_p) {
  return std::clamp(static_cast<int64_t>(std::ceil(top_p * static_cast<double>(total))), int64_t{1}, total);
}

}  // namespace

RowSampler::RowSampler(int vocab)
    : vocab_(vocab), candidates_(vocab), sums_((vocab + kBlock - 1) / kBlock), adjusted_(vocab), counts_(vocab) {}

Drawn RowSampler::draw(const Draw& draw) {
  int best = first_best(draw.logits, vocab_);
  Drawn drawn{best, 0, draw.logits[best], Refusal::none};
  if (!std::isfinite(drawn.peak)) return {best, 0, drawn.peak, Refusal::logits};
  if (draw.best_count >= 0) drawn.mass = weigh_all(draw.logits, Softmax(drawn.peak, 1.0));
  if (draw.best_count > 0) {
    candidates_.take_best(draw.logits, static_cast<int>(draw.best_count));
    std::copy_n(candidates_.ids(), draw.best_count, draw.best);
    std::stable_sort(draw.best, draw.best + draw.best_count,
                     [&](int64_t a, int64_t b) { return draw.logits[a] > draw.logits[b]; });
  }
  const float* scores = adjust(draw, drawn);
  if (drawn.refusal != Refusal::none) return drawn;
  if (scores != draw.logits) best = first_best(scores, vocab_);
  if (!std::isfinite(scores[best])) return {best, 0, scores[best], Refusal::adjusted};
  drawn.token = draw.temperature == 0 ? best : pick(scores, Softmax(scores[best], draw.temperature), draw);
  return drawn;
}

// Bias, penalties and bans on a copy; the logits themselves when there are none.
const float* RowSampler::adjust(const Draw& draw, Drawn& drawn) {
  const auto refuses = [&](Refusal list, const int64_t* ids, int64_t count) {
    const int64_t* stranger = std::find_if(ids, ids + count, [&](int64_t id) { return id < 0 || id >= vocab_; });
    if (stranger == ids + count) return false;
    drawn.token = *stranger, drawn.refusal = list;
    return true;
  };
  if (draw.bias_count + draw.history_count + draw.banned_count == 0 ||
      refuses(Refusal::bias, draw.bias_ids, draw.bias_count) ||
      refuses(Refusal::history, draw.history, draw.history_count) ||
      refuses(Refusal::banned, draw.banned, draw.banned_count))
    return draw.logits;
  std::copy_n(draw.logits, vocab_, adjusted_.data());
  for (int64_t i = 0; i < draw.bias_count; i++) {
    float& score = adjusted_[draw.bias_ids[i]];
    score = static_cast<float>(static_cast<double>(score) + draw.biases[i]);
  }
  for (int64_t i = 0; i < draw.history_count; i++) counts_[draw.history[i]]++;
  for (int64_t i = 0; i < draw.history_count; i++) {
    const int32_t count = std::exchange(counts_[draw.history[i]], 0);
    if (count == 0) continue;  // it came before
    float& score = adjusted_[draw.history[i]];
    const double repeated = score > 0 ? score / draw.repetition : score * draw.repetition;
    score = static_cast<float>(repeated - count * draw.frequency - draw.presence);
  }
  for (int64_t i = 0; i < draw.banned_count; i++) adjusted_[draw.banned[i]] = -std::numeric_limits<float>::infinity();
  return adjusted_.data();
}

// One draw at a temperature above 0.
int64_t RowSampler::pick(const float* scores, const Softmax& softmax, const Draw& draw) {
  if (draw.top_k < vocab_) {
    candidates_.take_best(scores, static_cast<int>(draw.top_k));
    const int64_t total = candidates_.weigh(softmax);
    if (draw.top_p < 1) candidates_.keep_nucleus(share_of(total, draw.top_p));
  } else if (draw.top_p < 1) {
    take_nucleus(scores, softmax, draw.top_p);
  } else if (draw.min_p > 0) {
    candidates_.take(scores, softmax.score_at(1.5 - std::ilogb(draw.min_p)));
    candidates_.weigh(softmax);
  } else {
    return pick_from_all(scores, softmax, draw);
  }
  if (draw.min_p > 0) candidates_.keep_from(static_cast<int64_t>(std::ceil(draw.min_p * kOne)));
  int64_t target = random_below(candidates_.mass_from(0), draw);
  return candidates_.ids()[passing(target, candidates_.weights())];
}

int64_t RowSampler::pick_from_all(const float* scores, const Softmax& softmax, const Draw& draw) {
  int64_t target = random_below(weigh_all(scores, softmax), draw), weights[kBlock];
  const int begin = passing(target, sums_.data()) * kBlock;
  softmax.weigh(scores + begin, std::min(kBlock, vocab_ - begin), weights);
  return begin + passing(target, weights);
}

// Returns the sum of all weights.
int64_t RowSampler::weigh_all(const float* scores, const Softmax& softmax) {
  int64_t weights[kBlock];
  for (int begin = 0; begin < vocab_; begin += kBlock)
    sums_[begin / kBlock] = softmax.weigh(scores + begin, std::min(kBlock, vocab_ - begin), weights);
  return std::accumulate(sums_.begin(), sums_.end(), int64_t{0});
}

// Most of the mass lies on few tokens: take the best ones, and more until those that weigh kOne >> octaves or more hold
// what is needed. Half an octave further down none of these is missing: roundings shift a weight by a unit or two.
void RowSampler::take_nucleus(const float* scores, const Softmax& softmax, double top_p) {
  const int64_t total = weigh_all(scores, softmax), needed = share_of(total, top_p);
  int octaves = 5 + std::ilogb(total / kOne) - std::ilogb(1 - top_p);  // enough more often than not
  for (;; octaves += 3) {
    if (octaves > 38) octaves = 43;  // all that weigh something
    candidates_.take(scores, softmax.score_at(octaves + 0.5));
    candidates_.weigh(softmax);
    if (candidates_.mass_from(kOne >> octaves) >= needed) return candidates_.keep_nucleus(needed);
  }
}

void Sampler::draw(const Draw* draws, int count, int vocab, Drawn* drawn) {
  if (vocab != vocab_) {
    rows_.clear();
    for (int thread = 0; thread < pool_.threads(); thread++) rows_.emplace_back(vocab);
  }
  vocab_ = vocab;
  pool_.deal(count, [&](int thread, int row) { drawn[row] = rows_[thread].draw(draws[row]); });
}

}  // namespace segue
