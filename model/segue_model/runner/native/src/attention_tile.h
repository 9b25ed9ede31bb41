// What attention kernels work on: queries of one KV head of one sequence, and a segment of its pages.
#pragma once
#include "attention_softmax.h"
#include "kv_page.h"

namespace segue {

constexpr int kSegmentPages = kSegment / kPage;

inline int segment_end(int page) { return (page / kSegmentPages + 1) * kSegmentPages; }  // of the segment it lies in

// The shapes that the tiles of the matrix unit have now: to change them takes as long as 15 products.
struct TilesInUse {
  int queries = 0, step = 0;
};

struct AttentionScratch {
  Queries queries;
  Weights weights;
  alignas(64) float segment[Partial::floats(kMaxWidth, kQueries)];
  alignas(64) float merged[Partial::floats(kMaxWidth, kBlock)];
  alignas(64) float key[kMaxWidth], value[kMaxWidth], normed[kMaxWidth];
  TilesInUse tiles;
  // For the matrix unit, values of a segment: [pairs of pages][width / 16][16][16][2] bf16
  alignas(64) uint8_t values[kMatrixUnit ? kSegment * kMaxWidth * 2 : 64];
};

// One KV head of one sequence in one layer.
struct PageTable {
  const int64_t* pages;
  uint8_t* head;  // this layer's and head's block of page 0
  size_t page_bytes;
  bool cold;  // a lone token walks the pages once; the tiles of a prompt find them in the cache

  uint8_t* page(int index) const { return head + pages[index] * page_bytes; }
};

// Up to kQueries queries of a block, and pages [begin, end) of the table, which lie in one segment.
struct SegmentOfTile {
  const PageTable& table;
  int width;
  int query, queries;  // of the block
  int begin, end;

  int first_page() const { return begin / kSegmentPages * kSegmentPages; }
  int column(int page) const { return (page - first_page()) * kPage; }
  int position() const { return first_page() * kPage; }  // of column 0
};

// Asks for pages [begin, end), those of the next segment, some lines at a time while this one is computed.
template <class Page>
class PagesAhead {
 public:
  // times: how often some() will be called
  PagesAhead(const PageTable& table, int width, int begin, int end, int times)
      : table_(table), page_(begin), end_(end), page_bytes_(Page::bytes(width)) {
    lines_ = (end - begin) * page_bytes_ / 64 / times + 1;
    enter();
  }

  SEGUE_INLINE void some() {
    for (size_t i = 0; i < lines_ && page_ < end_; i++) {
      prefetch(at_);
      at_ += 64;
      if (at_ >= page_end_) page_++, enter();
    }
  }

 private:
  void enter() {
    if (page_ < end_) at_ = table_.page(page_), page_end_ = at_ + page_bytes_;
  }

  const PageTable& table_;
  int page_, end_;
  size_t page_bytes_, lines_;
  const uint8_t *at_ = nullptr, *page_end_ = nullptr;
};

template <class Page>
SEGUE_INLINE void prefetch_page(const SegmentOfTile& of, int index) {
  if (!of.table.cold || index >= of.end) return;
  const uint8_t* ahead = of.table.page(index);
  for (size_t i = 0; i < Page::bytes(of.width); i += 64) prefetch(ahead + i);
}

}  // namespace segue
