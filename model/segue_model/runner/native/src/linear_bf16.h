// Weights in bf16, inputs in what multiplies them fastest, sums in float32.
#pragma once
#include "linear_tile.h"

namespace segue {

template <int Rows>
void bf16_tile(const Matrix& matrix, int pair, const Activations& x, int row, const Output& out) {
  constexpr int kBytes = block_bytes(Form::Bf16);
  const uint8_t* block = matrix.pair(pair);
  const size_t stride = size_t(x.groups) * kGroup;
  const Narrow* values = x.narrow + row * stride;
  Accumulators<Rows> acc;
  for (int g = 0; g < x.groups; g++, values += kGroup) {
    SEGUE_UNROLL for (int n = 0; n < 2; n++, block += kBytes) {
      ask_ahead<kBytes>(block);
      for (int i = 0; i < 16; i++) {
        const Bytes weights = load_bytes(block + i * 64);
        SEGUE_UNROLL for (int m = 0; m < Rows; m++)
          acc.lanes[m][n] = dot_bf16(acc.lanes[m][n], weights, values + m * stride + i * 2);
      }
    }
  }
  acc.finish(out, row, pair * kPairRows);
}

}  // namespace segue
