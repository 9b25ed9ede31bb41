#include "batch.h"

namespace segue {

Fault BatchChecker::check_slice(const Batch& batch, int64_t slice, const int64_t* tokens, const int64_t* pages,
                                int64_t& value) const {
  const int64_t length = batch.lengths[slice], start = batch.starts[slice];
  if (length < 1) return Fault::empty;
  if (start < 0 || start > model_.shape.context || length > model_.shape.context - start) return Fault::position;
  if (batch.tables[slice] < pages_for(start + length)) return Fault::cover;
  for (int64_t i = 0; i < length; i++)
    if ((value = tokens[i]) < 0 || value >= model_.shape.vocab) return Fault::token;
  for (int64_t i = 0; i < pages_for(start + length); i++)
    if ((value = pages[i]) < 0 || value >= model_.shape.num_pages) return Fault::page;
  return Fault::none;
}

// No page may be written by one slice and used by another, nor stand twice in a table that writes it.
Complaint BatchChecker::check_sharing(const Batch& batch) {
  const auto each_page = [&](auto visit) {
    const int64_t* pages = batch.pages;
    for (int64_t slice = 0; slice < batch.slices; pages += batch.tables[slice++])
      for (int64_t i = 0; i < pages_for(batch.starts[slice] + batch.lengths[slice]); i++) visit(slice, i, pages[i]);
  };
  Complaint complaint{Fault::none, 0, 0};
  each_page([&](int64_t, int64_t, int64_t page) { users_[page]++; });
  each_page([&](int64_t slice, int64_t index, int64_t page) {
    const bool written = index >= batch.starts[slice] / kPage;
    if (written && users_[page] > 1 && complaint.fault == Fault::none) complaint = {Fault::shared, slice, page};
  });
  each_page([&](int64_t, int64_t, int64_t page) { users_[page] = 0; });
  return complaint;
}

Complaint BatchChecker::check(const Batch& batch) {
  const int64_t *tokens = batch.token_ids, *pages = batch.pages;
  for (int64_t slice = 0; slice < batch.slices; slice++) {
    int64_t value = 0;
    const Fault fault = check_slice(batch, slice, tokens, pages, value);
    if (fault != Fault::none) return {fault, slice, value};
    tokens += batch.lengths[slice];
    pages += batch.tables[slice];
  }
  return check_sharing(batch);
}

}  // namespace segue
