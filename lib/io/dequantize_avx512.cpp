// AVX-512 expansion of weights: 16 floats at a time. Multiplication and addition stay separate
// instructions, so that the result is the scalar one.
#include "io/dequantize_blocks.h"

namespace oscar::dequantize {
namespace {

struct Avx512 {
  static __m512 to_float(__m128i codes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)); }
  static void scaled16(__m256i codes, float low_scale, float high_scale, float* out) {
    const __m512 low = to_float(_mm256_castsi256_si128(codes));
    const __m512 high = to_float(_mm256_extracti128_si256(codes, 1));
    _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_set1_ps(low_scale), low));
    _mm512_storeu_ps(out + 16, _mm512_mul_ps(_mm512_set1_ps(high_scale), high));
  }
  static void scaled(__m256i codes, float scale, float* out) { scaled16(codes, scale, scale, out); }
  static void added(__m256i codes, float scale, float offset, float* out) {
    const __m512 s = _mm512_set1_ps(scale), o = _mm512_set1_ps(offset);
    const __m512 low = to_float(_mm256_castsi256_si128(codes));
    const __m512 high = to_float(_mm256_extracti128_si256(codes, 1));
    _mm512_storeu_ps(out, _mm512_add_ps(_mm512_mul_ps(s, low), o));
    _mm512_storeu_ps(out + 16, _mm512_add_ps(_mm512_mul_ps(s, high), o));
  }
  static void f16(const uint8_t* source, size_t count, float* out) {
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
      _mm512_storeu_ps(out + i, _mm512_cvtph_ps(load32(source + 2 * i)));
    }
    for (; i < count; ++i) out[i] = load_half(source + 2 * i);
  }
  static void bf16(const uint8_t* source, size_t count, float* out) {
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
      const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(load32(source + 2 * i)), 16);
      _mm512_storeu_ps(out + i, _mm512_castsi512_ps(bits));
    }
    for (; i < count; ++i) {
      const uint8_t bytes[4] = {0, 0, source[2 * i], source[2 * i + 1]};
      std::memcpy(out + i, bytes, sizeof bytes);
    }
  }
};

}  // namespace

BlockFunction avx512_function(uint32_t type) { return Blocks<Avx512>::function(type); }

}  // namespace oscar::dequantize
