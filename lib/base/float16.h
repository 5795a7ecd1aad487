// bfloat16 and IEEE half conversions: round to nearest, ties to even; NaN stays NaN, overflow
// becomes infinity, subnormals are kept.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace oscar {

inline constexpr float kBf16Epsilon = 0x1p-8F;  // relative spacing of bfloat16 (8 significant bits)
inline constexpr float kFp16Epsilon = 0x1p-11F;  // half of the relative spacing of IEEE half

inline float bf16_to_float(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<uint16_t>((bits >> 16) | 0x0040U);
  return static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

inline float round_to_bf16(float value) { return bf16_to_float(float_to_bf16(value)); }

float fp16_to_float(uint16_t bits);
uint16_t float_to_fp16(float value);
inline float round_to_fp16(float value) { return fp16_to_float(float_to_fp16(value)); }

// Bulk conversions of `count` elements; source and destination must not overlap.
void bf16_to_float(const uint16_t* source, size_t count, float* destination);
void float_to_bf16(const float* source, size_t count, uint16_t* destination);
void fp16_to_float(const uint16_t* source, size_t count, float* destination);
void float_to_fp16(const float* source, size_t count, uint16_t* destination);
void round_to_bf16(float* values, size_t count);

}  // namespace oscar
