#if defined(__x86_64__)
#include <immintrin.h>

#include "model/attention_kernels.h"
#include "model/attention_simd.h"

namespace oscar {
namespace {

struct Vector {
  static constexpr size_t kWidth = 16;
  static constexpr size_t kWideVectors = 4, kWideRows = 6, kNarrowRows = 12;
  using Reg = __m512;
  using Pairs = __m512bh;
  static Reg load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Reg x) { _mm512_storeu_ps(p, x); }
  static Reg set(float x) { return _mm512_set1_ps(x); }
  static Reg mul(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
  static Pairs load_pairs(const uint32_t* p) {
    return reinterpret_cast<Pairs>(_mm512_loadu_si512(p));
  }
  static Pairs set_pair(uint32_t pair) {
    return reinterpret_cast<Pairs>(_mm512_set1_epi32(static_cast<int>(pair)));
  }
  static Reg dot(Pairs a, Pairs b, Reg c) { return _mm512_dpbf16_ps(c, a, b); }
};

void round_pairs(size_t m, size_t width, const float* rows, size_t row_stride, uint32_t* out,
                 size_t out_stride) {
  for (size_t r = 0; r < m; ++r, rows += row_stride, out += out_stride) {
    for (size_t d = 0; d < width; d += 16)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + d / 2),
                          reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(rows + d))));
  }
}

}  // namespace

const PairKernels kPairsAvx512Bf16 = {attention_simd::gemm_pairs<Vector>, round_pairs, nullptr,
                                      nullptr};

}  // namespace oscar
#endif
