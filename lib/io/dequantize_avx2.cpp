// AVX2 expansion of weights: 8 floats at a time. Multiplication and addition stay separate
// instructions, so that the result is the scalar one.
#include "io/dequantize_blocks.h"

namespace oscar::dequantize {
namespace {

struct Avx2 {
  static __m256 to_float(__m128i eight_codes) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight_codes));
  }
  static void half(__m128i codes, __m256 scale, float* out) {
    _mm256_storeu_ps(out, _mm256_mul_ps(scale, to_float(codes)));
    _mm256_storeu_ps(out + 8, _mm256_mul_ps(scale, to_float(_mm_srli_si128(codes, 8))));
  }
  static void half(__m128i codes, __m256 scale, __m256 offset, float* out) {
    const __m256 low = _mm256_mul_ps(scale, to_float(codes));
    const __m256 high = _mm256_mul_ps(scale, to_float(_mm_srli_si128(codes, 8)));
    _mm256_storeu_ps(out, _mm256_add_ps(low, offset));
    _mm256_storeu_ps(out + 8, _mm256_add_ps(high, offset));
  }
  static void scaled16(__m256i codes, float low_scale, float high_scale, float* out) {
    half(_mm256_castsi256_si128(codes), _mm256_set1_ps(low_scale), out);
    half(_mm256_extracti128_si256(codes, 1), _mm256_set1_ps(high_scale), out + 16);
  }
  static void scaled(__m256i codes, float scale, float* out) { scaled16(codes, scale, scale, out); }
  static void added(__m256i codes, float scale, float offset, float* out) {
    const __m256 s = _mm256_set1_ps(scale), o = _mm256_set1_ps(offset);
    half(_mm256_castsi256_si128(codes), s, o, out);
    half(_mm256_extracti128_si256(codes, 1), s, o, out + 16);
  }
  static void f16(const uint8_t* source, size_t count, float* out) {
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
      _mm256_storeu_ps(out + i, _mm256_cvtph_ps(load16(source + 2 * i)));
    }
    for (; i < count; ++i) out[i] = load_half(source + 2 * i);
  }
  static void bf16(const uint8_t* source, size_t count, float* out) {
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
      const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load16(source + 2 * i)), 16);
      _mm256_storeu_ps(out + i, _mm256_castsi256_ps(bits));
    }
    for (; i < count; ++i) {
      const uint8_t bytes[4] = {0, 0, source[2 * i], source[2 * i + 1]};
      std::memcpy(out + i, bytes, sizeof bytes);
    }
  }
};

}  // namespace

BlockFunction avx2_function(uint32_t type) { return Blocks<Avx2>::function(type); }

}  // namespace oscar::dequantize
