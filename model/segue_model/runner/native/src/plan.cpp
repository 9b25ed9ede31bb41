#include "plan.h"

#include <algorithm>

#include "attention_tile.h"

namespace segue {
namespace {

constexpr int kItemsPerThread = 8;  // with fewer tiles than that, long ones are split to keep all threads busy

int first_visible_page(const Shape& shape, int64_t position) {
  return shape.window > 0 ? static_cast<int>(std::max<int64_t>(0, position - shape.window + 1) / kPage) : 0;
}

// Queries of a block: the more, the less often pages are fetched, but all threads shall have some blocks.
int block_size(const Shape& shape, const std::vector<Span>& spans) {
  int queries = 0;
  for (const Span& span : spans) queries += span.rows * shape.heads;
  return std::clamp(queries / (kItemsPerThread * shape.threads) / kQueries * kQueries, kQueries, kBlock);
}

std::vector<AttentionItem> whole_blocks(const Shape& shape, const std::vector<Span>& spans) {
  const int group = shape.heads / shape.kv_heads, block = block_size(shape, spans);
  std::vector<AttentionItem> tiles;
  for (size_t index = 0; index < spans.size(); index++) {
    const Span& span = spans[index];
    for (int query = 0; query < span.rows * group; query += block) {
      const int count = std::min(block, span.rows * group - query);
      const int64_t first = span.start + query / group, last = span.start + (query + count - 1) / group;
      const int page = first_visible_page(shape, first), end = static_cast<int>(pages_for(last + 1));
      for (int head = 0; head < shape.kv_heads; head++)
        tiles.push_back({static_cast<int>(index), head, query, count, page, end, -1, 0});
    }
  }
  return tiles;
}

int segments_of(const AttentionItem& tile) { return (tile.end - 1) / kSegmentPages - tile.page / kSegmentPages + 1; }

}  // namespace

void Window::clear() {
  token_ids.clear();
  spans.clear();
  logit_rows.clear();
}

void Window::keep_wanted(const Window& all, const Shape& shape, int width) {
  clear();
  size_t wanted = 0;
  for (const Span& span : all.spans)
    for (; wanted < all.logit_rows.size() && all.logit_rows[wanted] < span.row + span.rows; wanted++) {
      const int from = all.logit_rows[wanted], row = rows();
      const bool goes_on = row > 0 && spans.back().pages == span.pages && all.logit_rows[wanted - 1] == from - 1;
      if (goes_on)
        spans.back().rows++;
      else
        spans.push_back({row, 1, span.start + from - span.row, span.pages});
      token_ids.push_back(all.token_ids[from]);
      logit_rows.push_back(row);
    }
  plan(shape, width);
  appends_first = true;
}

void Window::cut_at_pages() {
  page_pieces.clear();
  for (const Span& span : spans)
    for (int row = 0; row < span.rows;) {
      const int64_t position = span.start + row;
      const int count = std::min(span.rows - row, static_cast<int>(kPage - position % kPage));
      page_pieces.push_back({span.row + row, count, position, span.pages});
      row += count;
    }
}

void Window::split_long_tiles() {
  std::vector<AttentionItem> pieces;
  for (AttentionItem tile : items) {
    if (segments_of(tile) == 1) {
      pieces.push_back(tile);
      continue;
    }
    tile.split = static_cast<int>(splits.size());
    splits.push_back({segments_of(tile), tile.queries, nullptr});
    for (int page = tile.page; page < tile.end; page = segment_end(page), tile.part++) {
      pieces.push_back(tile);
      pieces.back().page = page;
      pieces.back().end = std::min(tile.end, segment_end(page));
    }
  }
  items = std::move(pieces);
}

void Window::place_partials(int width) {
  const auto floats_of = [&](const Split& split) { return split.parts * Partial::floats(width, split.queries); };
  size_t floats = 0;
  for (const Split& split : splits) floats += floats_of(split);
  if (partials.size() < floats) partials.resize(floats);
  left = std::make_unique<std::atomic<int>[]>(splits.size());
  float* next = partials.data();
  for (size_t i = 0; i < splits.size(); i++) {
    splits[i].partials = next;
    next += floats_of(splits[i]);
    left[i].store(splits[i].parts, std::memory_order_relaxed);
  }
}

void Window::plan(const Shape& shape, int width) {
  appends_first = shape.heads / shape.kv_heads > kQueries;
  for (const Span& span : spans) appends_first |= span.rows > 1;
  cut_at_pages();
  items = whole_blocks(shape, spans);
  splits.clear();
  if (shape.threads > 1 && items.size() < size_t(kItemsPerThread) * shape.threads) split_long_tiles();
  place_partials(width);
  const auto cost = [](const AttentionItem& item) { return (item.end - item.page) * item.queries; };
  std::stable_sort(items.begin(), items.end(), [&](const auto& a, const auto& b) { return cost(a) > cost(b); });
}

}  // namespace segue
