// The decode attention kernel: persistent thread blocks, one producer warp that fills a ring in
// shared memory with asynchronous copies, consumer warps that take its entries in turn, merge over
// warps and over thread blocks in the same launch. Instantiated by attend_decode_int2_d*.cu.
#pragma once

#include <cuda_runtime.h>

#include "kernels/attend_decode_int2.h"
#include "kernels/decode_chunk.cuh"
#include "kernels/decode_query.cuh"
#include "kernels/decode_ring.cuh"

namespace oscar::decode {

template <int D, int NT, int W, int kEntries>
__device__ __forceinline__ void attend_decode(const AttendDecodeParams& p) {
  using C = Config<D, NT, W>;
  static_assert(16 * kEntries + 16 <= C::kBarrierBytes);
  extern __shared__ __align__(128) uint8_t shared[];
  float* merge = reinterpret_cast<float*>(shared + kEntries * C::kEntryBytes);
  float* q_shared = merge + C::kMergeBytes / 4;
  uint2* fragments = reinterpret_cast<uint2*>(q_shared + C::kQBytes / 4);
  float* state_shared = reinterpret_cast<float*>(fragments) + C::kFragmentBytes / 4;
  uint8_t* tail = reinterpret_cast<uint8_t*>(state_shared) + C::kStateBytes;
  int* flag = reinterpret_cast<int*>(tail + 16 * kEntries);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const Ring<kEntries> ring{shared, shared_address(tail)};
  for (int i = threadIdx.x; i < kEntries; i += C::kThreads) {
    mbarrier_init(ring.full(i), kCopyArrivals);
    mbarrier_init(ring.empty(i), 1);
  }
  mbarrier_init_fence();
  __syncthreads();
  if (warp == C::kWarps) {
    produce<D, C>(p, ring, lane);
    return;
  }

  const int group = p.num_q_heads / p.cache.num_kv_heads;
  Softmax<D, NT> state;
  QueryFragments<D, NT, C::kQInRegisters> query;
  query.shared = fragments;
  int entry = 0;  // number of the run's first ring entry

  for (int run = blockIdx.x; run >= 0; run = p.work[run].next) {
    const DecodeWork& w = p.work[run];
    if (w.num_columns == 0) return;
    const SequenceLengths lengths = w.lengths;
    load_query<D, C>(p, w, q_shared, merge);
    named_barrier(1, C::kConsumers);

    const int total = lengths.sink + lengths.history + lengths.recent;
    ColumnLimits<NT> limits;
    int furthest_first = 0;  // over the columns: below it some column sees no key
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = w.column_begin + 8 * n + 2 * t + c;
        const int position =
            total - p.num_query_tokens + min(column / group, p.num_query_tokens - 1);
        limits.last[n][c] = position;
        limits.first[n][c] = p.sliding_window > 0 ? max(0, position - p.sliding_window + 1) : 0;
      }
    }
    if (p.sliding_window > 0) furthest_first = max(0, total - p.sliding_window);

