#include "model.h"

#include <cstring>
#include <stdexcept>

namespace segue {
namespace {

const float* copied(Arena& arena, const float* values, size_t count) {
  float* copy = arena.take<float>(round_up(count, kPairRows));
  std::memcpy(copy, values, count * sizeof(float));
  return copy;
}

size_t bytes_of_head(const Shape& shape) {
  const int width = (shape.head_dim + kLanes - 1) / kLanes * kLanes;
  switch (static_cast<KvType>(shape.kv_type)) {
    case KvType::float32: return PageF32::bytes(width);
    case KvType::bf16: return PageBf16::bytes(width);
    case KvType::int8: return PageInt8::bytes(width);
  }
  throw std::invalid_argument("kv_type");
}

}  // namespace

Model::Model(const Shape& of, const float* cosines, const float* sines)
    : shape(of),
      pages(bytes_of_head(of) * of.kv_heads * of.layers * of.num_pages),
      pool(of.threads),
      layers(of.layers),
      cos(copied(arena, cosines, size_t(of.context) * (of.head_dim / 2))),
      sin(copied(arena, sines, size_t(of.context) * (of.head_dim / 2))) {}

size_t Model::head_bytes() const { return bytes_of_head(shape); }

Matrix& Model::matrix(Slot slot, int layer) {
  if (slot == Slot::embed) return embed;
  if (slot == Slot::head) return head;
  Layer& of = layers.at(layer);
  switch (slot) {
    case Slot::wq: return of.wq;
    case Slot::wk: return of.wk;
    case Slot::wv: return of.wv;
    case Slot::wo: return of.wo;
    case Slot::gate: return of.gate;
    case Slot::up: return of.up;
    case Slot::down: return of.down;
    default: throw std::invalid_argument("slot");
  }
}

const float** Model::vector(Slot slot, int layer) {
  if (slot == Slot::norm) return &norm;
  Layer& of = layers.at(layer);
  switch (slot) {
    case Slot::attention_norm: return &of.attention_norm;
    case Slot::ffn_norm: return &of.ffn_norm;
    case Slot::q_norm: return &of.q_norm;
    case Slot::k_norm: return &of.k_norm;
    default: throw std::invalid_argument("slot");
  }
}

// The three biases share one vector, each part padded like the outputs it is added to.
float* Model::bias(Slot slot, Layer& layer) {
  const int q = padded(shape.heads * shape.head_dim), kv = padded(shape.kv_heads * shape.head_dim);
  if (layer.qkv_bias == nullptr) layer.qkv_bias = arena.take<float>(q + 2 * kv);
  float* whole = const_cast<float*>(layer.qkv_bias);
  return slot == Slot::q_bias ? whole : slot == Slot::k_bias ? whole + q : whole + q + kv;
}

void Model::set_vector(Slot slot, int layer, const float* values, int count) {
  if (slot == Slot::q_bias || slot == Slot::k_bias || slot == Slot::v_bias)
    std::memcpy(bias(slot, layers.at(layer)), values, sizeof(float) * count);
  else
    *vector(slot, layer) = copied(arena, values, count);
}

void Model::write_position(uint8_t* block, int position, const float* k, const float* v) const {
  switch (static_cast<KvType>(shape.kv_type)) {
    case KvType::float32: return PageF32::write(block, head_width(), position, k, v);
    case KvType::bf16: return PageBf16::write(block, head_width(), position, k, v);
    case KvType::int8: return PageInt8::write(block, head_width(), position, k, v);
  }
}

void Model::read_position(const uint8_t* block, int position, float* k, float* v) const {
  switch (static_cast<KvType>(shape.kv_type)) {
    case KvType::float32: return PageF32::read(block, head_width(), position, k, v);
    case KvType::bf16: return PageBf16::read(block, head_width(), position, k, v);
    case KvType::int8: return PageInt8::read(block, head_width(), position, k, v);
  }
}

}  // namespace segue
