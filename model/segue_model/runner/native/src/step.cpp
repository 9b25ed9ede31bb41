#include "step.h"

#include <algorithm>
#include <cstring>

#include "pack.h"

namespace segue {
namespace {

Needs needs_of(std::initializer_list<const Matrix*> matrices) {
  Needs needs;
  for (const Matrix* matrix : matrices) needs.add(*matrix);
  return needs;
}

}  // namespace

Step::Step(Model& model)
    : model_(model),
      dim_(padded(model.shape.dim)),
      q_width_(padded(model.shape.heads * model.shape.head_dim)),
      kv_width_(padded(model.shape.kv_heads * model.shape.head_dim)),
      ffn_width_(padded(model.shape.ffn_dim)) {
  const size_t rows = model.shape.max_rows;
  x_ = arena_.take<float>(rows * dim_);
  qkv_ = arena_.take<float>(rows * (q_width_ + 2 * kv_width_));
  mixed_ = arena_.take<float>(rows * q_width_);
  hidden_ = arena_.take<float>(rows * ffn_width_);
  of_dim_ = Activations::take(arena_, model.shape.max_rows, dim_ / kGroup);
  of_mixed_ = Activations::take(arena_, model.shape.max_rows, q_width_ / kGroup);
  of_hidden_ = Activations::take(arena_, model.shape.max_rows, ffn_width_ / kGroup);
  lone_dim_ = Activations::take(arena_, 1, dim_ / kGroup);
  lone_mixed_ = Activations::take(arena_, 1, q_width_ / kGroup);
  lone_hidden_ = Activations::take(arena_, 1, ffn_width_ / kGroup);
  for (int thread = 0; thread < model.shape.threads; thread++) {
    scratch_.push_back(std::make_unique<AttentionScratch>());
    linear_scratch_.push_back(LinearScratch::take(arena_, std::max({dim_, q_width_, ffn_width_}) / kGroup));
  }
}

void Step::forward(const Batch& batch) {
  const size_t max_rows = model_.shape.max_rows;
  const int64_t *tokens = batch.token_ids, *pages = batch.pages;
  logits_ = batch.logits;
  window_.clear();
  for (int64_t slice = 0; slice < batch.slices; pages += batch.tables[slice++]) {
    const int64_t length = batch.lengths[slice];
    const auto want = static_cast<Want>(batch.wants[slice]);
    for (int64_t done = 0; done < length;) {
      if (window_.token_ids.size() == max_rows) run_window();
      const int row = window_.rows();
      const int64_t start = batch.starts[slice] + done;
      const int count = static_cast<int>(std::min<int64_t>(length - done, max_rows - row));
      window_.spans.push_back({row, count, start, pages});
      for (int i = 0; i < count; i++) {
        window_.token_ids.push_back(tokens[i]);
        const bool last = done + i + 1 == length;
        if (want == Want::all || (want == Want::last && last)) window_.logit_rows.push_back(row + i);
      }
      tokens += count;
      done += count;
    }
  }
  run_window();
}

void Step::run_window() {
  window_.plan(model_.shape, model_.head_width());
  const bool all_wanted = int(window_.logit_rows.size()) == window_.rows();
  if (!all_wanted) wanted_.keep_wanted(window_, model_.shape, model_.head_width());
  last_ = all_wanted ? &window_ : &wanted_;
  now_ = &window_;
  compute();
  logits_ += window_.logit_rows.size() * padded(model_.shape.vocab);
  window_.clear();
}

void Step::compute() {
  embed();
  for (int index = 0; index < model_.shape.layers; index++) {
    const Layer& layer = model_.layers[index];
    const bool last = index + 1 == model_.shape.layers && last_ != &window_;
    project(layer);
    if (last || now_->appends_first) append_all(layer, index);
    if (last) narrow();
    if (now_->rows() == 0) break;
    attention_block(layer, index);
    ffn_block(layer);
  }
  if (now_->rows() > 0 && !now_->logit_rows.empty()) head();
}

// The last layer goes on with the wanted rows alone.
void Step::narrow() {
  const size_t qkv_width = q_width_ + 2 * kv_width_;
  for (size_t to = 0; to < window_.logit_rows.size(); to++) {
    const size_t from = window_.logit_rows[to];  // at least `to`
    if (from == to) continue;
    std::memcpy(x_ + to * dim_, x_ + from * dim_, sizeof(float) * dim_);
    std::memcpy(qkv_ + to * qkv_width, qkv_ + from * qkv_width, sizeof(float) * qkv_width);
  }
  now_ = last_;
}

void Step::embed() {
  model_.pool.share(window_.rows(), [&](int, int begin, int end) {
    for (int row = begin; row < end; row++)
      unpack_row(model_.embed, static_cast<int>(window_.token_ids[row]), x_ + size_t(row) * dim_);
  });
}

template <class Prepare>
const Activations& Step::prepare_rows(const Activations& many, const Activations& lone, int rows, Prepare prepare) {
  const Activations& to = rows == 1 ? lone : many;
  model_.pool.share(rows, [&](int, int begin, int end) {
    for (int row = begin; row < end; row++) prepare(to, row);
  });
  return to;
}

void Step::linear(const Matrix& matrix, const Activations& x, int rows, const Output& out) {
  model_.pool.share(matrix.pairs, [&](int thread, int begin, int end) {
    linear_pairs(matrix, begin, end, x, rows, out, linear_scratch_[thread]);
  });
}

void Step::project(const Layer& layer) {
  const Shape& shape = model_.shape;
  const Needs needs = needs_of({&layer.wq, &layer.wk, &layer.wv});
  const Activations& x = prepare_rows(of_dim_, lone_dim_, now_->rows(), [&](const Activations& to, int row) {
    norm_and_prepare(to, row, needs, x_ + size_t(row) * dim_, layer.attention_norm, shape.dim, shape.eps);
  });
  project_qkv(layer, x);
}

void Step::attention_block(const Layer& layer, int index) {
  model_.pool.deal(static_cast<int>(now_->items.size()),
                   [&](int thread, int number) { attend(layer, index, number, *scratch_[thread]); });
  linear(layer.wo, mixed_rows(layer), now_->rows(), {x_, size_t(dim_), nullptr, Epilogue::add});
}

// What attention returned, as inputs of the output projection.
const Activations& Step::mixed_rows(const Layer& layer) {
  if (mixes_narrow(layer)) return of_mixed_;
  const Needs needs = needs_of({&layer.wo});
  return prepare_rows(of_mixed_, lone_mixed_, now_->rows(), [&](const Activations& to, int row) {
    prepare(to, row, needs, mixed_ + size_t(row) * q_width_);
  });
}

// Q, K and V side by side, as one round of work.
void Step::project_qkv(const Layer& layer, const Activations& x) {
  const size_t stride = q_width_ + 2 * kv_width_;
  const Matrix* matrices[] = {&layer.wq, &layer.wk, &layer.wv};
  const int columns[] = {0, q_width_, q_width_ + kv_width_};
  model_.pool.share(layer.wq.pairs + layer.wk.pairs + layer.wv.pairs, [&](int thread, int begin, int end) {
    for (int part = 0, base = 0; part < 3; base += matrices[part++]->pairs) {
      const int first = std::max(begin - base, 0), last = std::min(end - base, matrices[part]->pairs);
      const float* bias = layer.qkv_bias == nullptr ? nullptr : layer.qkv_bias + columns[part];
      if (first < last)
        linear_pairs(*matrices[part], first, last, x, now_->rows(), {qkv_ + columns[part], stride, bias},
                     linear_scratch_[thread]);
    }
  });
}

void Step::ffn_block(const Layer& layer) {
  const Shape& shape = model_.shape;
  const int rows = now_->rows();
  const Needs for_ffn = needs_of({&layer.gate, &layer.up});
  const Activations& x = prepare_rows(of_dim_, lone_dim_, rows, [&](const Activations& to, int row) {
    norm_and_prepare(to, row, for_ffn, x_ + size_t(row) * dim_, layer.ffn_norm, shape.dim, shape.eps);
  });
  linear(layer.down, gate_rows(layer, x), rows, {x_, size_t(dim_), nullptr, Epilogue::add});
}

// The hidden layer, as inputs of `down`.
const Activations& Step::gate_rows(const Layer& layer, const Activations& x) {
  const int rows = now_->rows();
  if (takes_gated(layer.gate, layer.up, layer.down, rows)) {
    model_.pool.share(layer.gate.pairs, [&](int thread, int begin, int end) {
      gated_pairs(layer.gate, layer.up, begin, end, x, rows, of_hidden_, linear_scratch_[thread]);
    });
    return of_hidden_;
  }
  const Output gate{hidden_, size_t(ffn_width_)}, up{hidden_, size_t(ffn_width_), nullptr, Epilogue::swiglu};
  model_.pool.share(layer.gate.pairs, [&](int thread, int begin, int end) {
    linear_pairs(layer.gate, begin, end, x, rows, gate, linear_scratch_[thread]);
    linear_pairs(layer.up, begin, end, x, rows, up, linear_scratch_[thread]);
  });
  const Needs for_down = needs_of({&layer.down});
  return prepare_rows(of_hidden_, lone_hidden_, rows, [&](const Activations& to, int row) {
    prepare(to, row, for_down, hidden_ + size_t(row) * ffn_width_);
  });
}

void Step::head() {
  const Shape& shape = model_.shape;
  const int rows = static_cast<int>(now_->logit_rows.size());
  const Needs needs = needs_of({&model_.head});
  const Activations& x = prepare_rows(of_dim_, lone_dim_, rows, [&](const Activations& to, int row) {
    const float* from = x_ + size_t(now_->logit_rows[row]) * dim_;
    norm_and_prepare(to, row, needs, from, model_.norm, shape.dim, shape.eps);
  });
  linear(model_.head, x, rows, {logits_, size_t(padded(shape.vocab))});
}

}  // namespace segue