    // Query scale: the largest |q| lands in [2^14, 2^15), so that q / 4^4 keeps its digits.
    float q_sum[NT][2], largest = 0.0F;
    const float log2_scale = p.softmax_scale * kLog2e;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      float row_sum = 0.0F;
#pragma unroll
      for (int item = 0; item < D / 8; ++item) {
        const float2 q = *reinterpret_cast<const float2*>(q_shared + (8 * n + g) * (D + 8) +
                                                          32 * (item / 4) + 8 * t + 2 * (item % 4));
        largest = fmaxf(largest, fmaxf(fabsf(q.x), fabsf(q.y)));
        row_sum += q.x + q.y;
      }
      row_sum += __shfl_xor_sync(~0U, row_sum, 1);
      row_sum += __shfl_xor_sync(~0U, row_sum, 2);
#pragma unroll
      for (int c = 0; c < 2; ++c)
        q_sum[n][c] = __shfl_sync(~0U, row_sum, 4 * (2 * t + c)) * log2_scale;
    }
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, d));
    const int q_exponent = largest > 0.0F ? max(-60, min(60, 14 - ilogbf(largest))) : 0;
    const float q_scale = ldexpf(1.0F, q_exponent);
    const ScoreScale scale{ldexpf(log2_scale, 24 - q_exponent), p.softcap * kLog2e,
                           p.softcap > 0.0F ? 1.0F / (p.softcap * kLog2e) : 0.0F};
    unroll<D / 8>([&]<int item>() {
      constexpr float fold = power_of_4(-item_exponent(D, item));
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const float2 q = *reinterpret_cast<const float2*>(q_shared + (8 * n + g) * (D + 8) +
                                                          32 * (item / 4) + 8 * t + 2 * (item % 4));
        const uint32_t packed = pack_fp16(q.x * (q_scale * fold), q.y * (q_scale * fold));
        if constexpr (C::kQInRegisters) {
          query.regs[n][item] = packed;
        } else if (warp == 0) {
          reinterpret_cast<uint32_t*>(fragments)[((item / 2 * NT + n) * 32 + lane) * 2 + item % 2] =
              packed;
        }
      }
    });
    if constexpr (!C::kQInRegisters) named_barrier(1, C::kConsumers);

    state.reset();
    const int num_chunks = w.chunk_end - w.chunk_begin;
    for (int i = warp; i < num_chunks; i += C::kWarps) {
      const Chunk chunk = locate_chunk(p.cache, lengths, w.chunk_begin + i);
      ChunkWeights<NT> weights;
      int n = entry + 2 * i;
      ring.wait(n);
      chunk_scores<D, NT>(state, weights, q_shared, log2_scale, scale,
                          ring.entries + n % kEntries * C::kEntryBytes, lane, chunk.row_begin,
                          chunk.row_end, chunk.first_position, limits);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(ring.empty(n));
      ++n;
      ring.wait(n);
      chunk_values<D, NT>(state, weights, ring.entries + n % kEntries * C::kEntryBytes, lane,
                          chunk.row_begin, chunk.row_end);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(ring.empty(n));
    }
    state.to_int2_units();

    // The pages go on where the chunks stopped, so that all warps get the same share.
    const int end_position = lengths.sink + lengths.history;
    const int num_pages = w.page_end - w.page_begin;
    const int turn = (warp + C::kWarps - num_chunks % C::kWarps) % C::kWarps;
    for (int i = turn; i < num_pages; i += C::kWarps) {
      const int n = entry + 2 * num_chunks + i;
      const int first_position = lengths.sink + (w.page_begin + i) * kInt2PageTokens;
      const bool general = first_position + kInt2PageTokens > end_position ||
                           first_position < furthest_first || p.softcap > 0.0F;
      const uint8_t* records = ring.entries + n % kEntries * C::kEntryBytes;
      ring.wait(n);
#pragma unroll 1
      for (int r = 0; r < kPageRecords; r += C::kBatch) {
        const uint8_t* batch = records + r * record_bytes(D);
        const int position = first_position + r * kRecordTokens;
        if (general) {
          attend_records<D, NT, C::kBatch, true>(state, query, q_sum, scale, batch, lane, position,
                                                 end_position, limits);
        } else {
          attend_records<D, NT, C::kBatch, false>(state, query, q_sum, scale, batch, lane, position,
                                                  end_position, limits);
        }
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(ring.empty(n));
    }
    entry += 2 * num_chunks + num_pages;

    // --- merge over the warps
    // ---------------------------------------------------------------------
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) {
          state.sum[n][c] += __shfl_xor_sync(~0U, state.sum[n][c], d);
          state.min_sum[n][c] += __shfl_xor_sync(~0U, state.min_sum[n][c], d);
        }
        if (g == 0) {
          float* slot = state_shared + (warp * C::kColumns + 8 * n + 2 * t + c) * 2;
          slot[0] = state.sum[n][c] > 0.0F ? state.reference[n][c] : kMasked;
          slot[1] = state.sum[n][c];
        }
      }
    }
    named_barrier(1, C::kConsumers);
    // Every warp works out the sum over the warps for its lanes' columns, and writes its share of
    // the normalised result.
    const bool split = w.num_parts > 1;
    // Counters grow from the front of the workspace, partial results from its end.
    constexpr int64_t slot_floats = C::kColumns * (D + 4);
    float* slots = static_cast<float*>(p.workspace) + p.workspace_bytes / 16 * 4 - slot_floats;
    float* slot = slots - (w.first_slot + w.part) * slot_floats;
    const auto out_row = [&](int column) {
      const int token = (w.column_begin + column) / group;
      const int head = w.kv_head * group + (w.column_begin + column) % group;
      return (static_cast<int64_t>(w.seq) * p.num_query_tokens + token) * p.num_q_heads + head;
    };
    float factor[NT][2];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = 8 * n + 2 * t + c;
        const float2* states = reinterpret_cast<const float2*>(state_shared) + column;
        float high = kMasked, total = 0.0F;
#pragma unroll
        for (int i = 0; i < C::kWarps; ++i) high = fmaxf(high, states[i * C::kColumns].x);
#pragma unroll
        for (int i = 0; i < C::kWarps; ++i)
          total =
              fmaf(states[i * C::kColumns].y, exp2_fast(states[i * C::kColumns].x - high), total);
        factor[n][c] = state.sum[n][c] > 0.0F
                           ? __fdividef(exp2_fast(state.reference[n][c] - high), total)
                           : 0.0F;
        if (warp == 0 && g == 0 && column < w.num_columns) {
          const float lse2 = total > 0.0F ? high + log2f(total) : kMasked;
          if (split) {
            slot[column] = lse2;
          } else if (p.lse_nats != nullptr) {
            p.lse_nats[out_row(column)] = lse2 * kLn2;
          }
        }
      }
    }
