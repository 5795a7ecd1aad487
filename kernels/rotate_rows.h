// Rows [tokens, heads, D] times a D x D matrix on tensor cores: rotates queries, keys and values,
// and (transposed) turns attention outputs back.
#pragma once

#include <cstdint>

#include "kernels/mixed_cache.h"

namespace oscar {

struct RotateParams {
  int64_t num_tokens = 0;
  int num_heads = 0, head_dim = 0;  // head_dim 64, 96, 128, 192 or 256
  // Device. Strides in elements, multiples of 8, D contiguous, 16-byte aligned. output may be equal
  // to input when types and strides are; otherwise they must not overlap.
  const void* input = nullptr;
  ElementType input_type = ElementType::kBf16;
  int64_t input_token_stride = 0, input_head_stride = 0;
  void* output = nullptr;
  ElementType output_type = ElementType::kBf16;
  int64_t output_token_stride = 0, output_head_stride = 0;
  // Device, fp32 [num_rotations, D, D] row-major, 16-byte aligned. num_rotations divides num_heads:
  // head h takes matrix h / (num_heads / num_rotations), so 1 = shared, num_kv_heads = per KV head.
  const float* rotation = nullptr;
  int num_rotations = 1;
  bool transposed = false;  // out = (x - mean) R^T instead of (x - mean) R
  // Device, fp32 [num_means, D], may be null: subtracted from the rows; num_means divides
  // num_heads, as num_rotations.
  const float* mean = nullptr;
  int num_means = 1;
  // false: R rounded to one 16-bit term, relative error of a row about 2^-9 (bf16) or 2^-12 (fp16);
  // true: two terms, about 2^-16. fp32 rows and rows with a mean are split into two bf16 terms too.
  bool two_terms = true;
  bool portable = false;  // true: mma.sync also where the device has wgmma (for comparisons)
};

// stream: a cudaStream_t. Throws Error on an unsupported shape, a null or misaligned pointer, or no
// rows.
void rotate_rows(const RotateParams& params, void* stream);

}  // namespace oscar
