// One pass of a window of rows through all layers, on all threads of the pool.
#pragma once
#include "attention_tile.h"
#include "linear.h"
#include "plan.h"

namespace segue {

class Step {
 public:
  explicit Step(Model& model);

  // Computes a checked batch: appends K and V to its pages, writes the wanted logits in the order of the slices.
  void forward(const Batch& batch);

 private:
  void run_window();
  void compute();
  void embed();
  void project(const Layer& layer);
  void narrow();
  void attention_block(const Layer& layer, int index);
  const Activations& mixed_rows(const Layer& layer);
  void ffn_block(const Layer& layer);
  const Activations& gate_rows(const Layer& layer, const Activations& x);
  void head();

  // Each row of the window, prepared as input of the next linear.
  template <class Prepare>
  const Activations& prepare_rows(const Activations& many, const Activations& lone, int rows, Prepare prepare);
  void linear(const Matrix& matrix, const Activations& x, int rows, const Output& out);
  void project_qkv(const Layer& layer, const Activations& x);

  void append(const Layer& layer, int index, const Span& span, int row, int head, AttentionScratch& scratch);
  void append_all(const Layer& layer, int index);
  void load_queries(const Layer& layer, const AttentionItem& item, AttentionScratch& scratch, Sight* sights);
  void attend(const Layer& layer, int index, size_t number, AttentionScratch& scratch);
  PageTable table_of(int index, const AttentionItem& item);
  Pages first_pages(int index, const AttentionItem& item);
  template <class Page>
  void attend_pages(const Layer& layer, const PageTable& table, const AttentionItem& item, const Sight* sights,
                    const Pages& next_item, AttentionScratch& scratch);
  Partial part_of(const AttentionItem& item, int part) const;
  void finish_part(const Layer& layer, const AttentionItem& item, AttentionScratch& scratch);
  void write_mixed(const Layer& layer, const AttentionItem& item, const Partial& partial);

  // Whether attention leaves its result as inputs of the output projection, not as floats.
  bool mixes_narrow(const Layer& layer) const {
    return now_->rows() > 1 && layer.wo.for_matrix_unit() && model_.shape.head_dim % kLanes == 0;
  }

  float* qkv_row(int row) const { return qkv_ + size_t(row) * (q_width_ + 2 * kv_width_); }

  Model& model_;
  const int dim_, q_width_, kv_width_, ffn_width_;  // padded to whole pairs
  Arena arena_;
  Window window_;                  // rows of this pass,
  Window wanted_;                  // those of them whose logits are wanted,
  const Window* last_ = nullptr;   // which of the two the last layer ends with,
  const Window* now_ = nullptr;    // and which is being computed
  float* logits_ = nullptr;  // of the window, [logit rows][padded vocab]
  float* x_;                 // [rows][dim_] the residual stream
  float* qkv_;               // [rows][q_width_ | kv_width_ | kv_width_]
  float* mixed_;             // [rows][q_width_] what attention returns
  float* hidden_;            // [rows][ffn_width_]
  Activations of_dim_, of_mixed_, of_hidden_;               // [rows]
  Activations lone_dim_, lone_mixed_, lone_hidden_;         // [1]
  std::vector<std::unique_ptr<AttentionScratch>> scratch_;  // for each thread
  std::vector<LinearScratch> linear_scratch_;               // for each thread
};

}  // namespace segue
