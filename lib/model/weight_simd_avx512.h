// AVX-512 registers for weight_kernels_simd.h: 16 lanes, 12 tokens x 2 registers of rows. Included
// only by weight_kernels_avx512*.cpp.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace oscar {
namespace {

struct Simd {
  using Vec = __m512;
  static constexpr size_t kLanes = 16;
  static constexpr size_t kTokenWidth = 12;  // 24 sums + 2 weights + 1 token of 32 registers

  static Vec zero() { return _mm512_setzero_ps(); }
  static Vec set1(float value) { return _mm512_set1_ps(value); }
  static Vec load(const float* source) { return _mm512_loadu_ps(source); }
  static void store(float* target, Vec value) { _mm512_storeu_ps(target, value); }
  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static float sum(Vec a) { return _mm512_reduce_add_ps(a); }
  static Vec load_fp16(const uint8_t* source) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
  }
  static Vec load_bf16(const uint8_t* source) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  // Four-bit codes index a register of their 16 values; the other bits of an index are ignored.
  static constexpr bool kHasLookup = true;
  static Vec code_values(float first) {
    const Vec codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_add_ps(codes, _mm512_set1_ps(first));
  }
  static Vec broadcast_fp16(const uint8_t* source) {
    uint16_t bits;
    __builtin_memcpy(&bits, source, sizeof bits);
    return _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(bits)));
  }
  // Low, then high nibbles of 16 bytes.
  static void lookup16(const uint8_t* source, Vec values, Vec* out) {
    const __m512i bytes =
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
    out[0] = _mm512_permutexvar_ps(bytes, values);
    out[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), values);
  }
  // Low (shift 0) or high (shift 4) nibbles of 32 bytes.
  static void lookup32(const uint8_t* source, unsigned shift, Vec values, Vec* out) {
    for (size_t i = 0; i < 2; ++i) {
      const auto* half = reinterpret_cast<const __m128i*>(source + 16 * i);
      const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(half));
      out[i] = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, shift), values);
    }
  }
  // 32 signed bytes -> two registers.
  static void from_i8(__m256i q, Vec* out) {
    out[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(q)));
    out[1] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(q, 1)));
  }
  // 16 x 16 transpose of 32-bit elements.
  static void transpose(Vec (&r)[16]) {
    Vec a[16];
    for (size_t i = 0; i < 16; i += 2) {
      a[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
      a[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (size_t i = 0; i < 16; i += 4) {
      for (size_t j = 0; j < 2; ++j) {
        const __m512d low = _mm512_castps_pd(a[i + j]), high = _mm512_castps_pd(a[i + j + 2]);
        r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
        r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
      }
    }
    // r[4 g + c] holds column c of every 128-bit part, rows 4 g .. 4 g + 3.
    for (size_t c = 0; c < 4; ++c) {
      const Vec t0 = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88);
      const Vec t1 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88);
      const Vec t2 = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd);
      const Vec t3 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
      a[c] = _mm512_shuffle_f32x4(t0, t1, 0x88);
      a[8 + c] = _mm512_shuffle_f32x4(t0, t1, 0xdd);
      a[4 + c] = _mm512_shuffle_f32x4(t2, t3, 0x88);
      a[12 + c] = _mm512_shuffle_f32x4(t2, t3, 0xdd);
    }
    for (size_t i = 0; i < 16; ++i) r[i] = a[i];
  }
};

}  // namespace
}  // namespace oscar
