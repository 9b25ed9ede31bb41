// Forms of 4-bit codes: Q4 (Q4_0, Q4_1, int4) and Q4K (Q4_K).
#pragma once
#include "linear_tile.h"

namespace segue {

struct ScalesQ4 {
  static constexpr Form kForm = Form::Q4;
  static SEGUE_INLINE F32 scale(const uint8_t* block, const uint8_t*) { return load_f16(block + 256); }
  static SEGUE_INLINE F32 least(const uint8_t* block, const uint8_t*) { return load_f16(block + 288); }
};

struct ScalesQ4K {
  static constexpr Form kForm = Form::Q4K;
  static SEGUE_INLINE F32 scale(const uint8_t* block, const uint8_t* super) {
    return mul(load_u8(block + 256), load_f16(super));
  }
  static SEGUE_INLINE F32 least(const uint8_t* block, const uint8_t* super) {
    return sub(zero(), mul(load_u8(block + 272), load_f16(super + 32)));
  }
};

template <class Scales, int Rows>
void q4_tile(const Matrix& matrix, int pair, const Activations& x, int row, const Output& out) {
  constexpr int kBytes = block_bytes(Scales::kForm);
  const int groups = x.groups;
  const uint8_t* block = matrix.pair(pair);
  const uint8_t* super = block + size_t(groups) * 2 * kBytes;
  const size_t stride = size_t(groups) * kGroup;
  const int8_t* codes = x.codes + row * stride;
  const float *scale = x.scale + size_t(row) * groups, *weighted = x.weighted + size_t(row) * groups;
  Accumulators<Rows> acc;
  for (int g = 0; g < groups; g++, codes += kGroup) {
    SEGUE_UNROLL for (int n = 0; n < 2; n++, block += kBytes) {
      ask_ahead<kBytes>(block);
      I32 dot[Rows];
      SEGUE_UNROLL for (int m = 0; m < Rows; m++) dot[m] = splat_i32(0);
      SEGUE_UNROLL for (int i = 0; i < 4; i++) {
        const Bytes both = load_bytes(block + i * 64), low = low_nibbles(both), high = high_nibbles(both);
        SEGUE_UNROLL for (int m = 0; m < Rows; m++) {
          dot[m] = dot_u4s8(dot[m], low, codes + m * stride + i * 4);
          dot[m] = dot_u4s8(dot[m], high, codes + m * stride + 16 + i * 4);
        }
      }
      const uint8_t* of_group = super + (size_t(g / kSuperGroups) * 2 + n) * 64;
      const F32 d = Scales::scale(block, of_group), least = Scales::least(block, of_group);
      SEGUE_UNROLL for (int m = 0; m < Rows; m++) {
        F32& lanes = acc.lanes[m][n];
        lanes = fma(mul(to_f32(dot[m]), splat(scale[m * groups + g])), d, lanes);
        lanes = fma(splat(weighted[m * groups + g]), least, lanes);
      }
    }
  }
  acc.finish(out, row, pair * kPairRows);
}

}  // namespace segue
