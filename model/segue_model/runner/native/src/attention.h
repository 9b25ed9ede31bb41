// Grouped-query attention of up to kQueries queries of one KV head over a page table.
//
// Order of reduction: positions are cut into segments of 256, counted from 0. Inside a segment a softmax over its
// scores (lane by lane over the pages ascending, then across lanes) and a sum over its values, ascending; segments are
// merged ascending. What a query must not see has weight exactly zero, so its neighbours in a tile cannot touch its bits.
#pragma once
#include <algorithm>
#include <type_traits>

#include "kv_page.h"
#if defined(SEGUE_AMX)
#include "attention_amx.h"
#endif

namespace segue {

// Softmax over some keys, not yet divided: peak = max score, total = sum exp(score - peak), mixed = the same over values.
struct Partial {
  float* peak;   // [kQueries]
  float* total;  // [kQueries]
  float* mixed;  // [kQueries][width]

  static constexpr size_t floats(int width) { return size_t(kQueries) * (width + 16); }
  static Partial at(float* memory, int width) {
    float* ends = memory + size_t(kQueries) * width;
    return {ends, ends + kQueries, memory};
  }
};

struct AttentionScratch {
  Queries queries;
  Weights weights;
  alignas(64) float segment[Partial::floats(kMaxWidth)];
  alignas(64) float merged[Partial::floats(kMaxWidth)];
  alignas(64) float key[kMaxWidth], value[kMaxWidth], normed[kMaxWidth];
};

// One KV head of one sequence in one layer.
struct PageTable {
  const int64_t* pages;
  uint8_t* head;  // this layer's and head's block of page 0
  size_t page_bytes;
  bool cold;  // a lone token walks the pages once; the tiles of a prompt find them in the cache

  uint8_t* page(int index) const { return head + pages[index] * page_bytes; }
};

// Positions a query sees: first .. last.
struct Sight {
  int first, last;
};

// Calls run(std::integral_constant<int, N>) for pieces of at most Max until `count` are done.
template <int Max, class Run>
SEGUE_INLINE void in_pieces(int count, Run run) {
  int at = 0;
  for (; count - at >= Max; at += Max) run(at, std::integral_constant<int, Max>{});
  if constexpr (Max > 1) {
    if (at < count) in_pieces<Max - 1>(count - at, [&](int rest, auto n) { run(at + rest, n); });
  }
}

inline void clear(Partial& partial, int queries, int width) {
  std::fill_n(partial.peak, queries, -INFINITY);
  std::fill_n(partial.total, queries, 0.0f);
  std::fill_n(partial.mixed, size_t(queries) * width, 0.0f);
}

// Scores of one query in a segment to weights. base: position of column 0; columns [begin, end).
template <class Page>
inline void soften(Weights& w, int query, int begin, int end, int base, Sight sight, Partial& out) {
  float* scores = w.plain + query * kSegment;
  F32 peaks = splat(-INFINITY);
  for (int column = begin; column < end; column += kPage) {
    const int first = sight.first - base - column, last = sight.last + 1 - base - column;
    F32 lanes = load(scores + column);
    if (first > 0 || last < kPage) {
      lanes = keep(lanes, first, last, -INFINITY);
      store(scores + column, lanes);
    }
    peaks = max(peaks, lanes);
  }
  const float peak = out.peak[query] = highest(peaks);
  F32 total = zero();
  for (int column = begin; column < end; column += kPage) {
    const int first = sight.first - base - column, last = sight.last + 1 - base - column;
    F32 lanes = zero();
    if (first < kPage && last > 0) {
      lanes = exp(sub(load(scores + column), splat(peak)));
      if (first > 0 || last < kPage) lanes = keep(lanes, first, last, 0.0f);
    }
    Page::store_weights(w, query, column, lanes);
    total = add(total, lanes);
  }
  out.total[query] = sum(total);
}

// The queries of a tile in one segment, whose pages [begin, end) of the table are looked at.
struct SegmentOfTile {
  const PageTable& table;
  int width, queries, begin, end;

