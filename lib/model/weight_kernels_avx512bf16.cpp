#include "model/weight_element_bf16.h"
#include "model/weight_kernels_simd.h"

namespace oscar {
const WeightKernels& weight_kernels_avx512bf16() { return kKernels; }
}  // namespace oscar
