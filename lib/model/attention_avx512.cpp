#if defined(__x86_64__)
#include <immintrin.h>

#include "model/attention_kernels.h"
#include "model/attention_simd.h"
#include "model/packed_simd.h"

namespace oscar {
namespace {

struct Vector {
  static constexpr size_t kWidth = 16;
  static constexpr size_t kWideVectors = 4, kWideRows = 6, kNarrowRows = 12;
  using Reg = __m512;
  static Reg load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Reg x) { _mm512_storeu_ps(p, x); }
  static Reg set(float x) { return _mm512_set1_ps(x); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
  static Reg add(Reg a, Reg b) { return _mm512_add_ps(a, b); }
  static Reg sub(Reg a, Reg b) { return _mm512_sub_ps(a, b); }
  static Reg mul(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
  static Reg max(Reg a, Reg b) { return _mm512_max_ps(a, b); }
  static Reg round(Reg a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static Reg scale_by_power_of_two(Reg a, Reg n) { return _mm512_scalef_ps(a, n); }
  static Reg keep_first(Reg a, size_t count, Reg fill) {
    const auto keep = static_cast<__mmask16>((1U << (count < 16 ? count : 16)) - 1U);
    return _mm512_mask_mov_ps(fill, keep, a);
  }
  static void expand_pair(const uint32_t* p, Reg& first, Reg& second) {
    const __m512i bits = _mm512_loadu_si512(p);
    first = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    second = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(-65536)));
  }
  static float reduce_max(Reg a) { return _mm512_reduce_max_ps(a); }
  static float reduce_add(Reg a) { return _mm512_reduce_add_ps(a); }

  using Int = __m512i;
  // 32-bit words at base, base + stride, ...; lanes from count on are 0 and not read.
  static Int gather(const uint8_t* base, size_t stride, size_t count) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i offsets = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(static_cast<int>(stride)));
    const auto mask = static_cast<__mmask16>((1U << count) - 1U);
    return _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), mask, offsets, base, 1);
  }
  static Reg low_codes(Int words) {
    return _mm512_cvtepi32_ps(_mm512_and_si512(words, _mm512_set1_epi32(3)));
  }
  static Int next_codes(Int words) { return _mm512_srli_epi32(words, 2); }
  static Reg row_codes(const uint8_t* codes) {
    int word = 0;
    __builtin_memcpy(&word, codes, sizeof word);
    const __m512i shifts =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return low_codes(_mm512_srlv_epi32(_mm512_set1_epi32(word), shifts));
  }
  static Reg low_halves(Int words) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)); }
  static Reg high_halves(Int words) {
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(words, 16)));
  }
  static void store_first(float* p, size_t count, Reg x) {
    if (count == kWidth) return _mm512_storeu_ps(p, x);
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1U << count) - 1U), x);
  }
};

// 16 x 16 block: four rounds of two-row shuffles (32-bit, 64-bit, 128-bit pairs twice).
void transpose_block(const float* rows, size_t row_stride, size_t num_rows, __mmask16 columns,
                     size_t num_columns, float* panel) {
  __m512 a[16];
  __m512 b[16];
  for (size_t i = 0; i < 16; ++i) {
    a[i] =
        i < num_rows ? _mm512_maskz_loadu_ps(columns, rows + i * row_stride) : _mm512_setzero_ps();
  }
  for (size_t i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  for (size_t i = 0; i < 16; i += 4) {
    for (size_t half = 0; half < 2; ++half) {
      const __m512d low = _mm512_castps_pd(b[i + half]);
      const __m512d high = _mm512_castps_pd(b[i + half + 2]);
      a[i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      a[i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  }
  // a[4 g + c] holds columns c, c+4, c+8, c+12 (one a 128-bit lane) of rows 4 g .. 4 g + 3.
  for (size_t c = 0; c < 4; ++c) {
    b[c] = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88);
    b[4 + c] = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xdd);
    b[8 + c] = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88);
    b[12 + c] = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xdd);
  }
  __m512 out[16];
  for (size_t c = 0; c < 4; ++c) {
    out[c] = _mm512_shuffle_f32x4(b[c], b[8 + c], 0x88);
    out[8 + c] = _mm512_shuffle_f32x4(b[c], b[8 + c], 0xdd);
    out[4 + c] = _mm512_shuffle_f32x4(b[4 + c], b[12 + c], 0x88);
    out[12 + c] = _mm512_shuffle_f32x4(b[4 + c], b[12 + c], 0xdd);
  }
  for (size_t d = 0; d < num_columns; ++d) _mm512_storeu_ps(panel + d * kKeyBlock, out[d]);
}

void transpose(const float* rows, size_t row_stride, size_t num_rows, size_t width, float* panel) {
  for (size_t j = 0; j < kKeyBlock; j += 16) {
    for (size_t d = 0; d < width; d += 16) {
      const size_t columns = width - d < 16 ? width - d : 16;
      transpose_block(rows + j * row_stride + d, row_stride, num_rows > j ? num_rows - j : 0,
                      static_cast<__mmask16>((1U << columns) - 1U), columns,
                      panel + d * kKeyBlock + j);
    }
  }
}

}  // namespace

const AttentionKernels kAttentionAvx512 = {attention_simd::gemm<Vector>,
                                           attention_simd::softmax<Vector>,
                                           attention_simd::gemm_bf16<Vector>,
                                           transpose,
                                           attention_simd::dequantize_rows<Vector>,
                                           attention_simd::dequantize_panel<Vector>,
                                           attention_simd::expand_half_pairs<Vector>};

}  // namespace oscar
#endif
