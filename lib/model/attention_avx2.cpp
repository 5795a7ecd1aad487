#if defined(__x86_64__)
#include <immintrin.h>

#include "model/attention_kernels.h"
#include "model/attention_simd.h"
#include "model/packed_simd.h"

namespace oscar {
namespace {

struct Vector {
  static constexpr size_t kWidth = 8;
  static constexpr size_t kWideVectors = 2, kWideRows = 6, kNarrowRows = 6;
  using Reg = __m256;
  static Reg load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Reg x) { _mm256_storeu_ps(p, x); }
  static Reg set(float x) { return _mm256_set1_ps(x); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
  static Reg add(Reg a, Reg b) { return _mm256_add_ps(a, b); }
  static Reg sub(Reg a, Reg b) { return _mm256_sub_ps(a, b); }
  static Reg mul(Reg a, Reg b) { return _mm256_mul_ps(a, b); }
  static Reg max(Reg a, Reg b) { return _mm256_max_ps(a, b); }
  static Reg round(Reg a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // |n| <= 126 and a in [0.7, 1.5]: adding n to the exponent field stays in range.
  static Reg scale_by_power_of_two(Reg a, Reg n) {
    const __m256i shift = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), shift));
  }
  static Reg keep_first(Reg a, size_t count, Reg fill) {
    return _mm256_blendv_ps(fill, a, _mm256_castsi256_ps(first_lanes(count)));
  }
  static void expand_pair(const uint32_t* p, Reg& first, Reg& second) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    first = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    second = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(-65536)));
  }
  static float reduce_max(Reg a) {
    const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
  }
  static float reduce_add(Reg a) {
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
  }

  using Int = __m256i;
  static __m256i first_lanes(size_t count) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lanes);
  }
  // 32-bit words at base, base + stride, ...; lanes from count on are 0 and not read.
  static Int gather(const uint8_t* base, size_t stride, size_t count) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i offsets = _mm256_mullo_epi32(lanes, _mm256_set1_epi32(static_cast<int>(stride)));
    return _mm256_mask_i32gather_epi32(_mm256_setzero_si256(), reinterpret_cast<const int*>(base),
                                       offsets, first_lanes(count), 1);
  }
  static Reg low_codes(Int words) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(words, _mm256_set1_epi32(3)));
  }
  static Int next_codes(Int words) { return _mm256_srli_epi32(words, 2); }
  static Reg row_codes(const uint8_t* codes) {
    uint16_t word = 0;
    __builtin_memcpy(&word, codes, sizeof word);
    const __m256i shifts = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
    return low_codes(_mm256_srlv_epi32(_mm256_set1_epi32(word), shifts));
  }
  static Reg low_halves(Int words) {
    const __m256i low = _mm256_and_si256(words, _mm256_set1_epi32(0xffff));
    const __m256i packed = _mm256_packus_epi32(low, low);  // per 128-bit lane
    return _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
  }
  static Reg high_halves(Int words) { return low_halves(_mm256_srli_epi32(words, 16)); }
  static void store_first(float* p, size_t count, Reg x) {
    if (count == kWidth) return _mm256_storeu_ps(p, x);
    _mm256_maskstore_ps(p, first_lanes(count), x);
  }
};

// 4 x 4 blocks through SSE shuffles; the rest one by one.
void transpose(const float* rows, size_t row_stride, size_t num_rows, size_t width, float* panel) {
  const __m128 zero = _mm_setzero_ps();
  for (size_t j = 0; j < kKeyBlock; j += 4) {
    const float* row = rows + j * row_stride;
    for (size_t d = 0; d + 4 <= width; d += 4) {
      __m128 r0 = j + 0 < num_rows ? _mm_loadu_ps(row + d) : zero;
      __m128 r1 = j + 1 < num_rows ? _mm_loadu_ps(row + row_stride + d) : zero;
      __m128 r2 = j + 2 < num_rows ? _mm_loadu_ps(row + 2 * row_stride + d) : zero;
      __m128 r3 = j + 3 < num_rows ? _mm_loadu_ps(row + 3 * row_stride + d) : zero;
      _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
      _mm_storeu_ps(panel + (d + 0) * kKeyBlock + j, r0);
      _mm_storeu_ps(panel + (d + 1) * kKeyBlock + j, r1);
      _mm_storeu_ps(panel + (d + 2) * kKeyBlock + j, r2);
      _mm_storeu_ps(panel + (d + 3) * kKeyBlock + j, r3);
    }
    for (size_t d = width / 4 * 4; d < width; ++d) {
      for (size_t i = 0; i < 4; ++i) {
        panel[d * kKeyBlock + j + i] = j + i < num_rows ? row[i * row_stride + d] : 0.0F;
      }
    }
  }
}

}  // namespace

const AttentionKernels kAttentionAvx2 = {attention_simd::gemm<Vector>,
                                         attention_simd::softmax<Vector>,
                                         attention_simd::gemm_bf16<Vector>,
                                         transpose,
                                         attention_simd::dequantize_rows<Vector>,
                                         attention_simd::dequantize_panel<Vector>,
                                         attention_simd::expand_half_pairs<Vector>};

}  // namespace oscar
#endif
