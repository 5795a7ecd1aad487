// Products of activations with stored (quantized) weight matrices: y = x W^T + b.
//
// Few tokens (decode): a matrix-vector product reads the stored blocks directly, so that it is
// bound by the memory traffic of the quantized weights. Many tokens (prefill): tiles of weight rows
// are expanded to panels and multiplied; no expanded copy of the matrix is kept.
//
// Backends. float32: own AVX-512 or AVX2 kernels; OpenBLAS is the reference, used where the CPU has
// neither (single-threaded calls on tiles). bf16 (both operands rounded to bf16, products summed in
// float32): own kernels on CPUs with AMX or AVX512-BF16.
//
// Results do not depend on the thread count, and those of one token not on the other tokens of the
// call, as long as both calls are on the same side of kGemvTokens; across it float32 results differ
// by rounding (about 1e-6 relative to the sum of magnitudes). With Compute::kBf16, calls of at most
// kGemvTokens tokens use float32 activations and unrounded weights.
#pragma once

#include <cstddef>
#include <span>

#include "model/weights.h"

namespace oscar {

enum class Compute {
  kFp32,
  kBf16
};  // precision of matrix products: float32 | bf16 inputs with float32 accumulation

enum class MatmulBackend {
  kAuto,
  kReference,  // dequantize + OpenBLAS, float32 only
  kSimd        // own kernels
};

inline constexpr size_t kGemvTokens = 8;  // up to here the stored blocks are read directly

struct MatmulJob {
  const WeightMatrix* weight = nullptr;
  const float* bias = nullptr;  // [rows], may be null
  float* out = nullptr;         // [tokens, rows]
  bool accumulate = false;      // add to out instead of overwriting it
};

// x [tokens, columns], the same for every job (all weights have that many columns). Throws Error
// when the compute type or backend is not available on this CPU, and naming the weight when its
// columns differ.
void weight_matmul(std::span<const MatmulJob> jobs, const float* x, size_t tokens, Compute compute,
                   MatmulBackend backend = MatmulBackend::kAuto);

// Throws Error, saying what is missing, unless this CPU can compute in that precision.
void check_compute_supported(Compute compute);

// What kAuto uses for many tokens: "avx512", "avx2", "openblas", "avx512_bf16" or "amx_bf16".
const char* matmul_backend_name(Compute compute);

}  // namespace oscar