  int first_page() const { return begin * kPage / kSegment * (kSegment / kPage); }
  int column(int page) const { return (page - first_page()) * kPage; }
};

template <class Page>
SEGUE_INLINE void prefetch_page(const SegmentOfTile& of, int index) {
  if (!of.table.cold || index >= of.end) return;
  const uint8_t* ahead = of.table.page(index);
  for (size_t i = 0; i < Page::bytes(of.width); i += 64) prefetch(ahead + i);
}

// Scores of all queries against all pages of the segment, to weights.plain.
template <class Page>
inline void score_segment(const SegmentOfTile& of, AttentionScratch& scratch) {
  for (int index = of.begin; index < of.end; index++) {
    prefetch_page<Page>(of, index + 2);
    in_pieces<kTileQueries>(of.queries, [&](int query, auto n) {
      Page::template score<n.value>(of.table.page(index), of.width, scratch.queries, query, scratch.weights,
                                    of.column(index));
    });
  }
}

// Weights times values, positions ascending.
template <class Page>
inline void mix_segment(const SegmentOfTile& of, const Weights& weights, float* mixed) {
  std::fill_n(mixed, size_t(of.queries) * of.width, 0.0f);
  for (int index = of.begin; index < of.end; index++)
    in_pieces<kTileQueries>(of.queries, [&](int query, auto n) {
      in_pieces<kMixVectors>(of.width / kLanes, [&](int vector, auto v) {
        Page::template mix<n.value, v.value>(of.table.page(index), of.width, weights, query, of.column(index),
                                             vector * kLanes, mixed);
      });
    });
}

#if defined(SEGUE_AMX)
template <>
inline void score_segment<PageBf16>(const SegmentOfTile& of, AttentionScratch& scratch) {
  use_attention_tiles(of.queries);
  for (int index = of.begin; index < of.end; index++) {
    prefetch_page<PageBf16>(of, index + 2);
    const uint8_t* page = of.table.page(index);
    if (index % 2 == 0)
      score_on_tiles<0>(page, of.width, scratch.queries, scratch.weights, of.column(index));
    else
      score_on_tiles<1>(page, of.width, scratch.queries, scratch.weights, of.column(index));
  }
}

template <>
inline void mix_segment<PageBf16>(const SegmentOfTile& of, const Weights& weights, float* mixed) {
  in_pieces<4>(of.width / kLanes, [&](int vector, auto v) {
    const auto values = [&](int i) {
      return of.table.page(of.begin + i) + (size_t(kPage) * of.width + vector * kLanes * 2) * 2;
    };
    mix_on_tiles<v.value>(values, of.end - of.begin, of.width, weights, of.column(of.begin), mixed + vector * kLanes);
  });
}
#endif

// One segment for all queries of a tile. pages [begin, end) of the table lie in the segment.
template <class Page>
inline void attend_segment(const PageTable& table, int width, int queries, const Sight* sights, int begin, int end,
                           AttentionScratch& scratch, Partial& out) {
  const SegmentOfTile of{table, width, queries, begin, end};
  score_segment<Page>(of, scratch);
  for (int query = 0; query < queries; query++)
    soften<Page>(scratch.weights, query, of.column(begin), of.column(end), of.first_page() * kPage, sights[query], out);
  mix_segment<Page>(of, scratch.weights, out.mixed);
}

// merged := merged and then `next`, which covers later positions.
inline void merge(Partial& merged, const Partial& next, int queries, int width) {
  for (int query = 0; query < queries; query++) {
    if (next.peak[query] == -INFINITY) continue;  // sees nothing of it
    const float peak = std::max(merged.peak[query], next.peak[query]);
    const float old_factor = std::exp(merged.peak[query] - peak), new_factor = std::exp(next.peak[query] - peak);
    merged.total[query] = merged.total[query] * old_factor + next.total[query] * new_factor;
    merged.peak[query] = peak;
    float* mixed = merged.mixed + query * width;
    const float* more = next.mixed + query * width;
    for (int i = 0; i < width; i += kLanes)
      store(mixed + i, fma(load(more + i), splat(new_factor), mul(load(mixed + i), splat(old_factor))));
  }
}

}  // namespace segue
