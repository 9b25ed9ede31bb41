// Weights as the linear kernels read them.
//
// A matrix [rows][cols] is cut into tiles of 16 rows and groups of 32 columns; a block is one group of one tile, one
// vector lane a row. Two tiles make a pair, whose blocks lie interleaved, so that a pair is one sequential stream:
//
//   pair:  [group][tile 0, tile 1] blocks, then the pair's superblock scales (Q4K only)
//
//   form   block                                                            bytes   holds
//   Q4     codes u4 [4][16][4 low | 4 high], scale f16 [16], least f16 [16]   320   Q4_0, Q4_1, int4
//   Q4K    the same codes, u8 [16] of the scale, u8 [16] of the least         288   Q4_K; [group / 8][tile] f16 d [16],
//                                                                                   f16 dmin [16] follow the blocks
//   Q8     codes s8 + 128 [8][16][4], scale f16 [16]                          544   Q8_0, Q5_0, int8
//   Q8Min  codes u8 [8][16][4], scale f32 [16], least f32 [16]                640   Q5_1, Q5_K
//   Q6K    codes s8 + 128 [8][16][4], scale f32 [2][16], a half group each    640   Q6_K
//   Bf16   values [16][16][2]                                                1024   BF16, F16, F32
//
// A weight is scale * code + least. In a 4-bit byte of step i, lane r, the low nibble j is column 4 i + j of the group
// and the high nibble column 16 + 4 i + j. Rows are padded to whole pairs and columns to whole groups with zeros.
//
// Where there is a matrix unit, Q4 lies the way linear_amx.h takes it apart: the 16-bit word w of step i, lane r holds
// columns 8 i + w, 8 i + 2 + w, 8 i + 4 + w and 8 i + 6 + w of the group, the first in its lowest bits; the scale is
// multiplied with 2^(18 - exponent), the least with 2^-exponent.
#pragma once
#include <cstddef>
#include <cstdint>

#include "simd.h"

namespace segue {

constexpr int kGroup = 32;      // columns that share a scale
constexpr int kTile = 16;       // rows of a tile
constexpr int kPairRows = 32;   // rows of a pair
constexpr int kSuperGroups = 8; // groups of a Q4_K superblock

enum class Form : int32_t { Q4, Q4K, Q8, Q8Min, Q6K, Bf16 };

constexpr int block_bytes(Form form) {
  switch (form) {
    case Form::Q4: return 320;
    case Form::Q4K: return 288;
    case Form::Q8: return 544;
    case Form::Q8Min: return 640;
    case Form::Q6K: return 640;
    case Form::Bf16: return 1024;
  }
  return 0;
}

struct Matrix {
  Form form = Form::Bf16;
  int rows = 0, cols = 0;
  int groups = 0;  // of 32 columns, the last one padded
  int pairs = 0;   // of 32 rows, the last one padded
  int exponent = 0;  // Q4 for the matrix unit: weights are in units of 2^exponent
  size_t pair_bytes = 0;
  uint8_t* data = nullptr;

  const uint8_t* pair(int index) const { return data + index * pair_bytes; }
  uint8_t* block(int tile, int group) const {
    return data + (tile / 2) * pair_bytes + (2 * size_t(group) + tile % 2) * block_bytes(form);
  }
  uint8_t* super(int tile, int group) const {  // Q4K: f16 d [16], f16 dmin [16]
    const size_t scales = size_t(groups) * 2 * block_bytes(form);
    return data + (tile / 2) * pair_bytes + scales + (size_t(group / kSuperGroups) * 2 + tile % 2) * 64;
  }
  bool for_matrix_unit() const { return kMatrixUnit && (form == Form::Q4 || form == Form::Bf16); }
  bool integer() const { return form != Form::Bf16 && !for_matrix_unit(); }  // inputs are rounded to int8
};

}  // namespace segue
