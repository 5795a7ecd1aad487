// What both rotation kernels share: rows to 16-bit fragments, outputs, the rows of a lane.
#pragma once

#include <cuda_runtime.h>

#include "kernels/ptx.cuh"
#include "kernels/rotate_rows.h"

namespace oscar::rotate {

// 16-bit type of the products: fp16 for fp16 rows, else bf16.
template <bool kHalf>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  return kHalf ? ptx::pack_fp16(low, high) : ptx::pack_bf16(low, high);
}
template <bool kHalf>
__device__ __forceinline__ float2 unpack(uint32_t packed) {
  return kHalf ? ptx::unpack_fp16(packed)
               : make_float2(ptx::bf16_low(packed), ptx::bf16_high(packed));
}
// Eight consecutive elements as 16-bit fragments: dims 32 b + 8 t + 0..7 of a row. The contraction
// index is permuted the same way in the rows and in the matrix. rest: second term, only kSplit.
template <ElementType kType, bool kSplit>
__device__ __forceinline__ void load_fragment(const void* input, int64_t element, const float* mean,
                                              uint4& first, uint4& rest) {
  constexpr bool kHalf = kType == ElementType::kFp16;
  if constexpr (!kSplit) {
    first = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(input) + element);
  } else {
    float x[8];
    if constexpr (kType == ElementType::kFp32) {
      const auto* p = reinterpret_cast<const float4*>(static_cast<const float*>(input) + element);
      const float4 a = p[0], b = p[1];
      x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
      x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    } else {
      const uint4 a =
          *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(input) + element);
      const uint32_t words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack<kHalf>(words[i]);
        x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
      }
    }
    if (mean != nullptr) {
      const float4 a = __ldg(reinterpret_cast<const float4*>(mean));
      const float4 b = __ldg(reinterpret_cast<const float4*>(mean) + 1);
      x[0] -= a.x, x[1] -= a.y, x[2] -= a.z, x[3] -= a.w;
      x[4] -= b.x, x[5] -= b.y, x[6] -= b.z, x[7] -= b.w;
    }
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      high[i] = pack<kHalf>(x[2 * i], x[2 * i + 1]);
      const float2 value = unpack<kHalf>(high[i]);
      low[i] = pack<kHalf>(x[2 * i] - value.x, x[2 * i + 1] - value.y);
    }
    first = make_uint4(high[0], high[1], high[2], high[3]);
    rest = make_uint4(low[0], low[1], low[2], low[3]);
  }
}

__device__ __forceinline__ void store_eight(const RotateParams& p, int64_t element,
                                            const float (&x)[8]) {
  if (p.output_type == ElementType::kFp32) {
    auto* out = reinterpret_cast<float4*>(static_cast<float*>(p.output) + element);
    out[0] = make_float4(x[0], x[1], x[2], x[3]);
    out[1] = make_float4(x[4], x[5], x[6], x[7]);
  } else if (p.output_type == ElementType::kBf16) {
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.output) + element) =
        make_uint4(ptx::pack_bf16(x[0], x[1]), ptx::pack_bf16(x[2], x[3]),
                   ptx::pack_bf16(x[4], x[5]), ptx::pack_bf16(x[6], x[7]));
  } else {
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.output) + element) =
        make_uint4(ptx::pack_fp16(x[0], x[1]), ptx::pack_fp16(x[2], x[3]),
                   ptx::pack_fp16(x[4], x[5]), ptx::pack_fp16(x[6], x[7]));
  }
}

// Rows of one matrix: tokens x the heads that share it.
struct MatrixRows {
  uint32_t heads, count;
  int matrix, heads_per_mean;
  __device__ __forceinline__ MatrixRows(const RotateParams& p, int index)
      : heads(p.num_heads / p.num_rotations),
        count(static_cast<uint32_t>(p.num_tokens) * heads),
        matrix(index),
        heads_per_mean(p.num_heads / p.num_means) {}
};
// Loads row `row` (zeros past the end) as fragments; lane t holds dims 32 b + 8 t + 0..7. Returns
// the element of the lane's first output, -1 for a row that is not there.
template <int D, ElementType kType, bool kSplit>
__device__ __forceinline__ int64_t load_row(const RotateParams& p, const MatrixRows& rows,
                                            uint32_t row, int t, uint4 (&first)[D / 32],
                                            uint4 (&rest)[kSplit ? D / 32 : 1]) {
  const bool present = row < rows.count;
  const int64_t token = present ? row / rows.heads : 0;
  const int head =
      rows.matrix * static_cast<int>(rows.heads) + static_cast<int>(present ? row % rows.heads : 0);
  const int64_t element = token * p.input_token_stride + head * p.input_head_stride + 8 * t;
  const float* mean = p.mean != nullptr ? p.mean + head / rows.heads_per_mean * D + 8 * t : nullptr;
#pragma unroll
  for (int b = 0; b < D / 32; ++b) {
    uint4& second = rest[kSplit ? b : 0];
    first[b] = make_uint4(0, 0, 0, 0);
    if (kSplit) second = first[b];
    if (present) {
      load_fragment<kType, kSplit>(p.input, element + 32 * b,
                                   mean != nullptr ? mean + 32 * b : nullptr, first[b], second);
    }
  }
  return present ? token * p.output_token_stride + head * p.output_head_stride + 8 * t : -1;
}

}  // namespace oscar::rotate
