// Linears on the matrix unit: tiles of 16 rows of inputs in bf16 times 16 outputs, summed over all columns inside the
// unit. 4-bit weights become bf16 on the way, once for all rows.
//
// Order of reduction: steps of 32 columns ascending, inside a step as tiles.h says. A row's result is the same bits
// whatever the number of rows, so one kernel serves a lone token and a long prompt.
#pragma once
#include <algorithm>

#include "linear_tile.h"
#include "tiles.h"

namespace segue {

constexpr int kRowTile = 16;

// Blocks of Q4 as [16][16][2] bf16, in the matrix's units of 2^exponent.
//
// Arithmetic is that of half floats: a code moved to bits 6 .. 9 or 2 .. 5 is the subnormal code * 2^-18 or * 2^-22, so
// that one multiply-add makes the weight. Its magnitude is below 2, so dropping three bits of mantissa (rounded) and
// setting three more bits of exponent makes it bf16. A half float below 2^-14 would need more exponent; it becomes
// something below 2^-14, which is no more than rounding does to large weights.
struct WeightsQ4 {
  static constexpr bool kReady = false;
  static constexpr int kBytes = block_bytes(Form::Q4);

  static SEGUE_INLINE void widen(const uint8_t* block, uint8_t* tile) {
    const __m512i scales = _mm512_loadu_si512(block + 256), twice = twice_each();
    const __m512i coarse = _mm512_permutexvar_epi16(twice, scales);
    const __m512i fine = times(coarse, _mm512_set1_epi16(0x4c00));  // 16
    const __m512i least = _mm512_permutexvar_epi16(_mm512_add_epi16(twice, _mm512_set1_epi16(16)), scales);
    SEGUE_UNROLL for (int i = 0; i < 4; i++) {
      const __m512i codes = _mm512_loadu_si512(block + i * 64);
      const __m512i left = _mm512_slli_epi16(codes, 2), right = _mm512_srli_epi16(codes, 6);
      put(tile + i * 256, left, 0x03c, fine, least);
      put(tile + i * 256 + 64, left, 0x3c0, coarse, least);
      put(tile + i * 256 + 128, right, 0x03c, fine, least);
      put(tile + i * 256 + 192, right, 0x3c0, coarse, least);
    }
  }

 private:
  // 0 0 1 1 .. 15 15
  static SEGUE_INLINE __m512i twice_each() {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_or_si512(lanes, _mm512_slli_epi32(lanes, 16));
  }
  // Half floats, in instructions: compilers learned of them later than assemblers.
  static SEGUE_INLINE __m512i times(__m512i a, __m512i b) {
    asm("vmulph %1, %0, %0" : "+v"(a) : "v"(b));
    return a;
  }
  static SEGUE_INLINE __m512i fused(__m512i a, __m512i b, __m512i c) {  // a * b + c
    asm("vfmadd213ph %2, %1, %0" : "+v"(a) : "v"(b), "v"(c));
    return a;
  }
  static SEGUE_INLINE void put(uint8_t* to, __m512i codes, short mask, __m512i scale, __m512i least) {
    const __m512i half = fused(_mm512_and_si512(codes, _mm512_set1_epi16(mask)), scale, least);
    const __m512i shifted = _mm512_mulhrs_epi16(half, _mm512_set1_epi16(1 << 12));  // half >> 3, rounded
    constexpr int kAndOr = 0xea;                                                    // a & b | c
    _mm512_store_si512(to, _mm512_ternarylogic_epi32(shifted, _mm512_set1_epi16(static_cast<short>(0x8fff)),
                                                     _mm512_set1_epi16(0x3800), kAndOr));
  }
};

// Blocks of bf16 are tiles already.
struct WeightsBf16 {
  static constexpr bool kReady = true;
  static constexpr int kBytes = block_bytes(Form::Bf16);
  static SEGUE_INLINE void widen(const uint8_t*, uint8_t*) {}
};

// Tiles 0 .. 3: sums, [16 rows][16 outputs]; 4, 5: inputs, [16 rows][32]; 6, 7: weights of the pair.
inline void use_linear_tiles(int rows) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; tile++) shapes.set(tile, kRowTile, 64);
  for (int tile : {0, 1, 4}) shapes.set(tile, std::min(rows, kRowTile), 64);
  shapes.use();
}

// One step of 32 columns. x: [1 or 32 rows][32]. The weights stay in the first-level cache, the inputs pass through.
template <bool Two>
SEGUE_INLINE void tile_step(const uint8_t* first, const uint8_t* second, const Narrow* x) {
  tile_stream<4>(x, 64);
  tile_load<6>(first, 64);
  tile_dot<0, 4, 6>();
  tile_load<7>(second, 64);
  tile_dot<1, 4, 7>();
  if constexpr (Two) {
    tile_stream<5>(x + kRowTile * kGroup, 64);
    tile_dot<2, 5, 6>();
    tile_dot<3, 5, 7>();
  }
}

