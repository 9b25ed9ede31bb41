// What the tile kernels of all forms share: one pair of weight tiles (32 outputs) times up to kTileRows rows.
//
// Order of reduction, the same for every number of rows: groups of 32 inputs ascending; inside a group an exact integer
// sum; then acc = fma(sum * scale of x, scale of w, acc) and, where the form has one, acc = fma(scale of x * sum of x,
// least of w, acc). Bf16: pairs of inputs ascending.
#pragma once
#include "activations.h"
#include "matrix.h"
#include "simd.h"

namespace segue {

enum class Epilogue { store, add, swiglu };

// Where a linear's outputs go: out[row][col], rows `stride` floats apart.
struct Output {
  float* data;
  size_t stride;
  const float* bias = nullptr;         // [outputs, padded to 32]; only where outputs are stored
  Epilogue epilogue = Epilogue::store;  // swiglu: out = silu(out) * result, where out holds the gate
};

// results: [rows][2][16] in units of `unit`, the tile whose first output is out[row][col]
void finish_tile(const float* results, int rows, const Output& out, int row, int col, float unit = 1.0f);

template <int Rows>
struct Accumulators {
  F32 lanes[Rows][2];

  SEGUE_INLINE Accumulators() {
    SEGUE_UNROLL for (int m = 0; m < Rows; m++) lanes[m][0] = lanes[m][1] = zero();
  }

  // Through memory, once a tile: the epilogue stays out of the kernels, whose registers are full.
  SEGUE_INLINE void finish(const Output& out, int row, int col) const {
    float results[Rows * kPairRows];
    SEGUE_UNROLL for (int m = 0; m < Rows; m++) {
      store(results + m * kPairRows, lanes[m][0]);
      store(results + m * kPairRows + kTile, lanes[m][1]);
    }
    finish_tile(results, Rows, out, row, col);
  }
};

// A single row is bound by memory: ask for the weights half a kilobyte ahead.
template <int Rows, int Bytes>
SEGUE_INLINE void prefetch_block(const uint8_t* block) {
  if constexpr (Rows == 1) {
    SEGUE_UNROLL for (int i = 0; i < Bytes; i += 64) prefetch(block + i + 1024);
  }
}

using TileKernel = void (*)(const Matrix& matrix, int pair, const Activations& x, int row, const Output& out);

}  // namespace segue
