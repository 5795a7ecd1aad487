#include "model/norms_kernels.h"

namespace oscar::norms {
const Kernels& generic() { return kKernels; }
}  // namespace oscar::norms
