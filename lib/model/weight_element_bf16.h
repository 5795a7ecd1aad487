// Pairs of bf16 columns as elements of weight_panels_simd.h. Included only by
// weight_kernels_<set>.cpp for sets with AVX512-BF16.
#pragma once

#include "model/weight_simd_avx512.h"

namespace oscar {
namespace {

// A lane is a pair of neighbouring columns in bf16; products are summed in float32.
struct Element {
  static constexpr size_t kColumns = 2;
  static Simd::Vec load_steps(const float* source) {
    const __m512bh pairs = _mm512_cvtne2ps_pbh(Simd::load(source + 16), Simd::load(source));
    return _mm512_castsi512_ps(reinterpret_cast<__m512i>(pairs));
  }
  static Simd::Vec multiply_add(Simd::Vec w, Simd::Vec x, Simd::Vec sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x));
  }
};

}  // namespace
}  // namespace oscar
