#include "model/norms_kernels.h"

namespace oscar::norms {
const Kernels& avx2() { return kKernels; }
}  // namespace oscar::norms
