// Loads and rotates the query of a run; element loads and stores by type.
#pragma once

#include "kernels/decode_ring.cuh"

namespace oscar::decode {

__device__ __forceinline__ float load_element(const void* values, ElementType type, int64_t index) {
  if (type == ElementType::kFp32) return static_cast<const float*>(values)[index];
  const uint16_t bits = static_cast<const uint16_t*>(values)[index];
  if (type == ElementType::kBf16) return __uint_as_float(static_cast<uint32_t>(bits) << 16);
  return __half2float(__ushort_as_half(bits));
}
__device__ __forceinline__ void store_four(void* values, ElementType type, int64_t index,
                                           float4 x) {
  if (type == ElementType::kFp32) {
    *reinterpret_cast<float4*>(static_cast<float*>(values) + index) = x;
  } else {
    const uint2 packed = type == ElementType::kBf16
                             ? make_uint2(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w))
                             : make_uint2(pack_fp16(x.x, x.y), pack_fp16(x.z, x.w));
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(values) + index) = packed;
  }
}
__device__ __forceinline__ void add(float4& sum, float weight, float4 x) {
  sum.x = fmaf(weight, x.x, sum.x), sum.y = fmaf(weight, x.y, sum.y);
  sum.z = fmaf(weight, x.z, sum.z), sum.w = fmaf(weight, x.w, sum.w);
}

// Query rows of a run into shared memory as fp32 [columns][D + 8], rotated when asked; columns past
// num_columns are zero. `scratch`: W * 4 * D floats.
template <int D, class C>
__device__ __forceinline__ void load_query(const AttendDecodeParams& p, const DecodeWork& w,
                                           float* q_shared, float* scratch) {
  const int group = p.num_q_heads / p.cache.num_kv_heads;
  for (int i = threadIdx.x; i < C::kColumns * D; i += C::kConsumers) {
    const int column = i / D, dim = i % D;
    float x = 0.0F;
    if (column < w.num_columns) {
      const int token = (w.column_begin + column) / group;
      const int head = w.kv_head * group + (w.column_begin + column) % group;
      x = load_element(
          p.q, p.q_type,
          w.seq * p.q_seq_stride + token * p.q_token_stride + head * p.q_head_stride + dim);
    }
    q_shared[column * (D + 8) + dim] = x;
  }
  if (p.rotation == nullptr) return;
  // Four columns at a time: a warp takes every W-th row of R, the partial sums meet in `partial`.
  float* partial = scratch;
  const float* r = p.rotation + (p.rotation_per_head ? static_cast<int64_t>(w.kv_head) * D * D : 0);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  named_barrier(1, C::kConsumers);
#pragma unroll 1
  for (int first = 0; first < w.num_columns; first += kMergeColumns) {
    float acc[kMergeColumns][D / 32];
#pragma unroll
    for (int c = 0; c < kMergeColumns; ++c) {
#pragma unroll
      for (int j = 0; j < D / 32; ++j) acc[c][j] = 0.0F;
    }
#pragma unroll 4
    for (int row = warp; row < D; row += C::kWarps) {
      float weight[D / 32];
#pragma unroll
      for (int j = 0; j < D / 32; ++j) weight[j] = __ldg(r + row * D + 32 * j + lane);
#pragma unroll
      for (int c = 0; c < kMergeColumns; ++c) {
        const float q = q_shared[(first + c) * (D + 8) + row];
#pragma unroll
        for (int j = 0; j < D / 32; ++j) acc[c][j] = fmaf(q, weight[j], acc[c][j]);
      }
    }
#pragma unroll
    for (int c = 0; c < kMergeColumns; ++c) {
#pragma unroll
      for (int j = 0; j < D / 32; ++j)
        partial[(warp * kMergeColumns + c) * D + 32 * j + lane] = acc[c][j];
    }
    named_barrier(1, C::kConsumers);
    for (int i = threadIdx.x; i < kMergeColumns * D; i += C::kConsumers) {
      float sum = 0.0F;
#pragma unroll
      for (int k = 0; k < C::kWarps; ++k) sum += partial[k * kMergeColumns * D + i];
      q_shared[(first + i / D) * (D + 8) + i % D] = sum;
    }
    named_barrier(1, C::kConsumers);
  }
}

}  // namespace oscar::decode
