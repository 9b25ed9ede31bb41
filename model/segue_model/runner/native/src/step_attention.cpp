// The part of a step that touches K and V: appending to pages, and attention over them.
#include <algorithm>
#include <cstring>

#include "attention.h"
#include "rope.h"
#include "step.h"

namespace segue {

void Step::append_all(const Layer& layer, int index) {
  const int heads = model_.shape.kv_heads;
  model_.pool.share(static_cast<int>(now_->page_pieces.size()) * heads, [&](int thread, int begin, int end) {
    for (int item = begin; item < end; item++) {
      const Span& piece = now_->page_pieces[item / heads];
      for (int row = 0; row < piece.rows; row++) append(layer, index, piece, row, item % heads, *scratch_[thread]);
    }
  });
}

void Step::append(const Layer& layer, int index, const Span& span, int row, int head, AttentionScratch& scratch) {
  const int head_dim = model_.shape.head_dim, width = model_.head_width();
  const int64_t position = span.start + row;
  const float* k = qkv_row(span.row + row) + q_width_ + head * head_dim;
  const float* v = k + kv_width_;
  if (layer.k_norm != nullptr) {
    norm_head(k, layer.k_norm, head_dim, width, model_.shape.eps, scratch.normed);
    k = scratch.normed;
  }
  const size_t angle = size_t(position) * (head_dim / 2);
  rotate(k, model_.cos + angle, model_.sin + angle, head_dim, scratch.key);
  std::memcpy(scratch.value, v, sizeof(float) * head_dim);
  std::fill(scratch.key + head_dim, scratch.key + width, 0.0f);
  std::fill(scratch.value + head_dim, scratch.value + width, 0.0f);
  const PageTable table{span.pages, model_.head_block(index, head), model_.page_bytes()};
  uint8_t* page = table.page(static_cast<int>(position / kPage));
  // A page that begins here may hold anything; zero times a stale NaN would still be NaN.
  if (position % kPage == 0) std::memset(page, 0, model_.head_bytes());
  model_.write_position(page, static_cast<int>(position % kPage), scratch.key, scratch.value);
}

void Step::load_queries(const Layer& layer, const AttentionItem& item, AttentionScratch& scratch, Sight* sights) {
  const Shape& shape = model_.shape;
  const Span& span = now_->spans[item.span];
  const int head_dim = shape.head_dim, width = model_.head_width(), group = shape.heads / shape.kv_heads;
  const float scale = kLog2E / std::sqrt(static_cast<float>(head_dim));
  for (int i = 0; i < item.queries; i++) {
    const int row = (item.query + i) / group, head = item.head * group + (item.query + i) % group;
    const int position = static_cast<int>(span.start) + row;
    sights[i] = {shape.window > 0 ? std::max(0, position - shape.window + 1) : 0, position};
    const float* q = qkv_row(span.row + row) + head * head_dim;
    if (layer.q_norm != nullptr) {
      norm_head(q, layer.q_norm, head_dim, width, shape.eps, scratch.normed);
      q = scratch.normed;
    }
    float* to = scratch.queries.plain + i * width;
    const size_t angle = size_t(position) * (head_dim / 2);
    rotate(q, model_.cos + angle, model_.sin + angle, head_dim, to);
    for (int d = 0; d < head_dim; d++) to[d] *= scale;
    std::fill(to + head_dim, to + width, 0.0f);
  }
}

// The pages of an item that are read first.
Pages Step::first_pages(int index, const AttentionItem& item) {
  return {table_of(index, item), item.page, std::min(item.end, segment_end(item.page))};
}

PageTable Step::table_of(int index, const AttentionItem& item) {
  return {now_->spans[item.span].pages, model_.head_block(index, item.head), model_.page_bytes()};
}

// number: of the item. The one that this thread is likely to take next is as far ahead as there are threads.
void Step::attend(const Layer& layer, int index, size_t number, AttentionScratch& scratch) {
  const AttentionItem& item = now_->items[number];
  const Span& span = now_->spans[item.span];
  const bool ends_table = item.end == pages_for(span.start + span.rows);
  if (!now_->appends_first && ends_table) append(layer, index, span, 0, item.head, scratch);
  Sight sights[kBlock];
  load_queries(layer, item, scratch, sights);
  const size_t later = number + model_.pool.threads();
  const Pages next = later < now_->items.size() ? first_pages(index, now_->items[later]) : Pages{};
  const PageTable table = table_of(index, item);
  switch (static_cast<KvType>(model_.shape.kv_type)) {
    case KvType::float32: return attend_pages<PageF32>(layer, table, item, sights, next, scratch);
    case KvType::bf16: return attend_pages<PageBf16>(layer, table, item, sights, next, scratch);
    case KvType::int8: return attend_pages<PageInt8>(layer, table, item, sights, next, scratch);
  }
}

template <class Page>
void Step::attend_pages(const Layer& layer, const PageTable& table, const AttentionItem& item, const Sight* sights,
                        const Pages& next_item, AttentionScratch& scratch) {
  const int width = model_.head_width();
  for (int i = 0; i < item.queries; i++) Page::prepare(scratch.queries, i, width);
  const Partial merged = item.split >= 0 ? part_of(item, item.part) : Partial::at(scratch.merged, width, kBlock);
  clear(merged, item.queries, width);
  scratch.tiles = {};  // linears have used them since
  for (int page = item.page; page < item.end;) {
    const int end = std::min(item.end, segment_end(page));
    const Pages next = end < item.end ? Pages{table, end, std::min(item.end, segment_end(end))} : next_item;
    attend_segment<Page>(table, width, item.queries, sights, page, end, next, scratch, merged);
    page = end;
  }
  release_matrix_unit();
  if (item.split >= 0)
    finish_part(layer, item, scratch);
  else
    write_mixed(layer, item, merged);
}

Partial Step::part_of(const AttentionItem& item, int part) const {
  const int width = model_.head_width();
  float* partials = now_->splits[item.split].partials;
  return Partial::at(partials + part * Partial::floats(width, item.queries), width, item.queries);
}

// The last thread to finish a part of a split block merges all of them.
void Step::finish_part(const Layer& layer, const AttentionItem& item, AttentionScratch& scratch) {
  std::atomic<int>& left = now_->left[item.split];
  if (left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const Split& split = now_->splits[item.split];
  left.store(split.parts, std::memory_order_relaxed);  // for the next layer
  const int width = model_.head_width();
  const Partial merged = Partial::at(scratch.merged, width, kBlock);
  clear(merged, item.queries, width);
  for (int part = 0; part < split.parts; part++) merge(merged, part_of(item, part), item.queries, width);
  write_mixed(layer, item, merged);
}

void Step::write_mixed(const Layer& layer, const AttentionItem& item, const Partial& partial) {
  const Shape& shape = model_.shape;
  const int head_dim = shape.head_dim, width = model_.head_width(), group = shape.heads / shape.kv_heads;
  const bool narrow = mixes_narrow(layer);
  for (int i = 0; i < item.queries; i++) {
    const int row = now_->spans[item.span].row + (item.query + i) / group;
    const int column = (item.head * group + (item.query + i) % group) * head_dim;
    const float inverse = 1.0f / partial.total[i];
    const float* from = partial.mixed + size_t(i) * width;
    if (narrow) {
      for (int d = 0; d < head_dim; d += kLanes)
        store_narrow(of_mixed_.narrow_at(row, (column + d) / kGroup) + (column + d) % kGroup,
                     mul(load(from + d), splat(inverse)));
    } else {
      float* to = mixed_ + size_t(row) * q_width_ + column;
      for (int d = 0; d < head_dim; d++) to[d] = from[d] * inverse;
    }
  }
}

}  // namespace segue
