// out = epilogue(x W^T + bias), shared out among the threads of a pool by pairs of tiles.
#pragma once
#include "linear_tile.h"

namespace segue {

// What a thread needs beside its inputs to work on matrices of up to `groups` groups.
struct LinearScratch {
  uint8_t* tiles = nullptr;  // [groups][2][1024] weights on their way to the matrix unit

  static LinearScratch take(Arena& arena, int groups) {
    return {kMatrixUnit ? arena.take<uint8_t>(size_t(groups < 4 ? 4 : groups) * 2048) : nullptr};
  }
};

// Pairs first .. last - 1 of the matrix, for all `rows` rows of x.
void linear_pairs(const Matrix& matrix, int first, int last, const Activations& x, int rows, const Output& out,
                  const LinearScratch& scratch);

// Whether gated_pairs() takes these matrices and rows.
bool takes_gated(const Matrix& gate, const Matrix& up, const Matrix& next, int rows);

// silu(x gate^T) * (x up^T) as the inputs of the next linear: columns of pairs first .. last - 1.
void gated_pairs(const Matrix& gate, const Matrix& up, int first, int last, const Activations& x, int rows,
                 const Activations& to, const LinearScratch& scratch);

// After a piece of work: the state of the matrix unit need not be kept any longer, whoever gets the core next.
void release_matrix_unit();

}  // namespace segue
