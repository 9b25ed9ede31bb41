#include "linear.h"

#include <array>
#include <utility>

#include "linear_bf16.h"
#include "linear_q4.h"
#include "linear_q8.h"
#if defined(SEGUE_AMX)
#include "linear_amx.h"
#endif

namespace segue {
namespace {

using Kernels = std::array<TileKernel, kTileRows>;  // index: rows - 1

template <size_t... Rows>
const Kernels& kernels_of(Form form, std::index_sequence<Rows...>) {
  static const Kernels q4{q4_tile<ScalesQ4, Rows + 1>...}, q4k{q4_tile<ScalesQ4K, Rows + 1>...};
  static const Kernels q8{q8_tile<RuleQ8, Rows + 1>...}, q8min{q8_tile<RuleQ8Min, Rows + 1>...};
  static const Kernels q6k{q8_tile<RuleQ6K, Rows + 1>...}, bf16{bf16_tile<Rows + 1>...};
  switch (form) {
    case Form::Q4: return q4;
    case Form::Q4K: return q4k;
    case Form::Q8: return q8;
    case Form::Q8Min: return q8min;
    case Form::Q6K: return q6k;
    default: return bf16;
  }
}

}  // namespace

void finish_tile(const float* results, int rows, const Output& out, int row, int col, float unit) {
  const F32 units = splat(unit);
  const auto each = [&](auto finish) {
    for (int m = 0; m < rows; m++) {
      float* at = out.data + (row + m) * out.stride + col;
      for (int n = 0; n < kPairRows; n += kTile)
        store(at + n, finish(at + n, n, mul(load(results + m * kPairRows + n), units)));
    }
  };
  if (out.bias != nullptr)
    each([&](const float*, int n, F32 value) { return add(value, load(out.bias + col + n)); });
  else if (out.epilogue == Epilogue::add)
    each([](const float* at, int, F32 value) { return add(load(at), value); });
  else if (out.epilogue == Epilogue::swiglu)
    each([](const float* at, int, F32 value) { return swiglu(load(at), value); });
  else
    each([](const float*, int, F32 value) { return value; });
}

#if defined(SEGUE_AMX)
void release_matrix_unit() { TileShapes::release(); }

bool takes_gated(const Matrix& gate, const Matrix& up, const Matrix& next, int rows) {
  return rows > 2 * kRowTile && gate.for_matrix_unit() && gate.form == up.form && next.for_matrix_unit();
}

void gated_pairs(const Matrix& gate, const Matrix& up, int first, int last, const Activations& x, int rows,
                 const Activations& to, const LinearScratch& scratch) {
  const auto pairs = gate.form == Form::Q4 ? amx_gated_pairs<WeightsQ4> : amx_gated_pairs<WeightsBf16>;
  pairs(gate, up, first, last, x, rows, to, scratch.tiles);
  release_matrix_unit();
}
#else
void release_matrix_unit() {}
bool takes_gated(const Matrix&, const Matrix&, const Matrix&, int) { return false; }
void gated_pairs(const Matrix&, const Matrix&, int, int, const Activations&, int, const Activations&,
                 const LinearScratch&) {}
#endif

void linear_pairs(const Matrix& matrix, int first, int last, const Activations& x, int rows, const Output& out,
                  [[maybe_unused]] const LinearScratch& scratch) {
#if defined(SEGUE_AMX)
  if (matrix.for_matrix_unit()) {
    const auto pairs = matrix.form == Form::Q4 ? amx_pairs<WeightsQ4> : amx_pairs<WeightsBf16>;
    pairs(matrix, first, last, x, rows, out, scratch.tiles);
    return release_matrix_unit();
  }
#endif
  const Kernels& kernels = kernels_of(matrix.form, std::make_index_sequence<kTileRows>{});
  const int tiles = (rows + kTileRows - 1) / kTileRows;
  for (int pair = first; pair < last; pair++)
    for (int tile = 0, row = 0; tile < tiles; tile++) {
      const int left = tiles - tile, count = (rows - row + left - 1) / left;  // tiles of nearly equal height
      kernels[count - 1](matrix, pair, x, row, out);
      row += count;
    }
}

}  // namespace segue
