// Forms of 8-bit codes: Q8 (Q8_0, Q5_0, int8), Q8Min (Q5_1, Q5_K) and Q6K (Q6_K, a scale for each half group).
#pragma once
#include "linear_tile.h"

namespace segue {

// Rows of a half group's sums: each the exact dot product of 16 inputs, on top of `start`.
template <int Rows, class Start>
SEGUE_INLINE void half_dots(I32 (&dot)[Rows], const uint8_t* block, const int8_t* codes, size_t stride, Start start) {
  SEGUE_UNROLL for (int m = 0; m < Rows; m++) dot[m] = start(m);
  SEGUE_UNROLL for (int i = 0; i < 4; i++) {
    const Bytes weights = load_bytes(block + i * 64);
    SEGUE_UNROLL for (int m = 0; m < Rows; m++) dot[m] = dot_u8s8(dot[m], weights, codes + m * stride + i * 4);
  }
}

// Codes are signed and stored with 128 added: the sum starts at -128 times the sum of x.
struct RuleQ8 {
  static constexpr Form kForm = Form::Q8;
  template <int Rows>
  static SEGUE_INLINE void group(Accumulators<Rows>& acc, int n, const uint8_t* block, const Activations& x,
                                 const int8_t* codes, size_t at) {
    const size_t stride = size_t(x.groups) * kGroup;
    I32 dot[Rows];
    half_dots<Rows>(dot, block, codes, stride, [&](int m) {
      const int32_t* zero = x.zero + 2 * (at + m * size_t(x.groups));
      return splat_i32(zero[0] + zero[1]);
    });
    half_dots<Rows>(dot, block + 256, codes + 16, stride, [&](int m) { return dot[m]; });
    const F32 d = load_f16(block + 512);
    SEGUE_UNROLL for (int m = 0; m < Rows; m++) {
      F32& lanes = acc.lanes[m][n];
      lanes = fma(mul(to_f32(dot[m]), splat(x.scale[at + m * size_t(x.groups)])), d, lanes);
    }
  }
};

struct RuleQ8Min {
  static constexpr Form kForm = Form::Q8Min;
  template <int Rows>
  static SEGUE_INLINE void group(Accumulators<Rows>& acc, int n, const uint8_t* block, const Activations& x,
                                 const int8_t* codes, size_t at) {
    const size_t stride = size_t(x.groups) * kGroup;
    I32 dot[Rows];
    half_dots<Rows>(dot, block, codes, stride, [](int) { return splat_i32(0); });
    half_dots<Rows>(dot, block + 256, codes + 16, stride, [&](int m) { return dot[m]; });
    const F32 d = load(reinterpret_cast<const float*>(block + 512));
    const F32 least = load(reinterpret_cast<const float*>(block + 576));
    SEGUE_UNROLL for (int m = 0; m < Rows; m++) {
      F32& lanes = acc.lanes[m][n];
      lanes = fma(mul(to_f32(dot[m]), splat(x.scale[at + m * size_t(x.groups)])), d, lanes);
      lanes = fma(splat(x.weighted[at + m * size_t(x.groups)]), least, lanes);
    }
  }
};

struct RuleQ6K {
  static constexpr Form kForm = Form::Q6K;
  template <int Rows>
  static SEGUE_INLINE void group(Accumulators<Rows>& acc, int n, const uint8_t* block, const Activations& x,
                                 const int8_t* codes, size_t at) {
    SEGUE_UNROLL for (int half = 0; half < 2; half++) {
      I32 dot[Rows];
      half_dots<Rows>(dot, block + half * 256, codes + half * 16, size_t(x.groups) * kGroup,
                      [&](int m) { return splat_i32(x.zero[2 * (at + m * size_t(x.groups)) + half]); });
      const F32 d = load(reinterpret_cast<const float*>(block + 512 + half * 64));
      SEGUE_UNROLL for (int m = 0; m < Rows; m++) {
        F32& lanes = acc.lanes[m][n];
        lanes = fma(mul(to_f32(dot[m]), splat(x.scale[at + m * size_t(x.groups)])), d, lanes);
      }
    }
  }
};

template <class Rule, int Rows>
void q8_tile(const Matrix& matrix, int pair, const Activations& x, int row, const Output& out) {
  constexpr int kBytes = block_bytes(Rule::kForm);
  const uint8_t* block = matrix.pair(pair);
  const size_t first = size_t(row) * x.groups;
  Accumulators<Rows> acc;
  for (int g = 0; g < x.groups; g++) {
    SEGUE_UNROLL for (int n = 0; n < 2; n++, block += kBytes) {
      ask_ahead<kBytes>(block);
      Rule::template group<Rows>(acc, n, block, x, x.codes + (first + g) * kGroup, first + g);
    }
  }
  acc.finish(out, row, pair * kPairRows);
}

}  // namespace segue
