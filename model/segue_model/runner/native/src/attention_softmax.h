// Softmax over the keys of a segment, and over segments.
//
// Positions are cut into segments of 256, counted from 0. Inside a segment: maximum, exponentials, their sum lane by
// lane over the pages ascending, then across lanes; segments are merged ascending. What a query must not see has weight
// exactly zero. Scores come multiplied with log2 e, so that all exponentials are powers of two.
#pragma once
#include <algorithm>

#include "kv_page.h"

namespace segue {

constexpr float kLog2E = 1.44269504f;

// Softmax of some queries over some keys, not yet divided: peak = max score, total = sum 2^(score - peak),
// mixed = the same sum over values.
struct Partial {
  float *peak, *total;  // [queries]
  float* mixed;         // [queries][width]

  static constexpr size_t floats(int width, int queries) { return (size_t(queries) + kLanes) * (width + 2); }
  static Partial at(float* memory, int width, int queries) {
    float* ends = memory + size_t(queries) * width;
    return {ends, ends + queries + kLanes, memory};  // a vector may end beyond the last query
  }
  Partial from(int query, int width) const { return {peak + query, total + query, mixed + size_t(query) * width}; }
};

// Positions a query sees: first .. last.
struct Sight {
  int first, last;
};

inline void clear(const Partial& partial, int queries, int width) {
  std::fill_n(partial.peak, queries, -INFINITY);
  std::fill_n(partial.total, queries, 0.0f);
  std::fill_n(partial.mixed, size_t(queries) * width, 0.0f);
}

// Columns of a row of scores: [begin, end) are whole pages, of which the query sees [first, last).
struct Columns {
  int begin, end, first, last;

  bool none() const { return first >= last; }
  bool all() const { return first == begin && last == end; }
  int seen() const { return first / kPage * kPage; }  // the first page of which something is seen
  int whole() const { return last / kPage * kPage; }  // the end of the last page seen to its end
};

// The highest score of a row. All: the query sees all columns.
template <bool All>
SEGUE_INLINE float peak_of(const Weights& w, int row, Columns columns) {
  if (!All && columns.none()) return -INFINITY;
  const float* scores = w.plain(row);
  const auto at = [&](int column) {
    const F32 lanes = load(scores + column);
    return All ? lanes : keep(lanes, columns.first - column, columns.last - column, -INFINITY);
  };
  const int seen = columns.seen(), whole = columns.whole();
  F32 peaks = at(seen);
  for (int column = seen + kPage; column < whole; column += kPage) peaks = max(peaks, load(scores + column));
  if (!All && seen < whole && whole < columns.last) peaks = max(peaks, at(whole));
  return highest(peaks);
}

// Scores of a row to weights. Returns their sum.
template <class Page, bool All>
SEGUE_INLINE float soften(Weights& w, int row, Columns columns, float peak) {
  const auto clear_weights = [&](int column, int end) {
    for (; column < end; column += kPage) Page::store_weights(w, row, column, zero());
  };
  if (!All && columns.none()) {
    clear_weights(columns.begin, columns.end);
    return 0;
  }
  const float* scores = w.plain(row);
  const auto weigh = [&](int column, bool edge) {
    F32 weights = exp2(sub(load(scores + column), splat(peak)));
    if (!All && edge) weights = keep(weights, columns.first - column, columns.last - column, 0.0f);
    Page::store_weights(w, row, column, weights);
    return weights;
  };
  const int seen = columns.seen(), whole = columns.whole();
  if (!All) clear_weights(columns.begin, seen);
  F32 total = weigh(seen, true);
  int column = seen + kPage;
  for (; column < whole; column += kPage) total = add(total, weigh(column, false));
  if (!All) {
    if (column < columns.last) {
      total = add(total, weigh(column, true));
      column += kPage;
    }
    clear_weights(column, columns.end);
  }
  return sum(total);
}

// merged := merged and then `next`, which covers later positions.
inline void merge(const Partial& merged, const Partial& next, int queries, int width) {
  for (int from = 0; from < queries; from += kLanes) {
    const F32 ours = load(merged.peak + from), theirs = load(next.peak + from), peaks = max(ours, theirs);
    alignas(64) float peak[kLanes], keeps[kLanes], takes[kLanes];
    store(peak, peaks);
    store(keeps, exp2(sub(ours, peaks)));
    store(takes, exp2(sub(theirs, peaks)));
    for (int i = 0; i < kLanes && from + i < queries; i++) {
      const int query = from + i;
      if (next.peak[query] == -INFINITY) continue;  // sees nothing of it
      merged.total[query] = merged.total[query] * keeps[i] + next.total[query] * takes[i];
      merged.peak[query] = peak[i];
      float* mixed = merged.mixed + size_t(query) * width;
      const float* more = next.mixed + size_t(query) * width;
      for (int d = 0; d < width; d += kLanes)
        store(mixed + d, fma(load(more + d), splat(takes[i]), mul(load(mixed + d), splat(keeps[i]))));
    }
  }
}

}  // namespace segue
