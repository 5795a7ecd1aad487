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

// Brings into the L2 cache what the thread blocks need before their first copy: the schedule, the
// page tables, the query and its rotation; the thread blocks share out the lines. Only hints: their
// content may still change, so this may come before the grid dependency.
template <int D>
__device__ __forceinline__ void prefetch_inputs(const AttendDecodeParams& p) {
  constexpr int kLine = 128;
  int line = threadIdx.x * gridDim.x + blockIdx.x;
  const auto take = [&](const void* pointer, int64_t bytes) {
    const int lines = static_cast<int>(min((bytes + kLine - 1) / kLine, int64_t{1} << 20));
    if (line >= 0 && line < lines && pointer != nullptr)
      prefetch_l2(static_cast<const uint8_t*>(pointer) + int64_t{line} * kLine);
    line -= lines;
  };
  take(p.work, int64_t{sizeof(DecodeWork)} * gridDim.x);
  take(p.cache.int2_page_table, int64_t{4} * p.batch * p.cache.int2_table_stride);
  take(p.cache.bf16_page_table, int64_t{4} * p.batch * p.cache.bf16_table_stride);
  // A query that is not contiguous is not helped: its lines are somewhere else.
  const int element_bytes = p.q_type == ElementType::kFp32 ? 4 : 2;
  const int rows = p.batch * p.num_query_tokens * p.num_q_heads;
  if (p.q_head_stride == D && p.q_seq_stride * p.batch == int64_t{rows} * D)
    take(p.q, int64_t{rows} * D * element_bytes);
  take(p.rotation, p.rotation == nullptr
                       ? 0
                       : int64_t{4} * D * D * (p.rotation_per_head ? p.cache.num_kv_heads : 1));
}

// Query rows of a run into shared memory as fp32 [columns][D + 8], rotated when asked; columns past
// num_columns are zero. `partial`: W * kMergeColumns * D floats.
template <int D, class C>
__device__ __forceinline__ void load_query(const AttendDecodeParams& p, const DecodeWork& w,
                                           float* q_shared, float* partial) {
  const int group = p.num_q_heads / p.cache.num_kv_heads;
  constexpr int kElements = C::kColumns * D;
#pragma unroll
  for (int first = 0; first < kElements; first += C::kConsumers) {
    const int i = first + threadIdx.x;
    if (i >= kElements) break;
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
  // A warp takes every W-th row of R for up to 8 columns; the sums over the warps meet in
  // `partial`.
  const float* r = p.rotation + (p.rotation_per_head ? static_cast<int64_t>(w.kv_head) * D * D : 0);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kAtOnce = C::kColumns < 8 ? C::kColumns : 8;
  named_barrier(1, C::kConsumers);
#pragma unroll 1
  for (int first = 0; first < w.num_columns; first += kAtOnce) {
    float acc[kAtOnce][D / 32];
#pragma unroll
    for (int c = 0; c < kAtOnce; ++c) {
#pragma unroll
      for (int j = 0; j < D / 32; ++j) acc[c][j] = 0.0F;
    }
#pragma unroll(D <= 128 ? 5 : 2)
    for (int row = warp; row < D; row += C::kWarps) {
      float weight[D / 32];
#pragma unroll
      for (int j = 0; j < D / 32; ++j) weight[j] = __ldg(r + row * D + 32 * j + lane);
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        const float q = q_shared[(first + c) * (D + 8) + row];
#pragma unroll
        for (int j = 0; j < D / 32; ++j) acc[c][j] = fmaf(q, weight[j], acc[c][j]);
      }
    }
    named_barrier(1, C::kConsumers);  // the rows of q are read: they may be replaced
#pragma unroll
    for (int pair = 0; pair < kAtOnce; pair += kMergeColumns) {
#pragma unroll
      for (int c = 0; c < kMergeColumns; ++c) {
#pragma unroll
        for (int j = 0; j < D / 32; ++j)
          partial[(warp * kMergeColumns + c) * D + 32 * j + lane] = acc[pair + c][j];
      }
      named_barrier(1, C::kConsumers);
      for (int i = threadIdx.x; i < kMergeColumns * D; i += C::kConsumers) {
        float sum = 0.0F;
#pragma unroll
        for (int k = 0; k < C::kWarps; ++k) sum += partial[k * kMergeColumns * D + i];
        q_shared[(first + pair + i / D) * (D + 8) + i % D] = sum;
      }
      named_barrier(1, C::kConsumers);
    }
  }
}

}  // namespace oscar::decode
