// out = epilogue(x W^T + bias), shared out among the threads of a pool by pairs of tiles.
#pragma once
#include "linear_tile.h"

namespace segue {

// Pairs first .. last - 1 of the matrix, for all `rows` rows of x.
void linear_pairs(const Matrix& matrix, int first, int last, const Activations& x, int rows, const Output& out);

}  // namespace segue
