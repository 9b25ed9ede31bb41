// Stored weights, one group of 32 columns at a time: GGUF's blocks as they are, floats rounded to one of the forms.
// Block layouts: ggml-org/ggml, src/ggml-common.h; type numbers: enum ggml_type.
#pragma once
#include <cstdint>

#include "matrix.h"

namespace segue {

enum class Stored : int32_t {
  F32 = 0,
  F16 = 1,
  Q4_0 = 2,
  Q4_1 = 3,
  Q5_0 = 6,
  Q5_1 = 7,
  Q8_0 = 8,
  Q4_K = 12,
  Q5_K = 13,
  Q6_K = 14,
  BF16 = 30,
};

// What becomes of floats; stored blocks keep their own codes.
enum class Rounding : int32_t { bf16 = 0, int8 = 1, int4 = 2 };

// weight[i] = scale[i / 16] * (codes[i] - zero) + least; a form stores what it needs of it.
struct Group {
  uint8_t codes[kGroup];
  int zero;
  float scale[2];
  float least;
  uint8_t super_scale, super_least;  // Q4_K: the six bits that scale and least are made of,
  uint16_t d, dmin;                  // and the half floats they multiply
};

bool is_float(Stored stored);
Form form_of(Stored stored, Rounding rounding);
size_t row_bytes(Stored stored, int cols);  // 0 when no whole number of blocks makes a row

Group stored_group(Stored stored, const uint8_t* row, int group);

// 32 floats of a row, zero beyond its last column.
void float_group(Stored stored, const uint8_t* row, int cols, int group, float values[kGroup]);
Group rounded_group(Rounding rounding, const float values[kGroup]);

}  // namespace segue
