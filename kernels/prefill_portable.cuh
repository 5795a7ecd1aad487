// Prefill attention with mma.sync (sm_80 and later): four warps of 16 query rows, one block of 64
// keys in shared memory at a time; a second thread block on the multiprocessor fills the waits.
#pragma once

#include "kernels/prefill_softmax.cuh"

namespace oscar::prefill {

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Query fragments of a warp's 16 rows from global memory: step i holds dims 16 i .. 16 i + 15.
template <int D>
__device__ __forceinline__ void load_query(const AttendPrefillParams& p, const QueryRows& rows,
                                           int lane, uint32_t (&q)[D / 16][4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint16_t* row =
        p.q + rows.token[h] * p.q_token_stride + rows.head[h] * p.q_head_stride + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      q[i][h] = __ldg(reinterpret_cast<const uint32_t*>(row + 16 * i));
      q[i][h + 2] = __ldg(reinterpret_cast<const uint32_t*>(row + 16 * i + 8));
    }
  }
}
// The same rows into a tile of 64 rows in shared memory, by `threads` threads: row of a tile =
// first_row + i.
template <int D>
__device__ __forceinline__ void store_query_tile(const AttendPrefillParams& p, const PrefillWork& w,
                                                 int first_row, uint32_t tile, int thread,
                                                 int threads) {
  const int group = p.num_q_heads / p.cache.num_kv_heads;
  for (int i = thread; i < 64 * (D / 8); i += threads) {
    const int row = i / (D / 8), chunk = i % (D / 8);
    const int packed = w.first_row + min(first_row + row, w.num_rows - 1);
    const uint16_t* source = p.q + (w.new_begin + packed / group) * p.q_token_stride +
                             (w.kv_head * group + packed % group) * p.q_head_stride;
    store_shared_16(tile + chunk_offset<64>(row, chunk),
                    __ldg(reinterpret_cast<const uint4*>(source) + chunk));
  }
}

template <int D>
struct Portable {
  static constexpr int kWarps = 4, kRows = 16 * kWarps;
  static constexpr bool kQueryInRegisters = D <= 128;
  static constexpr int kTile = tile_bytes(D, kKeys);
  static constexpr int kShared = (kQueryInRegisters ? 2 : 3) * kTile;
};

template <int D>
__device__ __forceinline__ void attend_portable(const AttendPrefillParams& p, uint8_t* shared) {
  using C = Portable<D>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const PrefillWork w = p.work[blockIdx.x];
  const int group = p.num_q_heads / p.cache.num_kv_heads;
  const uint32_t k_tile = ptx::shared_address(shared), v_tile = k_tile + C::kTile;
  const uint32_t q_tile = v_tile + C::kTile;  // only when the query is not in registers
  const QueryRows rows(p, w, 16 * warp, lane);
  uint32_t q[C::kQueryInRegisters ? D / 16 : 1][4];
  if constexpr (C::kQueryInRegisters) {
    load_query<D>(p, rows, lane, q);
  } else {
    store_query_tile<D>(p, w, 0, q_tile, threadIdx.x, 32 * C::kWarps);
  }
  const ScoreScale scale(p);
  SoftmaxRows softmax;
  float o[D / 8][4];
#pragma unroll
  for (int n = 0; n < D / 8; ++n) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0F;
  const int matrix = lane / 8, matrix_row = lane % 8;

  PrefillBlock block = prefill_block(w.lengths, w.new_tokens, w.block_begin);
  for (int index = w.block_begin; index < w.block_end;
       ++index, block = next_block(w.lengths, w.new_tokens, block)) {
    __syncthreads();  // everybody is done with the tiles
    if (block.source == PrefillSource::kHistory) {
      PageLoads<D> loads;
      loads.load(p, w, block, warp, lane);
      store_page<D>(loads, block.count, warp, k_tile, v_tile, lane);
    } else {
      copy_rows<D, 32 * C::kWarps>(row_source<D>(p, w, block, true), block.count, k_tile,
                                   threadIdx.x);
      copy_commit();
      copy_rows<D, 32 * C::kWarps>(row_source<D>(p, w, block, false), block.count, v_tile,
                                   threadIdx.x);
    }
    copy_commit();
    copy_wait<1>();
    __syncthreads();
    float s[8][4];
#pragma unroll
    for (int n = 0; n < 8; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0F;
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      uint32_t a[4];
      if constexpr (C::kQueryInRegisters) {
#pragma unroll
        for (int j = 0; j < 4; ++j) a[j] = q[i][j];
      } else {
        load_matrices(a, q_tile + chunk_offset<64>(16 * warp + matrix % 2 * 8 + matrix_row,
                                                   2 * i + matrix / 2));
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {  // 16 keys
        uint32_t b[4];
        load_matrices(b, k_tile + chunk_offset<kKeys>(16 * n + matrix / 2 * 8 + matrix_row,
                                                      2 * i + matrix % 2));
        ptx::mma_bf16(s[2 * n], a[0], a[1], a[2], a[3], b[0], b[1]);
        ptx::mma_bf16(s[2 * n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }
    uint32_t weights[4][4];
    float factor[2];
    const ColumnRange range = visible_columns(w, block, rows, p.sliding_window, group);
    if (softmax.step(s, scale, range, lane, factor)) rescale(o, factor);
    pack_weights(s, weights);
    copy_wait<0>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {  // 16 dims
        uint32_t b[4];
        load_matrices_transposed(
            b,
            v_tile + chunk_offset<kKeys>(16 * i + matrix % 2 * 8 + matrix_row, 2 * n + matrix / 2));
        ptx::mma_bf16(o[2 * n], weights[i][0], weights[i][1], weights[i][2], weights[i][3], b[0],
                      b[1]);
        ptx::mma_bf16(o[2 * n + 1], weights[i][0], weights[i][1], weights[i][2], weights[i][3],
                      b[2], b[3]);
      }
    }
  }
  store_rows<D>(p, rows, softmax, o, lane);
}

template <int D>
__global__ void __launch_bounds__(32 * Portable<D>::kWarps, D <= 128 ? 2 : 1)
    attend_portable_kernel(const __grid_constant__ AttendPrefillParams p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  attend_portable<D>(p, shared);
}

}  // namespace oscar::prefill
