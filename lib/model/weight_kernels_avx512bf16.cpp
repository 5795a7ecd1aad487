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

#include "model/weight_kernels_simd.h"

namespace oscar {

const WeightKernels& weight_kernels_avx512bf16() { return kKernels; }

void expand_row_avx512bf16(const StoredRows& weight, size_t row, uint16_t* out) {
  with_decoder(weight.type, [&](auto decoder) {
    for (size_t column = 0; column < weight.columns; column += kColumnUnit) {
      alignas(64) float values[kColumnUnit];
      expand_unit<decltype(decoder)>(weight, row, column / kColumnUnit, values);
      alignas(64) uint16_t rounded[kColumnUnit];
      Simd::store(reinterpret_cast<float*>(rounded), Element::load_steps(values));
      const size_t left = weight.columns - column;
      std::memcpy(out + column, rounded,
                  (left < kColumnUnit ? left : kColumnUnit) * sizeof(uint16_t));
    }
  });
}

}  // namespace oscar
