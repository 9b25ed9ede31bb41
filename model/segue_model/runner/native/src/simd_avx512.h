// AVX-512 F, BW, DQ, VL and VNNI; with SEGUE_BF16_DOT also BF16, where its dot product is faster than two FMAs (AMD).
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace segue {

constexpr int kTileRows = 8;     // rows of activations a linear tile holds in registers
constexpr int kTileQueries = 6;  // queries an attention kernel holds in registers,
#if defined(SEGUE_BF16_DOT)
constexpr int kMixVectors = 4;  // times vectors of channels when it sums values
#else
constexpr int kMixVectors = 2;
#endif

struct F32 {
  __m512 v;
};
struct I32 {
  __m512i v;
};
struct Bytes {
  __m512i v;
};

SEGUE_INLINE F32 splat(float x) { return {_mm512_set1_ps(x)}; }
SEGUE_INLINE F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
SEGUE_INLINE void store(float* p, F32 a) { _mm512_storeu_ps(p, a.v); }
SEGUE_INLINE F32 add(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
SEGUE_INLINE F32 sub(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
SEGUE_INLINE F32 mul(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
// 1 / a, a >= 1: an estimate and one step of Newton's method, which a division takes four times as long as.
SEGUE_INLINE F32 reciprocal(F32 a) {
  const __m512 estimate = _mm512_rcp14_ps(a.v);
  return {_mm512_mul_ps(estimate, _mm512_fnmadd_ps(a.v, estimate, _mm512_set1_ps(2.0f)))};
}
SEGUE_INLINE F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
SEGUE_INLINE F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
SEGUE_INLINE F32 abs(F32 a) { return {_mm512_abs_ps(a.v)}; }
SEGUE_INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a * b + c

SEGUE_INLINE I32 splat_i32(int32_t x) { return {_mm512_set1_epi32(x)}; }
SEGUE_INLINE I32 add(I32 a, I32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
SEGUE_INLINE F32 to_f32(I32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
SEGUE_INLINE I32 round_i32(F32 a) { return {_mm512_cvtps_epi32(a.v)}; }  // to nearest even
// x - floor(x), and a * 2^floor(x) for x in -126 .. 127
SEGUE_INLINE F32 fraction(F32 x) { return {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)}; }
SEGUE_INLINE F32 times_pow2(F32 a, F32 x) { return {_mm512_scalef_ps(a.v, x.v)}; }
SEGUE_INLINE void store_bytes(void* p, I32 a) {  // the low byte of each lane
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}

// Horizontal: fold the halves, then the quarters, and so on.
SEGUE_INLINE float sum(F32 a) { return _mm512_reduce_add_ps(a.v); }
SEGUE_INLINE float highest(F32 a) { return _mm512_reduce_max_ps(a.v); }
SEGUE_INLINE int32_t sum(I32 a) { return _mm512_reduce_add_epi32(a.v); }

// One bit for each lane.
SEGUE_INLINE uint32_t at_least(F32 a, F32 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }

// Lanes first .. last - 1 of a, `other` elsewhere.
SEGUE_INLINE F32 keep(F32 a, int first, int last, float other) {
  const uint32_t below_last = last >= 16 ? 0xffffu : last <= 0 ? 0u : (1u << last) - 1u;
  const uint32_t below_first = first >= 16 ? 0xffffu : first <= 0 ? 0u : (1u << first) - 1u;
  return {_mm512_mask_mov_ps(_mm512_set1_ps(other), static_cast<__mmask16>(below_last & ~below_first), a.v)};
}

SEGUE_INLINE F32 load_f16(const void* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
}
SEGUE_INLINE F32 load_u8(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}

SEGUE_INLINE Bytes load_bytes(const void* p) { return {_mm512_loadu_si512(p)}; }
SEGUE_INLINE Bytes low_nibbles(Bytes a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
SEGUE_INLINE Bytes high_nibbles(Bytes a) {
  return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))};
}

SEGUE_INLINE int32_t four_bytes(const void* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return four;
}
// Each lane: acc + the dot product of its four bytes with the four at x.
SEGUE_INLINE I32 dot_u8s8(I32 acc, Bytes a, const int8_t* x) {
  return {_mm512_dpbusd_epi32(acc.v, a.v, _mm512_set1_epi32(four_bytes(x)))};
}
SEGUE_INLINE I32 dot_u4s8(I32 acc, Bytes a, const int8_t* x) { return dot_u8s8(acc, a, x); }  // codes below 16
SEGUE_INLINE I32 dot_s8u8(I32 acc, Bytes a, const uint8_t* x) {
  return {_mm512_dpbusd_epi32(acc.v, _mm512_set1_epi32(four_bytes(x)), a.v)};
}

#if defined(SEGUE_BF16_DOT)
using Narrow = uint16_t;
SEGUE_INLINE void store_narrow(Narrow* p, F32 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v)));
}
SEGUE_INLINE F32 dot_bf16(F32 acc, Bytes a, const Narrow* x) {
  return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(a.v),
                           reinterpret_cast<__m512bh>(_mm512_set1_epi32(four_bytes(x))))};
}
#else
using Narrow = float;
SEGUE_INLINE void store_narrow(Narrow* p, F32 a) { store(p, a); }
SEGUE_INLINE F32 dot_bf16(F32 acc, Bytes a, const Narrow* x) {
  const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16));
  const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  acc.v = _mm512_fmadd_ps(even, _mm512_set1_ps(x[0]), acc.v);
  return {_mm512_fmadd_ps(odd, _mm512_set1_ps(x[1]), acc.v)};
}
#endif

}  // namespace segue
