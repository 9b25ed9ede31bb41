#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "half.h"

namespace segue {
namespace {

template <class T>
void put(uint8_t* at, int lane, T value) {
  std::memcpy(at + sizeof(T) * lane, &value, sizeof(T));
}

template <class T>
T get(const uint8_t* at, int lane) {
  T value;
  std::memcpy(&value, at + sizeof(T) * lane, sizeof(T));
  return value;
}

// Where the code of column i of a group lies.
struct Place {
  int byte, shift;
};

template <bool kForMatrixUnit>
constexpr Place place_of(int lane, int i) {
  if (!kForMatrixUnit) return {i % 16 / 4 * 64 + lane * 4 + i % 4, i / 16 * 4};
  const int in_word = i / 2 % 4;
  return {i / 8 * 64 + lane * 4 + i % 2 * 2 + in_word / 2, in_word % 2 * 4};
}

Place place_of(const Matrix& matrix, int lane, int i) {
  return matrix.for_matrix_unit() ? place_of<true>(lane, i) : place_of<false>(lane, i);
}

template <bool kForMatrixUnit>
void put_nibbles_at(uint8_t* block, int lane, const uint8_t codes[kGroup]) {
  SEGUE_UNROLL for (int i = 0; i < kGroup; i++) {
    const Place place = place_of<kForMatrixUnit>(lane, i);
    block[place.byte] = static_cast<uint8_t>(block[place.byte] | codes[i] << place.shift);
  }
}

void put_nibbles(const Matrix& matrix, uint8_t* block, int lane, const uint8_t codes[kGroup]) {
  if (matrix.for_matrix_unit()) return put_nibbles_at<true>(block, lane, codes);
  put_nibbles_at<false>(block, lane, codes);
}

void put_bytes(uint8_t* block, int lane, const uint8_t codes[kGroup], int shift) {
  for (int step = 0; step < 8; step++)
    for (int j = 0; j < 4; j++) block[step * 64 + lane * 4 + j] = static_cast<uint8_t>(codes[4 * step + j] + shift);
}

// Power of two that scales of Q4 are stored with.
int scale_exponent(const Matrix& matrix) { return matrix.for_matrix_unit() ? 18 - matrix.exponent : 0; }

void put_group(const Matrix& matrix, int row, int index, const Group& group) {
  const int tile = row / kTile, lane = row % kTile;
  uint8_t* block = matrix.block(tile, index);
  switch (matrix.form) {
    case Form::Q4:
      put_nibbles(matrix, block, lane, group.codes);
      put(block + 256, lane, to_f16(std::ldexp(group.scale[0], scale_exponent(matrix))));
      put(block + 288, lane, to_f16(std::ldexp(group.least, -matrix.exponent)));
      return;
    case Form::Q4K:
      put_nibbles(matrix, block, lane, group.codes);
      put(block + 256, lane, group.super_scale);
      put(block + 272, lane, group.super_least);
      put(matrix.super(tile, index), lane, group.d);
      put(matrix.super(tile, index) + 32, lane, group.dmin);
      return;
    case Form::Q8:
      put_bytes(block, lane, group.codes, 128 - group.zero);
      put(block + 512, lane, to_f16(group.scale[0]));
      return;
    case Form::Q8Min:
      put_bytes(block, lane, group.codes, 0);
      put(block + 512, lane, group.scale[0]);
      put(block + 576, lane, group.least);
      return;
    case Form::Q6K:
      put_bytes(block, lane, group.codes, 128 - group.zero);
      put(block + 512, lane, group.scale[0]);
      put(block + 576, lane, group.scale[1]);
      return;
    case Form::Bf16: return;
  }
}

void put_values(const Matrix& matrix, int row, int index, const float values[kGroup]) {
  uint8_t* block = matrix.block(row / kTile, index);
  for (int i = 0; i < kGroup; i++) put(block + (i / 2) * 64, (row % kTile) * 2 + i % 2, to_bf16(values[i]));
}

int nibble(const Matrix& matrix, const uint8_t* block, int lane, int i) {
  const Place place = place_of(matrix, lane, i);
  return block[place.byte] >> place.shift & 15;
}

int byte(const uint8_t* block, int lane, int i) { return block[(i / 4) * 64 + lane * 4 + i % 4]; }

float half(const uint8_t* at, int lane) { return from_f16(get<uint16_t>(at, lane)); }

float weight(const Matrix& matrix, int row, int col) {
  const int tile = row / kTile, lane = row % kTile, i = col % kGroup;
  const uint8_t* block = matrix.block(tile, col / kGroup);
  switch (matrix.form) {
    case Form::Q4:
      return std::ldexp(half(block + 256, lane), -scale_exponent(matrix)) *
                 static_cast<float>(nibble(matrix, block, lane, i)) +
             std::ldexp(half(block + 288, lane), matrix.exponent);
    case Form::Q4K: {
      const uint8_t* super = matrix.super(tile, col / kGroup);
      const float scale = half(super, lane) * block[256 + lane], least = half(super + 32, lane) * block[272 + lane];
      return scale * static_cast<float>(nibble(matrix, block, lane, i)) - least;
    }
    case Form::Q8: return half(block + 512, lane) * static_cast<float>(byte(block, lane, i) - 128);
    case Form::Q8Min:
      return get<float>(block + 512, lane) * static_cast<float>(byte(block, lane, i)) + get<float>(block + 576, lane);
    case Form::Q6K:
      return get<float>(block + 512 + (i / 16) * 64, lane) * static_cast<float>(byte(block, lane, i) - 128);
    case Form::Bf16: return from_bf16(get<uint16_t>(block + (i / 2) * 64, lane * 2 + i % 2));
  }
  return 0;
}

// What linear_amx.h can take: a scale of at most 2^-7 and a least of at most 2^-3 have a reach of at most 1.
float reach(const Group& group) {
  return std::fmax(std::fabs(group.scale[0]) * 0x1p7f, std::fabs(group.least) * 0x1p3f);
}

// The smallest e with value <= 2^e. A matrix of zeros, or one that is not finite, is stored as it is.
int exponent_above(float value) {
  return value > 0 && std::isfinite(value) ? std::clamp(std::ilogb(value) + 1, -60, 60) : 0;
}

Matrix shaped(Form form, int rows, int cols) {
  Matrix matrix;
  matrix.form = form;
  matrix.rows = rows;
  matrix.cols = cols;
  matrix.groups = (cols + kGroup - 1) / kGroup;
  matrix.pairs = (rows + kPairRows - 1) / kPairRows;
  matrix.pair_bytes = size_t(matrix.groups) * 2 * block_bytes(form);
  if (form == Form::Q4K) matrix.pair_bytes += size_t(matrix.groups / kSuperGroups) * 2 * 64;
  return matrix;
}

}  // namespace

Matrix pack(Pool& pool, Arena& arena, Stored stored, Rounding rounding, const uint8_t* rows, int count, int cols) {
  Matrix matrix = shaped(form_of(stored, rounding), count, cols);
  matrix.data = arena.take<uint8_t>(matrix.pair_bytes * matrix.pairs);
  const size_t stride = row_bytes(stored, cols);
  const auto group_of = [&](int row, int index) {
    if (!is_float(stored)) return stored_group(stored, rows + row * stride, index);
    float values[kGroup];
    float_group(stored, rows + row * stride, cols, index, values);
    return rounded_group(rounding, values);
  };
  // A pair of tiles is one thread's: no two write to one block.
  const auto each_group = [&](const auto& visit) {
    pool.share(matrix.pairs, [&](int, int begin, int end) {
      const int last = std::min(end * kPairRows, matrix.rows);
      for (int row = begin * kPairRows; row < last; row++)
        for (int index = 0; index < matrix.groups; index++) visit(row, index);
    });
  };
  if (matrix.form == Form::Bf16) {
    each_group([&](int row, int index) {
      float values[kGroup];
      float_group(stored, rows + row * stride, cols, index, values);
      put_values(matrix, row, index, values);
    });
    return matrix;
  }
  if (matrix.for_matrix_unit()) {
    std::vector<float> highest(matrix.pairs);
    each_group([&](int row, int index) {
      float& of_pair = highest[row / kPairRows];
      of_pair = std::fmax(of_pair, reach(group_of(row, index)));
    });
    matrix.exponent = exponent_above(*std::max_element(highest.begin(), highest.end()));
  }
  each_group([&](int row, int index) { put_group(matrix, row, index, group_of(row, index)); });
  return matrix;
}

void unpack_row(const Matrix& matrix, int row, float* out) {
  for (int col = 0; col < matrix.groups * kGroup; col++) out[col] = weight(matrix, row, col);
}

}  // namespace segue
