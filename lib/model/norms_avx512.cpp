#include "model/norms_kernels.h"

namespace oscar::norms {
const Kernels& avx512() { return kKernels; }
}  // namespace oscar::norms
