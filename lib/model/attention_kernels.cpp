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

const PairKernels* pair_kernels() {
#if defined(__x86_64__)
  if (cpu_features().amx_bf16) return &kPairsAmx;
  if (cpu_features().avx512_bf16) return &kPairsAvx512Bf16;
#endif
  return nullptr;
}

}  // namespace oscar
