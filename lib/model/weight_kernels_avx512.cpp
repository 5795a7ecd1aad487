#include "model/weight_simd_avx512.h"

namespace oscar {
namespace {

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
const WeightKernels& weight_kernels_avx512() { return kKernels; }
}  // namespace oscar
