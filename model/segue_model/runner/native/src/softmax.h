// exp in integers; segue_model/softmax.py is the twin, and tells why. Both take the same roundings in the same order.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "simd.h"

namespace segue {

constexpr int64_t kOne = int64_t{1} << 42;  // the weight of the best token: 2^21 of them fit into 63 bits

template <class To, class From>
SEGUE_INLINE To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// 2^(42 + x) for x <= 0, rounded to an integer.
SEGUE_INLINE int64_t weight(double x) {
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: the low bits of a sum with it are an integer
  x = std::max(x, -64.0);
  const double octaves = x + (kRound + 42);
  const double f = x - (octaves - (kRound + 42));
  double p = 5.732872717002738e-10;  // 2^(f / 64)
  p = p * f + 2.1173176031317313e-07;
  p = p * f + 5.864904955034224e-05;
  p = p * f + 0.010830424696224803;
  p = p * f + 1.0;
  for (int i = 0; i < 6; i++) p = p * p;
  const uint64_t scaled = bits_of<uint64_t>(p) + (bits_of<uint64_t>(octaves) << 52);
  return bits_of<int64_t>(bits_of<double>(scaled) + kRound) - bits_of<int64_t>(kRound);
}

// exp((score - peak) / temperature); per_octave: how many doublings a difference of 1 between scores makes.
struct Softmax {
  Softmax(float best, double temperature)
      : peak(best), per_octave(std::min(1.4426950408889634 / temperature, std::numeric_limits<double>::max())) {}

  // Writes the weights of the scores and returns their sum. A plain loop: compilers make vectors of it.
  int64_t weigh(const float* scores, int count, int64_t* weights) const {
    int64_t total = 0;
    for (int i = 0; i < count; i++)
      total += weights[i] = weight((static_cast<double>(scores[i]) - peak) * per_octave);
    return total;
  }

  // A score that weighs 2^(42 - octaves), up to rounding.
  float score_at(double octaves) const {
    return static_cast<float>(std::max<double>(peak - octaves / per_octave, std::numeric_limits<float>::lowest()));
  }

  double peak, per_octave;
};

}  // namespace segue
