// AVX2, FMA and F16C: every vector is two registers.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace segue {

constexpr int kTileRows = 2;  // 16 registers of 8 lanes hold a quarter of what AVX-512 holds
constexpr int kTileQueries = 2;
constexpr int kMixVectors = 2;

struct F32 {
  __m256 lo, hi;
};
struct I32 {
  __m256i lo, hi;
};
struct Bytes {
  __m256i lo, hi;
};

SEGUE_INLINE F32 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
SEGUE_INLINE F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
SEGUE_INLINE void store(float* p, F32 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
SEGUE_INLINE F32 add(F32 a, F32 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
SEGUE_INLINE F32 sub(F32 a, F32 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
SEGUE_INLINE F32 mul(F32 a, F32 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
SEGUE_INLINE F32 reciprocal(F32 a) {
  const __m256 one = _mm256_set1_ps(1.0f);
  return {_mm256_div_ps(one, a.lo), _mm256_div_ps(one, a.hi)};
}
SEGUE_INLINE F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
SEGUE_INLINE F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
SEGUE_INLINE F32 abs(F32 a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
SEGUE_INLINE F32 fma(F32 a, F32 b, F32 c) {  // a * b + c
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}

SEGUE_INLINE I32 splat_i32(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
SEGUE_INLINE I32 add(I32 a, I32 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
SEGUE_INLINE F32 to_f32(I32 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
SEGUE_INLINE I32 round_i32(F32 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }  // to nearest even
// x - floor(x), and a * 2^floor(x) for x in -126 .. 127
SEGUE_INLINE F32 fraction(F32 x) {
  return {_mm256_sub_ps(x.lo, _mm256_floor_ps(x.lo)), _mm256_sub_ps(x.hi, _mm256_floor_ps(x.hi))};
}
SEGUE_INLINE __m256 pow2_floor(__m256 x) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(_mm256_floor_ps(x)), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
SEGUE_INLINE F32 times_pow2(F32 a, F32 x) {
  return {_mm256_mul_ps(a.lo, pow2_floor(x.lo)), _mm256_mul_ps(a.hi, pow2_floor(x.hi))};
}
SEGUE_INLINE void store_bytes(void* p, I32 a) {  // the low byte of each lane
  alignas(32) int32_t lanes[16];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), a.lo);
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes + 8), a.hi);
  for (int i = 0; i < 16; i++) static_cast<uint8_t*>(p)[i] = static_cast<uint8_t>(lanes[i]);
}

// Horizontal: fold the halves, then the quarters, and so on.
SEGUE_INLINE float sum(F32 a) {
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
SEGUE_INLINE float highest(F32 a) {
  const __m256 eight = _mm256_max_ps(a.lo, a.hi);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
SEGUE_INLINE int32_t sum(I32 a) {
  const __m256i eight = _mm256_add_epi32(a.lo, a.hi);
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

// One bit for each lane.
SEGUE_INLINE uint32_t at_least(F32 a, F32 b) {
  const auto half = [](__m256 x, __m256 y) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_GE_OQ)));
  };
  return half(a.lo, b.lo) | half(a.hi, b.hi) << 8;
}

// Lanes first .. last - 1 of a, `other` elsewhere.
SEGUE_INLINE F32 keep(F32 a, int first, int last, float other) {
  const __m256i low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), high = _mm256_add_epi32(low, _mm256_set1_epi32(8));
  const __m256i begin = _mm256_set1_epi32(first - 1), end = _mm256_set1_epi32(last);
  const __m256 fill = _mm256_set1_ps(other);
  const auto inside = [&](__m256i lane) {
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(lane, begin), _mm256_cmpgt_epi32(end, lane)));
  };
  return {_mm256_blendv_ps(fill, a.lo, inside(low)), _mm256_blendv_ps(fill, a.hi, inside(high))};
}

SEGUE_INLINE F32 load_f16(const void* p) {
  const auto* halves = static_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
SEGUE_INLINE F32 load_u8(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
}

SEGUE_INLINE Bytes load_bytes(const void* p) {
  const auto* halves = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
SEGUE_INLINE Bytes low_nibbles(Bytes a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
SEGUE_INLINE Bytes high_nibbles(Bytes a) {
  return low_nibbles({_mm256_srli_epi16(a.lo, 4), _mm256_srli_epi16(a.hi, 4)});
}

SEGUE_INLINE __m256i four_bytes(const void* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}
// u: unsigned bytes, s: signed bytes. vpmaddubsw alone would saturate, so even and odd bytes are widened apart.
SEGUE_INLINE __m256i dot_wide(__m256i acc, __m256i u, __m256i s) {
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
// Each lane: acc + the dot product of its four bytes with the four at x.
SEGUE_INLINE I32 dot_u8s8(I32 acc, Bytes a, const int8_t* x) {
  const __m256i four = four_bytes(x);
  return {dot_wide(acc.lo, a.lo, four), dot_wide(acc.hi, a.hi, four)};
}
SEGUE_INLINE I32 dot_s8u8(I32 acc, Bytes a, const uint8_t* x) {
  const __m256i four = four_bytes(x);
  return {dot_wide(acc.lo, four, a.lo), dot_wide(acc.hi, four, a.hi)};
}
SEGUE_INLINE I32 dot_u4s8(I32 acc, Bytes a, const int8_t* x) {  // codes below 16: 2 * 15 * 127 fits 16 bits
  const __m256i four = four_bytes(x), one = _mm256_set1_epi16(1);
  return {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(_mm256_maddubs_epi16(a.lo, four), one)),
          _mm256_add_epi32(acc.hi, _mm256_madd_epi16(_mm256_maddubs_epi16(a.hi, four), one))};
}

using Narrow = float;
SEGUE_INLINE void store_narrow(Narrow* p, F32 a) { store(p, a); }
SEGUE_INLINE F32 dot_bf16(F32 acc, Bytes a, const Narrow* x) {
  const __m256 first = _mm256_set1_ps(x[0]), second = _mm256_set1_ps(x[1]);
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const auto half = [&](__m256 sum, __m256i pair) {
    sum = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(pair, 16)), first, sum);
    return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(pair, upper)), second, sum);
  };
  return {half(acc.lo, a.lo), half(acc.hi, a.hi)};
}

}  // namespace segue
