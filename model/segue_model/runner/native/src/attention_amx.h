// Attention over bf16 pages on the matrix unit: up to 16 queries times the 16 keys, or the 16 values, of a page. Pages
// lie the way it takes them. A query's result is the same bits whatever the others are, so one kernel serves the few
// heads of a lone token and the tiles of a prompt.
#pragma once
#include "kv_page.h"
#include "tiles.h"

namespace segue {

// Tiles 0 .. 3: sums, [queries][16]; 4: queries, [queries][32]; 5: queries or weights, [queries][16];
// 6: keys, [16][16][2]; 7: keys or values, [8][16][2].
inline void use_attention_tiles(int queries) {
  TileShapes shapes;
  for (int tile = 0; tile < 4; tile++) shapes.set(tile, queries, 64);
  shapes.set(4, queries, 64);
  shapes.set(5, queries, 32);
  shapes.set(6, 16, 64);
  shapes.set(7, 8, 64);
  shapes.use();
}

// Channels ascending, 32 at a time: weights.plain[query][column ..]
template <int Sums>
SEGUE_INLINE void score_on_tiles(const uint8_t* page, int width, const Queries& q, Weights& w, int column) {
  const size_t stride = size_t(width) * sizeof(Narrow);
  tile_zero<Sums>();
  int d = 0;
  for (; d + 32 <= width; d += 32) {
    tile_load<4>(q.narrow + d, stride);
    tile_load<6>(page + d * 32, 64);
    tile_dot<Sums, 4, 6>();
  }
  if (d < width) {
    tile_load<5>(q.narrow + d, stride);
    tile_load<7>(page + d * 32, 64);
    tile_dot<Sums, 5, 7>();
  }
  tile_store<Sums>(w.plain + column, kSegment * sizeof(float));
}

// Pages ascending: mixed[query][16 * V channels] = weights * V. page(i): the i-th page's first byte.
template <int V, class PageAt>
SEGUE_INLINE void mix_on_tiles(PageAt page, int pages, int width, const Weights& w, int column, float* mixed) {
  const size_t stride = size_t(width) * 4, out = size_t(width) * sizeof(float);
  tile_zero<0>();
  if constexpr (V > 1) tile_zero<1>();
  if constexpr (V > 2) tile_zero<2>();
  if constexpr (V > 3) tile_zero<3>();
  for (int i = 0; i < pages; i++) {
    const uint8_t* values = page(i);
    tile_load<5>(w.narrow + column + i * kPage, kSegment * sizeof(Narrow));
    tile_load<7>(values, stride);
    tile_dot<0, 5, 7>();
    if constexpr (V > 1) {
      tile_load<7>(values + 64, stride);
      tile_dot<1, 5, 7>();
    }
    if constexpr (V > 2) {
      tile_load<7>(values + 128, stride);
      tile_dot<2, 5, 7>();
    }
    if constexpr (V > 3) {
      tile_load<7>(values + 192, stride);
      tile_dot<3, 5, 7>();
    }
  }
  tile_store<0>(mixed, out);
  if constexpr (V > 1) tile_store<1>(mixed + 16, out);
  if constexpr (V > 2) tile_store<2>(mixed + 32, out);
  if constexpr (V > 3) tile_store<3>(mixed + 48, out);
}

}  // namespace segue
