#include "blocks.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.h"

namespace segue {
namespace {

uint16_t half_at(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return bits;
}

uint32_t word_at(const uint8_t* p) {
  uint32_t bits;
  std::memcpy(&bits, p, 4);
  return bits;
}

void nibbles(const uint8_t* packed, uint8_t codes[kGroup]) {
  for (int i = 0; i < 16; i++) {
    codes[i] = packed[i] & 15;
    codes[16 + i] = packed[i] >> 4;
  }
}

void fifth_bits(uint32_t bits, uint8_t codes[kGroup]) {
  for (int i = 0; i < kGroup; i++) codes[i] |= ((bits >> i) & 1u) << 4;
}

Group scaled(float scale, int zero, float least) {
  Group group{};
  group.scale[0] = group.scale[1] = scale;
  group.zero = zero;
  group.least = least;
  return group;
}

// f16 d, u8 codes [16]
Group q4_0(const uint8_t* block) {
  const float d = from_f16(half_at(block));
  Group group = scaled(d, 0, -8.0f * d);
  nibbles(block + 2, group.codes);
  return group;
}

// f16 d, f16 m, u8 codes [16]
Group q4_1(const uint8_t* block) {
  Group group = scaled(from_f16(half_at(block)), 0, from_f16(half_at(block + 2)));
  nibbles(block + 4, group.codes);
  return group;
}

// f16 d, u32 fifth bits, u8 codes [16]
Group q5_0(const uint8_t* block) {
  Group group = scaled(from_f16(half_at(block)), 16, 0.0f);
  nibbles(block + 6, group.codes);
  fifth_bits(word_at(block + 2), group.codes);
  return group;
}

// f16 d, f16 m, u32 fifth bits, u8 codes [16]
Group q5_1(const uint8_t* block) {
  Group group = scaled(from_f16(half_at(block)), 0, from_f16(half_at(block + 2)));
  nibbles(block + 8, group.codes);
  fifth_bits(word_at(block + 4), group.codes);
  return group;
}

// f16 d, s8 codes [32]
Group q8_0(const uint8_t* block) {
  Group group = scaled(from_f16(half_at(block)), 128, 0.0f);
  for (int i = 0; i < kGroup; i++) group.codes[i] = block[2 + i] ^ 0x80;
  return group;
}

// Eight scales and eight minima of six bits in twelve bytes.
void six_bits(const uint8_t* packed, int index, uint8_t& scale, uint8_t& least) {
  if (index < 4) {
    scale = packed[index] & 63;
    least = packed[index + 4] & 63;
  } else {
    scale = (packed[index + 4] & 15) | ((packed[index - 4] >> 6) << 4);
    least = (packed[index + 4] >> 4) | ((packed[index] >> 6) << 4);
  }
}

Group k_scaled(const uint8_t* block, int index) {
  uint8_t scale, least;
  six_bits(block + 4, index, scale, least);
  const uint16_t d = half_at(block), dmin = half_at(block + 2);
  Group group = scaled(from_f16(d) * scale, 0, -(from_f16(dmin) * least));
  group.super_scale = scale;
  group.super_least = least;
  group.d = d;
  group.dmin = dmin;
  return group;
}

// f16 d, f16 dmin, six-bit pairs [12], u8 codes [128]: 64 columns in 32 bytes, low nibbles first
Group q4_k(const uint8_t* block, int index) {
  Group group = k_scaled(block, index);
  const uint8_t* packed = block + 16 + (index / 2) * 32;
  for (int i = 0; i < kGroup; i++) group.codes[i] = index % 2 ? packed[i] >> 4 : packed[i] & 15;
  return group;
}

// f16 d, f16 dmin, six-bit pairs [12], fifth bits u8 [32] (bit: group), u8 codes [128]
Group q5_k(const uint8_t* block, int index) {
  Group group = k_scaled(block, index);
  const uint8_t *fifth = block + 16, *packed = block + 48 + (index / 2) * 32;
  for (int i = 0; i < kGroup; i++) {
    const int four = index % 2 ? packed[i] >> 4 : packed[i] & 15;
    group.codes[i] = static_cast<uint8_t>(four | ((fifth[i] >> index) & 1) << 4);
  }
  return group;
}

// u8 low nibbles [128], u8 upper pairs [64], s8 scales [16], f16 d: 128 columns in 64 + 32 bytes
Group q6_k(const uint8_t* block, int index) {
  const int half = index / 4, quarter = index % 4;
  const uint8_t *low = block + half * 64 + (quarter % 2) * 32, *upper = block + 128 + half * 32;
  const auto* scales = reinterpret_cast<const int8_t*>(block + 192) + index * 2;
  const float d = from_f16(half_at(block + 208));
  Group group = scaled(d * scales[0], 32, 0.0f);
  group.scale[1] = d * scales[1];
  for (int i = 0; i < kGroup; i++) {
    const int four = quarter < 2 ? low[i] & 15 : low[i] >> 4;
    group.codes[i] = static_cast<uint8_t>(four | ((upper[i] >> (2 * quarter)) & 3) << 4);
  }
  return group;
}

struct Layout {
  int cols, bytes;
};

Layout layout_of(Stored stored) {
  switch (stored) {
    case Stored::F32: return {1, 4};
    case Stored::F16: return {1, 2};
    case Stored::BF16: return {1, 2};
    case Stored::Q4_0: return {32, 18};
    case Stored::Q4_1: return {32, 20};
    case Stored::Q5_0: return {32, 22};
    case Stored::Q5_1: return {32, 24};
    case Stored::Q8_0: return {32, 34};
    case Stored::Q4_K: return {256, 144};
    case Stored::Q5_K: return {256, 176};
    case Stored::Q6_K: return {256, 210};
  }
  return {0, 0};
}

float float_at(Stored stored, const uint8_t* row, int col) {
  if (stored == Stored::F32) return float_of(word_at(row + 4 * size_t(col)));
  const uint16_t bits = half_at(row + 2 * size_t(col));
  return stored == Stored::F16 ? from_f16(bits) : from_bf16(bits);
}

uint8_t code_of(float value, float scale, int zero, int last) {
  const float code = scale > 0 ? std::nearbyint(value / scale) : 0.0f;
  return static_cast<uint8_t>(std::min(std::max(0.0f, code + static_cast<float>(zero)), static_cast<float>(last)));
}

Group rounded_to_8(const float values[kGroup]) {
  float peak = 0;
  for (int i = 0; i < kGroup; i++) peak = std::max(peak, std::fabs(values[i]));
  Group group = scaled(from_f16(to_f16(peak / 127.0f)), 128, 0.0f);
  for (int i = 0; i < kGroup; i++) group.codes[i] = code_of(values[i], group.scale[0], 128, 255);
  return group;
}

Group rounded_to_4(const float values[kGroup]) {
  const auto [low, high] = std::minmax_element(values, values + kGroup);
  Group group = scaled(from_f16(to_f16((*high - *low) / 15.0f)), 0, from_f16(to_f16(*low)));
  for (int i = 0; i < kGroup; i++) group.codes[i] = code_of(values[i] - group.least, group.scale[0], 0, 15);
  return group;
}

}  // namespace

bool is_float(Stored stored) { return layout_of(stored).cols == 1; }

size_t row_bytes(Stored stored, int cols) {
  const Layout layout = layout_of(stored);
  return layout.cols == 0 || cols % layout.cols != 0 ? 0 : size_t(cols) / layout.cols * layout.bytes;
}

Form form_of(Stored stored, Rounding rounding) {
  switch (stored) {
    case Stored::Q4_0:
    case Stored::Q4_1: return Form::Q4;
    case Stored::Q4_K: return Form::Q4K;
    case Stored::Q5_0:
    case Stored::Q8_0: return Form::Q8;
    case Stored::Q5_1:
    case Stored::Q5_K: return Form::Q8Min;
    case Stored::Q6_K: return Form::Q6K;
    default: break;
  }
  return rounding == Rounding::int8 ? Form::Q8 : rounding == Rounding::int4 ? Form::Q4 : Form::Bf16;
}

Group stored_group(Stored stored, const uint8_t* row, int group) {
  const Layout layout = layout_of(stored);
  const int each = layout.cols / kGroup;  // groups of a block
  const uint8_t* block = row + size_t(group / each) * layout.bytes;
  switch (stored) {
    case Stored::Q4_0: return q4_0(block);
    case Stored::Q4_1: return q4_1(block);
    case Stored::Q5_0: return q5_0(block);
    case Stored::Q5_1: return q5_1(block);
    case Stored::Q8_0: return q8_0(block);
    case Stored::Q4_K: return q4_k(block, group % each);
    case Stored::Q5_K: return q5_k(block, group % each);
    case Stored::Q6_K: return q6_k(block, group % each);
    default: return Group{};
  }
}

void float_group(Stored stored, const uint8_t* row, int cols, int group, float values[kGroup]) {
  for (int i = 0; i < kGroup; i++) {
    const int col = group * kGroup + i;
    values[i] = col < cols ? float_at(stored, row, col) : 0.0f;
  }
}

Group rounded_group(Rounding rounding, const float values[kGroup]) {
  return rounding == Rounding::int4 ? rounded_to_4(values) : rounded_to_8(values);
}

}  // namespace segue
