// Rotary position embedding in split halves (Su et al. 2021, arXiv:2104.09864) and the norm some models put before it.
#pragma once
#include "activations.h"

namespace segue {

// x: [head_dim] to out: [head_dim]; cos, sin: [head_dim / 2] of the position
inline void rotate(const float* x, const float* cos, const float* sin, int head_dim, float* __restrict out) {
  const int half = head_dim / 2;
  const float *left = x, *right = x + half;
  for (int i = 0; i < half; i++) out[i] = left[i] * cos[i] - right[i] * sin[i];
  for (int i = 0; i < half; i++) out[half + i] = right[i] * cos[i] + left[i] * sin[i];
}

// RMSNorm over a head (Qwen3). x: [head_dim]; weight: [width], out: [width], the width a multiple of 16, zero-padded.
inline void norm_head(const float* x, const float* weight, int head_dim, int width, float eps, float* out) {
  std::memcpy(out, x, sizeof(float) * head_dim);
  std::memset(out + head_dim, 0, sizeof(float) * (width - head_dim));
  const float inverse = inverse_rms(out, width, head_dim, eps);
  for (int i = 0; i < head_dim; i++) out[i] = out[i] * inverse * weight[i];
}

}  // namespace segue