template <bool Two>
SEGUE_INLINE void zero_sums() {
  tile_zero<0>();
  tile_zero<1>();
  if constexpr (Two) {
    tile_zero<2>();
    tile_zero<3>();
  }
}

template <bool Two>
SEGUE_INLINE void store_sums(float* results) {
  tile_store<0>(results, kPairRows * 4);
  tile_store<1>(results + kTile, kPairRows * 4);
  if constexpr (Two) {
    tile_store<2>(results + kRowTile * kPairRows, kPairRows * 4);
    tile_store<3>(results + kRowTile * kPairRows + kTile, kPairRows * 4);
  }
}

template <bool Two>
SEGUE_INLINE void finish_sums(const Matrix& matrix, int pair, int row, int rows, const Output& out) {
  alignas(64) float results[2 * kRowTile * kPairRows];
  store_sums<Two>(results);
  finish_tile(results, rows, out, row, pair * kPairRows, std::ldexp(1.0f, matrix.exponent));
}

template <bool Two>
SEGUE_INLINE void load_inputs(const Narrow* x) {
  tile_load<4>(x, 64);
  if constexpr (Two) tile_load<5>(x + kRowTile * kGroup, 64);
}

// Half a step, whose inputs are in tiles 4 and 5: tile 6 is the first of a pair's weights, 7 the second.
template <int Tile, bool Two>
SEGUE_INLINE void half_step(const uint8_t* weights) {
  tile_load<Tile>(weights, 64);
  tile_dot<Tile - 6, 4, Tile>();
  if constexpr (Two) tile_dot<Tile - 4, 5, Tile>();
}

// All steps of up to 32 rows over 4-bit weights: bound by making bf16 of them, which never leaves the first-level cache.
// The products of a step lie between the halves of making a later one, so that neither waits for the other: the tiles
// they load have left the store buffer by then.
template <class Weights, bool Two>
inline void made_steps(const uint8_t* block, const Narrow* inputs, int step, int groups, uint8_t* tiles) {
  constexpr int kRing = 4, kBehind = 2;  // steps
  const auto made = [&](int g) { return tiles + g % kRing * 2 * kTileBytes; };
  const auto turn = [&](int g, auto makes, auto multiplies) {
    if constexpr (multiplies) load_inputs<Two>(inputs + (g - kBehind) * step);
    if constexpr (multiplies) half_step<6, Two>(made(g - kBehind));
    if constexpr (makes) ask_ahead<2 * Weights::kBytes>(block);
    if constexpr (makes) Weights::widen(block, made(g));
    if constexpr (multiplies) half_step<7, Two>(made(g - kBehind) + kTileBytes);
    if constexpr (makes) Weights::widen(block + Weights::kBytes, made(g) + kTileBytes);
    block += 2 * Weights::kBytes;
  };
  const std::true_type yes;
  const std::false_type no;
  int g = 0;
  for (; g < std::min(kBehind, groups); g++) turn(g, yes, no);
  for (; g < groups; g++) turn(g, yes, yes);
  for (g = std::max(kBehind, groups); g < groups + kBehind; g++) turn(g, no, yes);
}

template <class Weights, bool Two>
inline void few_rows(const Matrix& matrix, int pair, const Activations& x, int rows, const Output& out, uint8_t* tiles) {
  const uint8_t* block = matrix.pair(pair);
  const Narrow* inputs = x.narrow;
  const int step = x.block * kGroup;
  zero_sums<Two>();
  if constexpr (!Weights::kReady) {
    made_steps<Weights, Two>(block, inputs, step, x.groups, tiles);
  } else {
    for (int g = 0; g < x.groups; g++, block += 2 * Weights::kBytes, inputs += step) {
      ask_ahead<2 * Weights::kBytes>(block);
      tile_step<Two>(block, block + Weights::kBytes, inputs);
    }
  }
  finish_sums<Two>(matrix, pair, 0, rows, out);
}

// The weights of the pair that comes next, if one does before `last`, asked for some lines a step.
class Ahead {
 public:
  Ahead(const Matrix& matrix, int next, int last, int rows)
      : next_(matrix.pair(next)), end_(next < last ? next_ + matrix.pair_bytes : next_) {
    const int steps = (rows + 2 * kRowTile - 1) / (2 * kRowTile) * matrix.groups;
    lines_ = (end_ - next_) / 64 / steps + 1;
  }

  SEGUE_INLINE void more() {
    for (size_t i = 0; i < lines_ && next_ < end_; i++, next_ += 64) prefetch(next_);
  }

