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
};

// One KV head of one sequence in one layer.
struct PageTable {
  const int64_t* pages;
  uint8_t* head;  // this layer's and head's block of page 0
  size_t page_bytes;

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

// Pages [begin, end) of a table.
struct Pages {
  PageTable table;
  int begin, end;
};

// Asks for pages that will be wanted after this segment, some lines at a time while it is computed: side by side, since
// a core has more lines on their way when they lie in several pages.
class PagesAhead {
 public:
  // pages: of one segment. bytes: of a page. times: how often some() will be called
  PagesAhead(const Pages& pages, size_t bytes, int times)
      : count_(std::max(pages.end - pages.begin, 0)), bytes_(bytes), step_((bytes / 64 / times + 1) * 64) {
    for (int i = 0; i < count_; i++) pages_[i] = pages.table.page(pages.begin + i);
  }

  SEGUE_INLINE void some() {
    const size_t end = std::min(at_ + step_, bytes_);
    for (size_t at = at_; at < end; at += 64)
      for (int i = 0; i < count_; i++) prefetch(pages_[i] + at);
    at_ = end;
  }

 private:
  const uint8_t* pages_[kSegmentPages];
  int count_;
  size_t bytes_, step_, at_ = 0;  // step_: of each page at a time
};

}  // namespace segue
