// From stored rows to a Matrix, and back to floats for the embedding and the tests.
#pragma once
#include "blocks.h"
#include "matrix.h"
#include "memory.h"
#include "pool.h"

namespace segue {

// rows: [count][row_bytes(stored, cols)]. Codes and scales are kept bit by bit, never requantised. All threads of the
// pool take part; what comes out does not depend on their number.
Matrix pack(Pool& pool, Arena& arena, Stored stored, Rounding rounding, const uint8_t* rows, int count, int cols);

// Row `row` as floats, [groups * 32]; zero beyond the last column.
void unpack_row(const Matrix& matrix, int row, float* out);

}  // namespace segue
