// The inputs of the linears: rows of floats rounded to int8 in groups of 32, or narrowed for bf16, and RMSNorm before that.
#pragma once
#include "matrix.h"
#include "memory.h"
#include "simd.h"

namespace segue {

// What a linear's weights want of their inputs.
struct Needs {
  bool integer = false, bf16 = false;

  void add(const Matrix& matrix) { (matrix.integer() ? integer : bf16) = true; }
};

// `rows` rows of `groups` groups of 32. x = scale * code, |code| <= 127.
struct Activations {
  int groups = 0;
  int8_t* codes = nullptr;    // [rows][groups * 32]
  float* scale = nullptr;     // [rows][groups]
  float* weighted = nullptr;  // [rows][groups]     scale * sum of the group's codes: meets the weights' least
  int32_t* zero = nullptr;    // [rows][groups * 2] -128 * sum of a half group's codes: meets the weights' + 128
  Narrow* narrow = nullptr;   // for weights that want them: [rows / block][groups][block][32]
  int block = 1;              // rows; the matrix unit loads tiles of them

  Narrow* narrow_at(int row, int group) const {
    return narrow + (size_t(row / block * groups + group) * block + row % block) * kGroup;
  }

  static Activations take(Arena& arena, int rows, int groups) {
    const size_t n = size_t(rows) * groups;
    Activations a;
    a.groups = groups;
    if (kMatrixUnit && rows > 1) a.block = 2 * kTile;
    a.codes = arena.take<int8_t>(n * kGroup);
    a.scale = arena.take<float>(n);
    a.weighted = arena.take<float>(n);
    a.zero = arena.take<int32_t>(n * 2);
    a.narrow = arena.take<Narrow>(round_up(rows, a.block) * groups * kGroup);
    return a;
  }
};

SEGUE_INLINE void quantise_group(const Activations& a, size_t at, F32 low, F32 high) {
  const float peak = highest(max(abs(low), abs(high)));
  // Below 1e-30 the reciprocal would overflow; so small a group counts as zero. NaN and infinity go into the scale.
  const bool tiny = peak < 1e-30f;
  const float scale = tiny ? 0.0f : peak / 127.0f;
  const F32 inverse = splat(tiny ? 0.0f : 127.0f / peak);
  const I32 first = round_i32(mul(low, inverse)), second = round_i32(mul(high, inverse));
  store_bytes(a.codes + at * kGroup, first);
  store_bytes(a.codes + at * kGroup + 16, second);
  const int32_t sum_first = sum(first), sum_second = sum(second);
  a.scale[at] = scale;
  a.weighted[at] = scale * static_cast<float>(sum_first + sum_second);
  a.zero[2 * at] = -128 * sum_first;
  a.zero[2 * at + 1] = -128 * sum_second;
}

// value(i): the 16 floats from column i on of this row.
template <class Value>
SEGUE_INLINE void prepare_row(const Activations& a, int row, Needs needs, Value value) {
  Narrow* narrow = a.narrow_at(row, 0);
  for (int group = 0; group < a.groups; group++, narrow += a.block * kGroup) {
    const F32 low = value(group * kGroup), high = value(group * kGroup + 16);
    if (needs.integer) quantise_group(a, size_t(row) * a.groups + group, low, high);
    if (needs.bf16) {
      store_narrow(narrow, low);
      store_narrow(narrow + 16, high);
    }
  }
}

// x: [groups * 32]
inline void prepare(const Activations& a, int row, Needs needs, const float* x) {
  prepare_row(a, row, needs, [x](int i) { return load(x + i); });
}

// 1 / rms(x); x: `width` floats, a multiple of 16, of which the first `count` may differ from zero.
SEGUE_INLINE float inverse_rms(const float* x, int width, int count, float eps) {
  F32 squares = zero();
  for (int i = 0; i < width; i += kLanes) {
    const F32 v = load(x + i);
    squares = fma(v, v, squares);
  }
  return 1.0f / std::sqrt(sum(squares) / static_cast<float>(count) + eps);
}

// RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) and rounding in one pass. x, weight: [groups * 32]
inline void norm_and_prepare(const Activations& a, int row, Needs needs, const float* x, const float* weight, int dim,
                             float eps) {
  const F32 inverse = splat(inverse_rms(x, a.groups * kGroup, dim, eps));
  prepare_row(a, row, needs, [=](int i) { return mul(mul(load(x + i), inverse), load(weight + i)); });
}

}  // namespace segue
