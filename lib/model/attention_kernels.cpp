#include "model/attention_kernels.h"

#include "base/cpu.h"

namespace oscar {

const AttentionKernels& attention_kernels() {
#if defined(__x86_64__)
  if (cpu_features().avx512) return kAttentionAvx512;
  if (cpu_features().avx2) return kAttentionAvx2;
#endif
  return kAttentionGeneric;
}

}  // namespace oscar