 private:
  const uint8_t *next_, *end_;
  size_t lines_;
};

// One tile of a matrix: its blocks, `stride` bytes apart.
struct TileBlocks {
  const uint8_t* data;
  size_t stride;

  template <class Weights>
  static TileBlocks of(const Matrix& matrix, int tile) {
    return {matrix.pair(tile / 2) + tile % 2 * Weights::kBytes, 2 * Weights::kBytes};
  }
};

// More than 32 rows: two tiles' weights become bf16 once, then meet 32 rows at a time. The sums of 32 rows are finished
// while those of the next 32 are computed, a few rows a step.
// finish(row, rows, results): takes sums [rows][first tile 16 | second tile 16].
template <class Weights, class Finish>
inline void many_rows(TileBlocks first, TileBlocks second, const Activations& x, int rows, uint8_t* tiles, Ahead ahead,
                      Finish finish) {
  constexpr int kRows = 2 * kRowTile;
  const int groups = x.groups, each = (kRows + groups - 1) / groups;
  if constexpr (!Weights::kReady) {
    for (int g = 0; g < groups; g++) {
      Weights::widen(first.data + g * first.stride, tiles + g * 2 * kTileBytes);
      Weights::widen(second.data + g * second.stride, tiles + (g * 2 + 1) * kTileBytes);
    }
    first = {tiles, 2 * kTileBytes}, second = {tiles + kTileBytes, 2 * kTileBytes};
  }
  alignas(64) float sums[2][kRows * kPairRows];  // of these 32 rows, and of those before
  const auto multiply = [&](int row, auto two) {
    const float* before = sums[row / kRows % 2 ^ 1];
    const Narrow* inputs = x.narrow_at(row, 0);
    zero_sums<two>();
    for (int g = 0; g < groups; g++, inputs += kRows * kGroup) {
      ahead.more();
      tile_step<two>(first.data + g * first.stride, second.data + g * second.stride, inputs);
      const int done = g * each;
      if (row > 0 && done < kRows)
        finish(row - kRows + done, std::min(each, kRows - done), before + done * kPairRows);
    }
    store_sums<two>(sums[row / kRows % 2]);
  };
  int row = 0;
  for (; rows - row > kRowTile; row += kRows) multiply(row, std::true_type{});
  if (row < rows) multiply(row, std::false_type{});
  const int last = (rows - 1) / kRows * kRows;
  finish(last, rows - last, sums[last / kRows % 2]);
}

template <class Weights>
inline void amx_pairs(const Matrix& matrix, int first, int last, const Activations& x, int rows, const Output& out,
                      uint8_t* tiles) {
  use_linear_tiles(rows);
  const float unit = std::ldexp(1.0f, matrix.exponent);
  for (int pair = first; pair < last; pair++) {
    if (rows <= kRowTile) {
      few_rows<Weights, false>(matrix, pair, x, rows, out, tiles);
    } else if (rows <= 2 * kRowTile) {
      few_rows<Weights, true>(matrix, pair, x, rows, out, tiles);
    } else {
      const Ahead next(matrix, pair + 1, last, rows);
      const auto first_tile = TileBlocks::of<Weights>(matrix, 2 * pair);
      const auto second_tile = TileBlocks::of<Weights>(matrix, 2 * pair + 1);
      many_rows<Weights>(first_tile, second_tile, x, rows, tiles, next, [&](int row, int count, const float* results) {
        finish_tile(results, count, out, row, pair * kPairRows, unit);
      });
    }
  }
}

// Gate and up side by side, a tile of each, so that what comes next has its inputs without a detour through memory.
template <class Weights>
inline void amx_gated_pairs(const Matrix& gate, const Matrix& up, int first, int last, const Activations& x, int rows,
                            const Activations& to, uint8_t* tiles) {
  use_linear_tiles(rows);
  const F32 gate_unit = splat(std::ldexp(1.0f, gate.exponent)), up_unit = splat(std::ldexp(1.0f, up.exponent));
  for (int tile = 2 * first; tile < 2 * last; tile++) {
    // Of the next pair one matrix for each tile of this one.
    const Ahead next(tile % 2 == 0 ? gate : up, tile / 2 + 1, last, rows);
    many_rows<Weights>(TileBlocks::of<Weights>(gate, tile), TileBlocks::of<Weights>(up, tile), x, rows, tiles, next,
                       [&](int row, int count, const float* results) {
                         Narrow* at = to.narrow_at(row, tile / 2) + tile % 2 * kTile;
                         for (int i = 0; i < count; i++, results += kPairRows, at += kGroup)
                           store_narrow(at, swiglu(mul(load(results), gate_unit), mul(load(results + kTile), up_unit)));
                       });
  }
}

}  // namespace segue
