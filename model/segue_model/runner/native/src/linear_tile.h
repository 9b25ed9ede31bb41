// What the tile kernels of all forms share: one pair of weight tiles (32 outputs) times up to kTileRows rows.
//
// Order of reduction, the same for every number of rows: groups of 32 inputs ascending; inside a group an exact integer
// sum; then acc = fma(sum * scale of x, scale of w, acc) and, where the form has one, acc = fma(scale of x * sum of x,
// least of w, acc). Bf16: pairs of inputs ascending.
#pragma once
#include "activations.h"
#include "matrix.h"
#include "memory.h"
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

// Weights from memory. A core has more lines on their way when it reads four pages side by side than one
// after the other, so the next 16 KiB are asked for in that order while these are used.
template <int Bytes>
SEGUE_INLINE void ask_ahead(const uint8_t* block) {
  constexpr uintptr_t kPages = 4, kPageBytes = 4096, kTogether = kPages * kPageBytes;
  const auto begin = reinterpret_cast<uintptr_t>(block);
  for (uintptr_t at = round_up(begin, kPages * 64); at < begin + Bytes; at += kPages * 64) {
    const uintptr_t line = at / kTogether * kTogether + kTogether + at % kTogether / kPages;
    SEGUE_UNROLL for (uintptr_t page = 0; page < kPages; page++)
      __builtin_prefetch(reinterpret_cast<const void*>(line + page * kPageBytes), 0, 3);
  }
}

using TileKernel = void (*)(const Matrix& matrix, int pair, const Activations& x, int row, const Output& out);

}  // namespace segue
