// A model's shape, weights and pages, and the scratch memory of its steps.
#pragma once
#include <vector>

#include "activations.h"
#include "kv_page.h"
#include "matrix.h"
#include "memory.h"
#include "pool.h"

namespace segue {

// Mirrored by library.py.
struct Shape {
  int32_t vocab, dim, layers, heads, kv_heads, head_dim, ffn_dim, context;
  int32_t window;   // 0: none
  int32_t qk_norm;  // boolean
  int32_t kv_type;  // KvType
  int32_t threads;
  int32_t max_rows;  // of one pass through the layers; longer batches take several
  float eps;
  int64_t num_pages;
};

struct Layer {
  Matrix wq, wk, wv, wo, gate, up, down;
  const float* attention_norm = nullptr;  // [padded dim]
  const float* ffn_norm = nullptr;        // [padded dim]
  const float* qkv_bias = nullptr;        // [3][padded outputs], one after the other; null without
  const float* q_norm = nullptr;          // [padded head_dim]; null without
  const float* k_norm = nullptr;
};

// Mirrored by library.py: which weight a call of set_matrix or set_vector brings.
enum class Slot : int32_t {
  embed, head, wq, wk, wv, wo, gate, up, down, norm, attention_norm, ffn_norm, q_bias, k_bias, v_bias, q_norm, k_norm
};

constexpr int padded(int width) { return (width + kPairRows - 1) / kPairRows * kPairRows; }

class Model {
 public:
  // cos, sin: [context][head_dim / 2], copied
  Model(const Shape& shape, const float* cos, const float* sin);

  Matrix& matrix(Slot slot, int layer);
  void set_vector(Slot slot, int layer, const float* values, int count);

  int head_width() const { return (shape.head_dim + kLanes - 1) / kLanes * kLanes; }
  size_t head_bytes() const;  // one KV head of one page
  size_t page_bytes() const { return head_bytes() * shape.kv_heads * shape.layers; }
  uint8_t* head_block(int layer, int head) const {  // of page 0
    return pages.data() + (size_t(layer) * shape.kv_heads + head) * head_bytes();
  }

  // One position of one KV head, [head_width] each.
  void write_position(uint8_t* block, int position, const float* k, const float* v) const;
  void read_position(const uint8_t* block, int position, float* k, float* v) const;

  const Shape shape;
  Arena arena;
  Mapping pages;  // [page][layer][kv head][K | V]
  Pool pool;
  Matrix embed, head;
  const float* norm = nullptr;  // [padded dim]
  std::vector<Layer> layers;
  const float *cos, *sin;

 private:
  const float** vector(Slot slot, int layer);
  float* bias(Slot slot, Layer& layer);
};

}  // namespace segue
