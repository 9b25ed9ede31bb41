// Vectors of 16 lanes, one vocabulary for three instruction sets; the kernels are written once against it.
//
//   F32    16 floats          I32    16 signed 32-bit integers          Bytes  64 bytes: 16 lanes of four
//   Narrow   what is multiplied with bf16: bf16 too where there is a dot product of pairs, else float
//
//   dot_bf16(acc, a, x)   each lane: acc + the dot product of its two bf16 with the two at x
//
// Every operation is one rounding at most, so a kernel means the same sequence of roundings however it is tiled.
// Integer dot products are exact in every instruction set.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if !defined(SEGUE_AVX512) && !defined(SEGUE_AVX2)
#define SEGUE_UNROLL  // there are no registers to keep tiles in
#elif defined(__clang__)
#define SEGUE_UNROLL _Pragma("unroll")
#else
#define SEGUE_UNROLL _Pragma("GCC unroll 32")
#endif
#define SEGUE_INLINE inline __attribute__((always_inline))

#include "half.h"

#if defined(SEGUE_AVX512)
#include "simd_avx512.h"
#elif defined(SEGUE_AVX2)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

namespace segue {

constexpr int kLanes = 16;
#if defined(SEGUE_AMX)
constexpr bool kMatrixUnit = true;  // tiles.h
#else
constexpr bool kMatrixUnit = false;
#endif

SEGUE_INLINE F32 zero() { return splat(0.0f); }

SEGUE_INLINE void prefetch(const void* at) { __builtin_prefetch(at, 0, 2); }

// exp(x) to about one unit in the last place (Cephes expf). Clamped to [-87, 88], where neither side overflows.
SEGUE_INLINE F32 exp(F32 x) {
  x = min(max(x, splat(-87.0f)), splat(88.0f));
  const I32 n = round_i32(mul(x, splat(1.44269504f)));
  const F32 n_float = to_f32(n);
  F32 r = fma(n_float, splat(-0.693359375f), x);  // ln 2 in two pieces, the first exact in few bits
  r = fma(n_float, splat(2.12194440e-4f), r);
  F32 p = splat(1.3981999507e-3f);
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, splat(1.0f)));
  return mul(p, pow2(n));
}

// silu(gate) * up
SEGUE_INLINE F32 swiglu(F32 gate, F32 up) {
  return mul(mul(gate, up), reciprocal(add(exp(sub(zero(), gate)), splat(1.0f))));
}

}  // namespace segue
