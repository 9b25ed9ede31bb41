// Grouped-query attention of up to kQueries queries of one KV head over a page table.
//
// Order of reduction: positions are cut into segments of 256, counted from 0. Inside a segment a softmax over its
// scores (lane by lane over the pages ascending, then across lanes) and a sum over its values, ascending; segments are
// merged ascending. What a query must not see has weight exactly zero, so its neighbours in a tile cannot touch its bits.
#pragma once
#include <algorithm>
#include <type_traits>

#include "kv_page.h"

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

// One segment for all queries of a tile. pages [begin, end) of the table lie in the segment.
template <class Page>
inline void attend_segment(const PageTable& table, int width, int queries, const Sight* sights, int begin, int end,
                           AttentionScratch& scratch, Partial& out) {
  const int base = begin * kPage / kSegment * kSegment, first_page = base / kPage;
  Weights& w = scratch.weights;
  for (int index = begin; index < end; index++) {
    if (table.cold && index + 2 < end) {
      const uint8_t* ahead = table.page(index + 2);
      for (size_t i = 0; i < Page::bytes(width); i += 64) prefetch(ahead + i);
    }
    in_pieces<kTileQueries>(queries, [&](int query, auto n) {
      Page::template score<n.value>(table.page(index), width, scratch.queries, query, w, (index - first_page) * kPage);
    });
  }
  clear(out, queries, width);
  for (int query = 0; query < queries; query++)
    soften<Page>(w, query, (begin - first_page) * kPage, (end - first_page) * kPage, base, sights[query], out);
  for (int index = begin; index < end; index++)
    in_pieces<kTileQueries>(queries, [&](int query, auto n) {
      in_pieces<kMixVectors>(width / kLanes, [&](int vector, auto v) {
        Page::template mix<n.value, v.value>(table.page(index), width, w, query, (index - first_page) * kPage,
                                             vector * kLanes, out.mixed);
      });
    });
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
