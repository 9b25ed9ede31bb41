// Plain C++ for any other processor; compilers vectorise these loops as far as they can.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace segue {

constexpr int kTileRows = 2;
constexpr int kTileQueries = 2;
constexpr int kMixVectors = 2;

struct F32 {
  float v[16];
};
struct I32 {
  int32_t v[16];
};
struct Bytes {
  uint8_t v[64];
};

template <class Lane>
SEGUE_INLINE F32 lanes_f32(Lane lane) {
  F32 r;
  for (int i = 0; i < 16; i++) r.v[i] = lane(i);
  return r;
}
template <class Lane>
SEGUE_INLINE I32 lanes_i32(Lane lane) {
  I32 r;
  for (int i = 0; i < 16; i++) r.v[i] = lane(i);
  return r;
}

SEGUE_INLINE F32 splat(float x) { return lanes_f32([&](int) { return x; }); }
SEGUE_INLINE F32 load(const float* p) { return lanes_f32([&](int i) { return p[i]; }); }
SEGUE_INLINE void store(float* p, F32 a) { std::memcpy(p, a.v, sizeof a.v); }
SEGUE_INLINE F32 add(F32 a, F32 b) { return lanes_f32([&](int i) { return a.v[i] + b.v[i]; }); }
SEGUE_INLINE F32 sub(F32 a, F32 b) { return lanes_f32([&](int i) { return a.v[i] - b.v[i]; }); }
SEGUE_INLINE F32 mul(F32 a, F32 b) { return lanes_f32([&](int i) { return a.v[i] * b.v[i]; }); }
SEGUE_INLINE F32 reciprocal(F32 a) { return lanes_f32([&](int i) { return 1.0f / a.v[i]; }); }
SEGUE_INLINE F32 max(F32 a, F32 b) { return lanes_f32([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
SEGUE_INLINE F32 min(F32 a, F32 b) { return lanes_f32([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
SEGUE_INLINE F32 abs(F32 a) { return lanes_f32([&](int i) { return std::fabs(a.v[i]); }); }
// Two roundings: a fused one would be a library call where the processor has none.
SEGUE_INLINE F32 fma(F32 a, F32 b, F32 c) { return lanes_f32([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }

SEGUE_INLINE I32 splat_i32(int32_t x) { return lanes_i32([&](int) { return x; }); }
SEGUE_INLINE I32 add(I32 a, I32 b) { return lanes_i32([&](int i) { return a.v[i] + b.v[i]; }); }
SEGUE_INLINE F32 to_f32(I32 a) { return lanes_f32([&](int i) { return static_cast<float>(a.v[i]); }); }
SEGUE_INLINE I32 round_i32(F32 a) {  // to nearest even; what does not fit, NaN included, as on x86
  return lanes_i32([&](int i) {
    return std::fabs(a.v[i]) < 2147483648.0f ? static_cast<int32_t>(std::nearbyint(a.v[i])) : INT32_MIN;
  });
}
// x - floor(x), and a * 2^floor(x) for x in -126 .. 127
SEGUE_INLINE F32 fraction(F32 x) { return lanes_f32([&](int i) { return x.v[i] - std::floor(x.v[i]); }); }
SEGUE_INLINE F32 times_pow2(F32 a, F32 x) {
  return lanes_f32([&](int i) {
    return a.v[i] * float_of(static_cast<uint32_t>(static_cast<int32_t>(std::floor(x.v[i])) + 127) << 23);
  });
}
SEGUE_INLINE void store_bytes(void* p, I32 a) {  // the low byte of each lane
  for (int i = 0; i < 16; i++) static_cast<uint8_t*>(p)[i] = static_cast<uint8_t>(a.v[i]);
}

// Horizontal: fold the halves, then the quarters, and so on.
SEGUE_INLINE float sum(F32 a) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; i++) a.v[i] += a.v[i + half];
  return a.v[0];
}
SEGUE_INLINE float highest(F32 a) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; i++) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
  return a.v[0];
}
SEGUE_INLINE int32_t sum(I32 a) {
  int32_t total = 0;
  for (int i = 0; i < 16; i++) total += a.v[i];
  return total;
}

// One bit for each lane.
SEGUE_INLINE uint32_t at_least(F32 a, F32 b) {
  uint32_t lanes = 0;
  for (int i = 0; i < 16; i++) lanes |= static_cast<uint32_t>(a.v[i] >= b.v[i]) << i;
  return lanes;
}

// Lanes first .. last - 1 of a, `other` elsewhere.
SEGUE_INLINE F32 keep(F32 a, int first, int last, float other) {
  return lanes_f32([&](int i) { return i >= first && i < last ? a.v[i] : other; });
}

SEGUE_INLINE F32 load_f16(const void* p) {
  uint16_t halves[16];
  std::memcpy(halves, p, sizeof halves);
  return lanes_f32([&](int i) { return from_f16(halves[i]); });
}
SEGUE_INLINE F32 load_u8(const uint8_t* p) {
  return lanes_f32([&](int i) { return static_cast<float>(p[i]); });
}

SEGUE_INLINE Bytes load_bytes(const void* p) {
  Bytes r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
SEGUE_INLINE Bytes low_nibbles(Bytes a) {
  for (uint8_t& byte : a.v) byte &= 15;
  return a;
}
SEGUE_INLINE Bytes high_nibbles(Bytes a) {
  for (uint8_t& byte : a.v) byte >>= 4;
  return a;
}

// Each lane: acc + the dot product of its four bytes with the four at x.
template <class Stored, class Given>
SEGUE_INLINE I32 dot_bytes(I32 acc, const Bytes& a, const Given* x) {
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 4; j++) acc.v[i] += static_cast<int32_t>(static_cast<Stored>(a.v[4 * i + j])) * x[j];
  return acc;
}
SEGUE_INLINE I32 dot_u8s8(I32 acc, Bytes a, const int8_t* x) { return dot_bytes<uint8_t>(acc, a, x); }
SEGUE_INLINE I32 dot_u4s8(I32 acc, Bytes a, const int8_t* x) { return dot_bytes<uint8_t>(acc, a, x); }
SEGUE_INLINE I32 dot_s8u8(I32 acc, Bytes a, const uint8_t* x) { return dot_bytes<int8_t>(acc, a, x); }

using Narrow = float;
SEGUE_INLINE void store_narrow(Narrow* p, F32 a) { store(p, a); }
SEGUE_INLINE F32 dot_bf16(F32 acc, Bytes a, const Narrow* x) {
  uint16_t pairs[32];
  std::memcpy(pairs, a.v, sizeof pairs);
  for (int i = 0; i < 16; i++) acc.v[i] = from_bf16(pairs[2 * i]) * x[0] + acc.v[i];
  for (int i = 0; i < 16; i++) acc.v[i] = from_bf16(pairs[2 * i + 1]) * x[1] + acc.v[i];
  return acc;
}

}  // namespace segue