#pragma unroll
    for (int chunk = 0; chunk < C::kColumns / kMergeColumns; ++chunk) {
      if (chunk * kMergeColumns >= w.num_columns) break;
      const int n = chunk / 2;
      if (t / 2 == chunk % 2) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float* row = merge + (warp * kMergeColumns + 2 * (t % 2) + c) * D;
          unroll<D / 32>([&]<int quad>() {  // four items, four consecutive dims
            constexpr int item = 4 * quad, full = D / 64 * 8;
            const int dim = item < full ? 64 * (item / 8) + 8 * g + item % 8 : full * 8 + 4 * g;
            float x[4];
            unroll<4>([&]<int j>() {
              constexpr int i = item + j;
              constexpr float unit = power_of_4(12 - item_exponent(D, i));
              x[j] =
                  fmaf(state.o[n][i / 2][i % 2 * 2 + c], unit, state.min_sum[n][c]) * factor[n][c];
            });
            *reinterpret_cast<float4*>(row + dim) = make_float4(x[0], x[1], x[2], x[3]);
          });
        }
      }
      named_barrier(1, C::kConsumers);
      for (int i = threadIdx.x; i < kMergeColumns * D / 4; i += C::kConsumers) {
        const int column = chunk * kMergeColumns + i / (D / 4), dim = i % (D / 4) * 4;
        if (column < w.num_columns) {
          float4 value = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
#pragma unroll
          for (int k = 0; k < C::kWarps; ++k)
            add(value, 1.0F, reinterpret_cast<const float4*>(merge)[k * kMergeColumns * D / 4 + i]);
          if (split) {
            *reinterpret_cast<float4*>(slot + 4 * C::kColumns + column * D + dim) = value;
          } else {
            store_four(p.out, p.out_type, out_row(column) * D + dim, value);
          }
        }
      }
      named_barrier(1, C::kConsumers);
    }
    if (!split) continue;

    // --- merge over the thread blocks: the last one to arrive does it
    // ------------------------------
    int* counters = static_cast<int*>(p.workspace);
    __threadfence();
    named_barrier(1, C::kConsumers);
    if (threadIdx.x == 0) {
      const int arrived = atomicAdd(&counters[w.segment], 1);
      *flag = arrived == w.num_parts - 1;
      if (*flag) counters[w.segment] = 0;
    }
    named_barrier(1, C::kConsumers);
    if (*flag) {
      __threadfence();
      const float* first = slots - w.first_slot * slot_floats;
      const int parts = w.num_parts;
      // A warp turns a column's log-sums into weights; those that fit stay in shared memory.
      constexpr int kKept = C::kMergeBytes / 4 / 2;
      float2* column_state = reinterpret_cast<float2*>(state_shared);  // maximum, 1 / sum
      for (int column = warp; column < w.num_columns; column += C::kWarps) {
        float high = kMasked, sum = 0.0F;
        for (int part = lane; part < parts; part += 32)
          high = fmaxf(high, __ldcg(first - part * slot_floats + column));
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) high = fmaxf(high, __shfl_xor_sync(~0U, high, d));
        for (int part = lane; part < parts; part += 32) {
          const float weight = exp2_fast(__ldcg(first - part * slot_floats + column) - high);
          sum += weight;
          if (part * C::kColumns + column < kKept) merge[part * C::kColumns + column] = weight;
        }
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) sum += __shfl_xor_sync(~0U, sum, d);
        if (lane == 0) {
          column_state[column] = make_float2(high, __fdividef(1.0F, sum));
          if (p.lse_nats != nullptr) p.lse_nats[out_row(column)] = (high + log2f(sum)) * kLn2;
        }
      }
      named_barrier(1, C::kConsumers);
      // Threads share out the parts when there are more threads than output quads.
      const int quads = w.num_columns * D / 4;
      const int shares = max(1, min(parts, C::kConsumers / quads));
      float4* shared_sums = reinterpret_cast<float4*>(merge + kKept);
      for (int base = 0; base < quads; base += C::kConsumers) {
        const int i = base + threadIdx.x % (shares > 1 ? quads : C::kConsumers);
        const int share = shares > 1 ? threadIdx.x / quads : 0;
        const bool active = i < quads && share < shares;
        const int column = min(i, quads - 1) / (D / 4);
        float4 value = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
        if (active) {
#pragma unroll 8
          for (int part = share; part < parts; part += shares) {
            const float weight = part * C::kColumns + column < kKept
                                     ? merge[part * C::kColumns + column]
                                     : exp2_fast(__ldcg(first - part * slot_floats + column) -
                                                 column_state[column].x);
            add(value, weight,
                __ldcg(
                    reinterpret_cast<const float4*>(first - part * slot_floats + 4 * C::kColumns) +
                    i));
          }
        }
        if (shares > 1) {
          if (active) shared_sums[share * quads + i] = value;
          named_barrier(1, C::kConsumers);
          if (active && share == 0) {
            for (int k = 1; k < shares; ++k) add(value, 1.0F, shared_sums[k * quads + i]);
          }
        }
        if (active && share == 0) {
          const float inverse = column_state[column].y;
          value.x *= inverse, value.y *= inverse, value.z *= inverse, value.w *= inverse;
          store_four(p.out, p.out_type, out_row(column) * D + i % (D / 4) * 4, value);
        }
      }
    }
    named_barrier(1, C::kConsumers);
  }
}

}  // namespace oscar::decode
