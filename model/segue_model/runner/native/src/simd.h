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

// 2^x for x up to 127, within 3e-6 of it; no less than 2^-126.
SEGUE_INLINE F32 exp2(F32 x) {
  x = max(x, splat(-126.0f));
  const F32 r = fraction(x);
  F32 p = splat(1.342668425e-2f);  // the least relative error of polynomials that are 1 at 0
  p = fma(p, r, splat(5.224247427e-2f));
  p = fma(p, r, splat(2.412802047e-1f));
  p = fma(p, r, splat(6.930448449e-1f));
  return times_pow2(fma(p, r, splat(1.0f)), x);
}

// silu(gate) * up
SEGUE_INLINE F32 swiglu(F32 gate, F32 up) {
  const F32 power = min(mul(gate, splat(-1.44269504f)), splat(126.0f));
  return mul(mul(gate, up), reciprocal(add(exp2(power), splat(1.0f))));
}

}  // namespace segue
