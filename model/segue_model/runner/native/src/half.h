// 16-bit floats, one value at a time: for loading and for the edges; the kernels convert 16 at once.
#pragma once
#include <cstdint>
#include <cstring>

namespace segue {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float from_bf16(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }

// Round to nearest even; a NaN stays one.
inline uint16_t to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t nan = (bits >> 16) | 0x40u, rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

inline float from_f16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 31u, mantissa = half & 0x3ffu;
  if (exponent == 31u) return float_of(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0u) return float_of(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  const float tiny = static_cast<float>(mantissa) * 0x1p-24f;  // subnormal: exact
  return sign != 0u ? -tiny : tiny;
}

// Round to nearest even; what is too large becomes infinite.
inline uint16_t to_f16(float value) {
  const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 aligns the wanted bits, rounding as it does so
    const float shifted = float_of(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_of(shifted) - bits_of(0.5f)));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - (112u << 23)) >> 13));
}

}  // namespace segue
