// A ragged batch as it comes from outside: checked before anything is read or written through it.
#pragma once
#include <cstdint>
#include <vector>

#include "model.h"

namespace segue {

enum class Want : int32_t { nothing = 0, last = 1, all = 2 };

// Mirrored by library.py.
struct Batch {
  int64_t slices;
  const int64_t* lengths;    // [slices] tokens of each
  const int64_t* starts;     // [slices] positions already computed
  const int64_t* tables;     // [slices] pages of each table
  const int32_t* wants;      // [slices] Want
  const int64_t* token_ids;  // the slices' tokens, one after the other
  const int64_t* pages;      // the slices' tables, one after the other
  float* logits;             // [wanted rows][padded vocab]
};

enum class Fault : int32_t { none = 0, empty, position, cover, token, page, shared };

// Mirrored by library.py.
struct Complaint {
  Fault fault;
  int64_t slice, value;
};

class BatchChecker {
 public:
  explicit BatchChecker(const Model& model) : model_(model), users_(model.shape.num_pages) {}
  Complaint check(const Batch& batch);

 private:
  Fault check_slice(const Batch& batch, int64_t slice, const int64_t* tokens, const int64_t* pages, int64_t& value) const;
  Complaint check_sharing(const Batch& batch);

  const Model& model_;
  std::vector<int32_t> users_;  // how many tables of the batch name a page; all zero between calls
};

inline int64_t pages_for(int64_t positions) { return (positions + kPage - 1) / kPage; }

}  // namespace segue
