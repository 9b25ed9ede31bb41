// Attention over bf16 pages on the matrix unit: up to 32 queries times the keys, or the values, of a page. Both lie in
// their pages the way it takes them. A query's result is the same bits whatever the others are, so one kernel serves the
// few heads of a lone token and the tiles of a prompt.
//
// Order of reduction: channels ascending, 32 at a time (16 where the width is no multiple of 32); values page by page,
// positions ascending. Inside a step as tiles.h says.
#pragma once
#include "attention_tile.h"
#include "tiles.h"

namespace segue {

constexpr int kQueryTile = 16;  // queries

// Tiles 0 .. 3: sums; 4, 5: queries or weights, [queries][step]; 6, 7: keys or values, [step / 2][16][2]. 0, 1 and 4
// belong to the first 16 queries, 2, 3 and 5 to the others.
inline void use_attention_tiles(TilesInUse& now, int queries, int step) {
  if (now.queries == queries && now.step == step) return;
  now = {queries, step};
  TileShapes shapes;
  for (int tile : {0, 1, 4}) shapes.set(tile, std::min(queries, kQueryTile), tile == 4 ? step * 2 : 64);
  if (queries > kQueryTile)
    for (int tile : {2, 3, 5}) shapes.set(tile, queries - kQueryTile, tile == 5 ? step * 2 : 64);
  for (int tile : {6, 7}) shapes.set(tile, step / 2, 64);
  shapes.use();
}

// Sums of queries times the keys of a page, to tiles Sums and, with More than 16 queries, Sums + 2.
template <int Sums, bool More>
SEGUE_INLINE void score_page(const uint8_t* keys, int width, int step, const Narrow* queries) {
  const size_t stride = size_t(width) * sizeof(Narrow);
  tile_zero<Sums>();
  if constexpr (More) tile_zero<Sums + 2>();
  for (int d = 0; d < width; d += step) {
    tile_stream<6>(keys + d * 32, 64);
    tile_load<4>(queries + d, stride);
    tile_dot<Sums, 4, 6>();
    if constexpr (More) {
      tile_load<5>(queries + kQueryTile * width + d, stride);
      tile_dot<Sums + 2, 5, 6>();
    }
  }
}

template <int Sums, bool More>
SEGUE_INLINE void store_scores(Weights& w, int column) {
  tile_store<Sums>(w.plain(0) + column, Weights::kPitch * sizeof(float));
  if constexpr (More) tile_store<Sums + 2>(w.plain(kQueryTile) + column, Weights::kPitch * sizeof(float));
}

// Two sets of sums by turns: one is stored while the other is computed.
template <bool More>
inline void score_pages(const SegmentOfTile& of, const Narrow* queries, int step, PagesAhead& ahead, Weights& weights) {
  for (int index = of.begin; index < of.end; index += 2) {
    ahead.some();
    score_page<0, More>(of.table.page(index), of.width, step, queries);
    if (index > of.begin) store_scores<1, More>(weights, of.column(index - 1));
    if (index + 1 < of.end) {
      ahead.some();
      score_page<1, More>(of.table.page(index + 1), of.width, step, queries);
    }
    store_scores<0, More>(weights, of.column(index));
  }
  if ((of.end - of.begin) % 2 == 0) store_scores<1, More>(weights, of.column(of.end - 1));
}

inline void score_on_tiles(const SegmentOfTile& of, PagesAhead& ahead, AttentionScratch& scratch) {
  const int step = of.width % 32 == 0 ? 32 : 16;
  const Narrow* narrow = scratch.queries.narrow + size_t(of.query) * of.width;
  use_attention_tiles(scratch.tiles, of.queries, step);
  const auto score = of.queries > kQueryTile ? score_pages<true> : score_pages<false>;
  score(of, narrow, step, ahead, scratch.weights);
}

// mixed[query][16 channels, with a Second vector 32] = weights * values. offset: of the first of these in a page
template <bool More, bool Second>
inline void mix_vectors(const SegmentOfTile& of, size_t offset, PagesAhead& ahead, Weights& w, float* mixed) {
  constexpr size_t kStride = Weights::kPitch * sizeof(float);
  const size_t pitch = size_t(of.width) * 4;
  tile_zero<0>();
  if constexpr (Second) tile_zero<1>();
  if constexpr (More) tile_zero<2>();
  if constexpr (More && Second) tile_zero<3>();
  for (int index = of.begin; index < of.end; index++) {
    ahead.some();
    const uint8_t* values = of.table.page(index) + offset;
    const int column = of.column(index);
    tile_load<4>(w.narrow(0) + column, kStride);
    tile_stream<6>(values, pitch);
    tile_dot<0, 4, 6>();
    if constexpr (Second) {
      tile_stream<7>(values + 64, pitch);
      tile_dot<1, 4, 7>();
    }
    if constexpr (More) {
      tile_load<5>(w.narrow(kQueryTile) + column, kStride);
      tile_dot<2, 5, 6>();
    }
    if constexpr (More && Second) tile_dot<3, 5, 7>();
  }
  const size_t stride = size_t(of.width) * sizeof(float);
  tile_store<0>(mixed, stride);
  if constexpr (Second) tile_store<1>(mixed + kLanes, stride);
  if constexpr (More) tile_store<2>(mixed + kQueryTile * of.width, stride);
  if constexpr (More && Second) tile_store<3>(mixed + kQueryTile * of.width + kLanes, stride);
}

inline void mix_on_tiles(const SegmentOfTile& of, PagesAhead& ahead, AttentionScratch& scratch, float* mixed) {
  const int vectors = of.width / kLanes;
  use_attention_tiles(scratch.tiles, of.queries, kPage);
  for (int vector = 0; vector < vectors; vector += 2) {
    const bool more = of.queries > kQueryTile, second = vector + 1 < vectors;
    const auto mix = more ? second ? mix_vectors<true, true> : mix_vectors<true, false>
                          : second ? mix_vectors<false, true> : mix_vectors<false, false>;
    mix(of, size_t(kPage) * of.width * 2 + vector * 64, ahead, scratch.weights, mixed + vector * kLanes);
  }
}

}  // namespace segue
