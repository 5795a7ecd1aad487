#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace oscar {
namespace {

struct Simd {
  using Vec = __m256;
  static constexpr size_t kLanes = 8;
  static constexpr size_t kTokenWidth = 6;  // 12 sums + 2 weights + 1 token of 16 registers

  static Vec zero() { return _mm256_setzero_ps(); }
  static Vec set1(float value) { return _mm256_set1_ps(value); }
  static Vec load(const float* source) { return _mm256_loadu_ps(source); }
  static void store(float* target, Vec value) { _mm256_storeu_ps(target, value); }
  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  static float sum(Vec a) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
  }
  static Vec load_fp16(const uint8_t* source) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
  }
  static Vec load_bf16(const uint8_t* source) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static constexpr bool kHasLookup = false;  // too few lanes for 16 values
  // 32 signed bytes -> four registers.
  static void from_i8(__m256i q, Vec* out) {
    const __m128i low = _mm256_castsi256_si128(q), high = _mm256_extracti128_si256(q, 1);
    out[0] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low));
    out[1] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(low, 8)));
    out[2] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high));
    out[3] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(high, 8)));
  }
  // 8 x 8 transpose of 32-bit elements.
  static void transpose(Vec (&r)[8]) {
    Vec a[8];
    for (size_t i = 0; i < 8; i += 2) {
      a[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
      a[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (size_t i = 0; i < 8; i += 4) {
      r[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
      r[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
      r[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
      r[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
    for (size_t i = 0; i < 4; ++i) {
      a[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
      a[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
    for (size_t i = 0; i < 8; ++i) r[i] = a[i];
  }
};

struct Element {
  static constexpr size_t kColumns = 1;
  static Simd::Vec load_steps(const float* source) { return Simd::load(source); }
  static Simd::Vec multiply_add(Simd::Vec w, Simd::Vec x, Simd::Vec sum) {
    return Simd::fma(w, x, sum);
  }
};

}  // namespace
}  // namespace oscar

#include "model/weight_kernels_simd.h"

namespace oscar {
const WeightKernels& weight_kernels_avx2() { return kKernels; }
}  // namespace oscar
