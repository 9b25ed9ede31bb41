// A window of a batch laid out for one pass: rows for the linears, items for attention. Made once, used by every layer.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "batch.h"

namespace segue {

// Consecutive tokens of one sequence.
struct Span {
  int row, rows;         // in the window
  int64_t start;         // position of the first
  const int64_t* pages;  // the sequence's whole table
};

// What one thread does at once: a tile of queries of one KV head over some segments.
struct AttentionItem {
  int span, head;
  int query, queries;     // of the span's rows * group, row by row
  int page, end;          // of the table
  int split;              // index into splits, -1: the item covers all that its queries see
  int part;               // of the split
};

// A tile whose segments are shared out; the thread that finishes the last one merges them in order.
struct Split {
  int parts, queries;
  float* partials;  // [parts] Partial
};

struct Window {
  std::vector<int64_t> token_ids;  // [rows]
  std::vector<Span> spans;
  std::vector<Span> page_pieces;  // the spans cut where pages end: one thread writes what one page gets
  std::vector<int> logit_rows;
  std::vector<AttentionItem> items;
  std::vector<Split> splits;
  std::unique_ptr<std::atomic<int>[]> left;  // [splits] parts not finished yet
  std::vector<float> partials;
  bool appends_first = false;  // K and V of all rows are written before any attention, not by the item that needs them

  int rows() const { return static_cast<int>(token_ids.size()); }
  void clear();
  void plan(const Shape& shape, int width);  // fills the rest from spans

  // The rows whose logits are wanted, moved together: what the last layer computes once K and V are written.
  void keep_wanted(const Window& all, const Shape& shape, int width);

 private:
  void cut_at_pages();
  void split_long_tiles();
  void place_partials(int width);
};

}  // namespace segue
