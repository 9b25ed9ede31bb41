// Grouped-query attention of a block of up to kBlock queries of one KV head over a page table.
//
// Order of reduction: attention_softmax.h says how positions are cut into segments and segments are merged. A query's
// neighbours in a tile cannot touch its bits, since what it must not see has weight exactly zero.
#pragma once
#include <type_traits>

#include "attention_tile.h"
#if defined(SEGUE_AMX)
#include "attention_amx.h"
#endif

namespace segue {

// Calls run(std::integral_constant<int, N>) for pieces of at most Max until `count` are done.
template <int Max, class Run>
SEGUE_INLINE void in_pieces(int count, Run run) {
  int at = 0;
  for (; count - at >= Max; at += Max) run(at, std::integral_constant<int, Max>{});
  if constexpr (Max > 1) {
    if (at < count) in_pieces<Max - 1>(count - at, [&](int rest, auto n) { run(at + rest, n); });
  }
}

// How the pages of one type meet the queries of a tile.
template <class Page>
struct Kernel {
  // How often a tile asks for pages ahead for each of its own, besides once a query.
  static int asks(int) { return 2; }

  // Scores of all queries against all pages of the segment, to the plain weights.
  static void score(const SegmentOfTile& of, PagesAhead& ahead, AttentionScratch& scratch) {
    for (int index = of.begin; index < of.end; index++) {
      ahead.some();
      in_pieces<kTileQueries>(of.queries, [&](int row, auto n) {
        Page::template score<n.value>(of.table.page(index), of.width, scratch.queries, of.query + row, scratch.weights,
                                      row, of.column(index));
      });
    }
  }

  // Weights times values, positions ascending.
  static void mix(const SegmentOfTile& of, PagesAhead& ahead, AttentionScratch& scratch, float* mixed) {
    std::fill_n(mixed, size_t(of.queries) * of.width, 0.0f);
    for (int index = of.begin; index < of.end; index++) {
      ahead.some();
      for (int row = 0; row < of.queries; row++)
        Page::weigh(of.table.page(index), of.width, scratch.weights, row, of.column(index));
      in_pieces<kTileQueries>(of.queries, [&](int row, auto n) {
        in_pieces<kMixVectors>(of.width / kLanes, [&](int vector, auto v) {
          Page::template mix<n.value, v.value>(of.table.page(index), of.width, scratch.weights, row, of.column(index),
                                               vector * kLanes, mixed);
        });
      });
    }
  }
};

#if defined(SEGUE_AMX)
template <>
struct Kernel<PageBf16> {
  static int asks(int width) { return 1 + (width + 2 * kLanes - 1) / (2 * kLanes); }
  static void score(const SegmentOfTile& of, PagesAhead& ahead, AttentionScratch& scratch) {
    score_on_tiles(of, ahead, scratch);
  }
  static void mix(const SegmentOfTile& of, PagesAhead& ahead, AttentionScratch& scratch, float* mixed) {
    mix_on_tiles(of, ahead, scratch, mixed);
  }
};
#endif

// All: every query sees all columns. Row by row in two rounds, so that the weights of one row need not wait for the
// highest score of the next.
template <class Page, bool All, class ColumnsOf>
inline void soften_rows(Weights& weights, int rows, ColumnsOf columns_of, PagesAhead& ahead, const Partial& out) {
  for (int row = 0; row < rows; row++) out.peak[row] = peak_of<All>(weights, row, columns_of(row));
  for (int row = 0; row < rows; row++) {
    ahead.some();
    out.total[row] = soften<Page, All>(weights, row, columns_of(row), out.peak[row]);
  }
}

// A tile whose queries see something of pages [of.begin, of.end).
template <class Page>
inline void attend_tile(const SegmentOfTile& of, const Sight* sights, AttentionScratch& scratch, PagesAhead& ahead,
                        const Partial& out) {
  Kernel<Page>::score(of, ahead, scratch);
  const auto columns_of = [&](int row) {
    const int begin = of.column(of.begin), end = of.column(of.end);
    const int first = sights[of.query + row].first - of.position(), last = sights[of.query + row].last - of.position();
    return Columns{begin, end, std::max(first, begin), std::min(last + 1, end)};
  };
  const int last = of.queries - 1;
  if (columns_of(0).all() && columns_of(last).all()) {
    const Columns whole = columns_of(0);
    soften_rows<Page, true>(scratch.weights, of.queries, [=](int) { return whole; }, ahead, out);
  } else {
    soften_rows<Page, false>(scratch.weights, of.queries, columns_of, ahead, out);
  }
  Kernel<Page>::mix(of, ahead, scratch, out.mixed);
}

// merged := merged and then one segment, for all queries of a block, whose sights ascend. Pages [begin, end) of the
// table lie in the segment; `next_pages` will be wanted after it.
template <class Page>
inline void attend_segment(const PageTable& table, int width, int queries, const Sight* sights, int begin, int end,
                           const Pages& next_pages, AttentionScratch& scratch, const Partial& merged) {
  const int tiles = (queries + kQueries - 1) / kQueries;
  const int times = (end - begin) * tiles * Kernel<Page>::asks(width) + queries;
  PagesAhead ahead(next_pages, Page::bytes(width), times);
  const Partial next = Partial::at(scratch.segment, width, kQueries);
  for (int query = 0; query < queries; query += kQueries) {
    const int count = std::min(kQueries, queries - query);
    const int first = std::max(begin, sights[query].first / kPage);
    const int last = std::min(end, sights[query + count - 1].last / kPage + 1);
    if (first >= last) continue;  // these see nothing of it
    attend_tile<Page>({table, width, query, count, first, last}, sights, scratch, ahead, next);
    merge(merged.from(query, width), next, count, width);
  }
}

}  // namespace segue
