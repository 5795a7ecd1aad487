// The loops of norms.cpp for one instruction set, written for the compiler's vectorizer. Included
// only by norms_<set>.cpp, each of which exports them under its own name.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace oscar::norms {

struct Kernels {
  double (*sum_of_squares)(const float* x, size_t count);
  void (*scale)(const float* x, const float* weight, float factor, size_t count, float* out);
  void (*swiglu)(float* gate, const float* up, size_t count);
  float (*zero_if_finite)(const float* x, size_t count);  // NaN otherwise
};
const Kernels& generic();
const Kernels& avx2();
const Kernels& avx512();

namespace {

inline constexpr size_t kPartialSums = 16;  // fixed, so that every instruction set adds alike

[[maybe_unused]] double sum_of_squares(const float* x, size_t count) {
  double sums[kPartialSums] = {};
  size_t i = 0;
  for (; i + kPartialSums <= count; i += kPartialSums)
    for (size_t j = 0; j < kPartialSums; ++j) {
      const double value = static_cast<double>(x[i + j]);
      sums[j] += value * value;
    }
  for (size_t j = 0; i < count; ++i, ++j) {
    const double value = static_cast<double>(x[i]);
    sums[j] += value * value;
  }
  for (size_t width = kPartialSums / 2; width > 0; width /= 2)
    for (size_t j = 0; j < width; ++j) sums[j] += sums[j + width];
  return sums[0];
}

[[maybe_unused]] void scale(const float* x, const float* weight, float factor, size_t count,
                            float* out) {
  for (size_t i = 0; i < count; ++i) out[i] = x[i] * factor * weight[i];
}

// exp(x) for x clamped to [-87, 88]: x = n ln 2 + r, a Taylor polynomial of degree 7 in r
// (|r| <= 0.347, remainder 6e-9), times 2^n. NaN stays NaN.
inline float exp_clamped(float x) {
  x = x < -87.0F ? -87.0F : x;
  x = x > 88.0F ? 88.0F : x;
  constexpr float kRounder = 0x1.8p23F;  // adding it leaves the nearest integer in the low bits
  const float shifted = x * 0x1.715476p0F + kRounder;
  const float n = shifted - kRounder;
  const float r = (x - n * 0x1.62e4p-1F) - n * 0x1.7f7d1cp-20F;  // ln 2 in two parts
  float p = 1.0F / 5040.0F;
  p = p * r + 1.0F / 720.0F;
  p = p * r + 1.0F / 120.0F;
  p = p * r + 1.0F / 24.0F;
  p = p * r + 1.0F / 6.0F;
  p = p * r + 0.5F;
  p = p * r + 1.0F;
  p = p * r + 1.0F;
  const uint32_t exponent = (std::bit_cast<uint32_t>(shifted) + 127U) << 23U;
  return p * std::bit_cast<float>(exponent);
}

[[maybe_unused]] void swiglu(float* gate, const float* up, size_t count) {
  for (size_t i = 0; i < count; ++i) gate[i] = gate[i] / (1.0F + exp_clamped(-gate[i])) * up[i];
}

[[maybe_unused]] float zero_if_finite(const float* x, size_t count) {
  float sums[kPartialSums] = {};
  size_t i = 0;
  for (; i + kPartialSums <= count; i += kPartialSums)
    for (size_t j = 0; j < kPartialSums; ++j) sums[j] += x[i + j] * 0.0F;
  float sum = 0.0F;
  for (; i < count; ++i) sum += x[i] * 0.0F;
  for (const float part : sums) sum += part;
  return sum;
}

[[maybe_unused]] constexpr Kernels kKernels = {sum_of_squares, scale, swiglu, zero_if_finite};

}  // namespace
}  // namespace oscar::norms
