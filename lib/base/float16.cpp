#include "base/float16.h"

namespace oscar {

float fp16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000U) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fU;
  const uint32_t mantissa = bits & 0x3ffU;
  if (exponent == 0x1f) {
    const uint32_t quiet = mantissa == 0 ? 0U : 0x400000U;
    return std::bit_cast<float>(sign | 0x7f800000U | (mantissa << 13) | quiet);
  }
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | ((exponent + 112U) << 23) | (mantissa << 13));
}

uint16_t float_to_fp16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000U);
  const uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) {
    return static_cast<uint16_t>(sign | 0x7e00U | ((magnitude >> 13) & 0x1ffU));
  }
  if (magnitude >= 0x477ff000U) return static_cast<uint16_t>(sign | 0x7c00U);  // 65520 and above
  if (magnitude < 0x38800000U) {
    // Below 2^-14: adding 0.5 leaves the subnormal in the low mantissa bits, rounded to nearest
    // even by the addition itself.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000U));
  }
  const uint32_t rounded = magnitude + 0xfffU + ((magnitude >> 13) & 1U);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000U) >> 13));
}

void bf16_to_float(const uint16_t* source, size_t count, float* destination) {
  for (size_t i = 0; i < count; ++i) destination[i] = bf16_to_float(source[i]);
}
void float_to_bf16(const float* source, size_t count, uint16_t* destination) {
  for (size_t i = 0; i < count; ++i) destination[i] = float_to_bf16(source[i]);
}
void fp16_to_float(const uint16_t* source, size_t count, float* destination) {
  for (size_t i = 0; i < count; ++i) destination[i] = fp16_to_float(source[i]);
}
void float_to_fp16(const float* source, size_t count, uint16_t* destination) {
  for (size_t i = 0; i < count; ++i) destination[i] = float_to_fp16(source[i]);
}
void round_to_bf16(float* values, size_t count) {
  for (size_t i = 0; i < count; ++i) values[i] = round_to_bf16(values[i]);
}

}  // namespace oscar
