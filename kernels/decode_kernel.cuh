// The decode attention kernel: persistent thread blocks, one producer warp that fills a ring in
// shared memory with asynchronous copies, consumer warps that take its entries in turn, merge over
// warps and over thread blocks in the same launch. Instantiated by attend_decode_int2_d*.cu.
#pragma once

#include <cuda_runtime.h>

#include "kernels/decode_merge.cuh"

namespace oscar::decode {

// What the warps of a thread block need to know about the queries of a run.
template <int D, int C, bool kQInRegisters>
struct RunQuery {
  QueryFragments<D, kQInRegisters> fragments;
  float sum[C];  // of the column's query, in log2 score units
  ScoreScale scale;
  ColumnLimits<C> limits;
  int furthest_first;  // below it some column sees no key
};

template <int C>
__device__ __forceinline__ int column_limits(const AttendDecodeParams& p, const DecodeWork& w,
                                             int t, ColumnLimits<C>& limits) {
  const int group = p.num_q_heads / p.cache.num_kv_heads;
  const int total = w.lengths.sink + w.lengths.history + w.lengths.recent;
#pragma unroll
  for (int c = 0; c < C; ++c) {
    const int column = w.column_begin + lane_column<C>(c, t);
    const int position = total - p.num_query_tokens + min(column / group, p.num_query_tokens - 1);
    limits.last[c] = position;
    limits.first[c] = p.sliding_window > 0 ? max(0, position - p.sliding_window + 1) : 0;
  }
  return p.sliding_window > 0 ? max(0, total - p.sliding_window) : 0;
}

// Fragments, sums and scale from the fp32 query in shared memory. The largest |q| is scaled into
// [2^14, 2^15), so that q / 4^4 keeps its digits.
template <int D, int C, class Conf>
__device__ __forceinline__ void prepare_query(const AttendDecodeParams& p, const float* q_shared,
                                              RunQuery<D, C, Conf::kQInRegisters>& query,
                                              uint2* fragments, int warp, int lane) {
  const int g = lane >> 2, t = lane & 3;
  const auto element = [&](int item) {
    return *reinterpret_cast<const float2*>(q_shared + fragment_column<C>(g) * (D + 8) +
                                            32 * (item / 4) + 8 * t + 2 * (item % 4));
  };
  float largest = 0.0F;
  const float log2_scale = p.softmax_scale * kLog2e;
  float row_sum = 0.0F;
#pragma unroll
  for (int item = 0; item < D / 8; ++item) {
    const float2 q = element(item);
    largest = fmaxf(largest, fmaxf(fabsf(q.x), fabsf(q.y)));
    row_sum += q.x + q.y;
  }
  row_sum += __shfl_xor_sync(~0U, row_sum, 1);
  row_sum += __shfl_xor_sync(~0U, row_sum, 2);
#pragma unroll
  for (int c = 0; c < C; ++c)
    query.sum[c] = __shfl_sync(~0U, row_sum, fragment_lane<C>(c, t)) * log2_scale;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, d));
  const int q_exponent = largest > 0.0F ? max(-60, min(60, 14 - ilogbf(largest))) : 0;
  float q_scale = ldexpf(1.0F, q_exponent);
  query.scale = {ldexpf(log2_scale, 24 - q_exponent), p.softcap * kLog2e,
                 p.softcap > 0.0F ? 1.0F / (p.softcap * kLog2e) : 0.0F};
  if (C == 1 && g % 2 != 0) q_scale = 0.0F;  // the odd columns stay empty
  unroll<D / 8>([&]<int item>() {
    constexpr float fold = power_of_4(-item_exponent(D, item));
    const float2 q = element(item);
    const uint32_t packed = pack_fp16(q.x * (q_scale * fold), q.y * (q_scale * fold));
    if constexpr (Conf::kQInRegisters) {
      query.fragments.regs[item] = packed;
    } else if (warp == 0) {
      reinterpret_cast<uint32_t*>(fragments)[(item / 2 * 32 + lane) * 2 + item % 2] = packed;
    }
  });
  query.fragments.shared = fragments;
}

template <int D>
__device__ __forceinline__ void prepare_rows(const AttendDecodeParams& p, const DecodeWork& w,
                                             const float* q_shared, RowQuery& query,
                                             uint4* fragments, int warp, int lane) {
  const int g = lane >> 2, t = lane & 3;
  const int group = p.num_q_heads / p.cache.num_kv_heads;
  const int total = w.lengths.sink + w.lengths.history + w.lengths.recent;
  const float log2_scale = p.softmax_scale * kLog2e;
  const auto element = [&](int c, int item) {
    return *reinterpret_cast<const float2*>(q_shared + (g + 8 * c) * (D + 8) + 32 * (item / 4) +
                                            8 * t + 2 * (item % 4));
  };
  float largest = 0.0F;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int column = w.column_begin + g + 8 * c;
    const int position = total - p.num_query_tokens + min(column / group, p.num_query_tokens - 1);
    query.limits.last[c] = position;
    query.limits.first[c] = p.sliding_window > 0 ? max(0, position - p.sliding_window + 1) : 0;
    float row_sum = 0.0F;
#pragma unroll
    for (int item = 0; item < D / 8; ++item) {
      const float2 q = element(c, item);
      largest = fmaxf(largest, fmaxf(fabsf(q.x), fabsf(q.y)));
      row_sum += q.x + q.y;
    }
    row_sum += __shfl_xor_sync(~0U, row_sum, 1);
    row_sum += __shfl_xor_sync(~0U, row_sum, 2);
    query.sum[c] = row_sum * log2_scale;
  }
  query.furthest_first = p.sliding_window > 0 ? max(0, total - p.sliding_window) : 0;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, d));
  const int q_exponent = largest > 0.0F ? max(-60, min(60, 14 - ilogbf(largest))) : 0;
  const float q_scale = ldexpf(1.0F, q_exponent);
  query.scale = {ldexpf(log2_scale, 24 - q_exponent), p.softcap * kLog2e,
                 p.softcap > 0.0F ? 1.0F / (p.softcap * kLog2e) : 0.0F};
  if (warp == 0) {
    unroll<D / 16>([&]<int step>() {
      const auto packed = [&]<int item>(int c) {
        constexpr float fold = power_of_4(-item_exponent(D, item));
        const float2 q = element(c, item);
        return pack_fp16(q.x * (q_scale * fold), q.y * (q_scale * fold));
      };
      fragments[step * 32 + lane] = make_uint4(
          packed.template operator()<2 * step>(0), packed.template operator()<2 * step>(1),
          packed.template operator()<2 * step + 1>(0), packed.template operator()<2 * step + 1>(1));
    });
  }
  query.fragments = fragments;
}

template <int D, int C, int W, int kEntries>
__device__ __forceinline__ void attend_decode(const AttendDecodeParams& p) {
  using Conf = Config<D, C, W>;
  constexpr bool kRows = Conf::kRows;
  static_assert(16 * kEntries <= Conf::kBarrierBytes && kEntries % W == 0);
  // After the last copy the ring serves as space for the merges.
  static_assert(W * Conf::kColumns * Conf::kMergeStride * 4 <= kEntries * Conf::kEntryBytes);
  static_assert(Conf::kConsumers * sizeof(PartialSum) <= kEntries * Conf::kEntryBytes);
  extern __shared__ __align__(128) uint8_t shared[];
  float* merge = reinterpret_cast<float*>(shared + kEntries * Conf::kEntryBytes);
  float* q_shared = merge + Conf::kMergeBytes / 4;
  uint2* fragments = reinterpret_cast<uint2*>(q_shared + Conf::kQBytes / 4);
  float2* states = reinterpret_cast<float2*>(fragments) + Conf::kFragmentBytes / 8;
  uint8_t* barriers = reinterpret_cast<uint8_t*>(states) + Conf::kStateBytes;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane & 3;
  prefetch_inputs<D>(p);
  const Ring<kEntries> ring{shared, shared_address(barriers)};
  // Spread over the warps: the threads of one warp initialise one after the other.
  for (int i = warp + (W + 1) * lane; i < kEntries; i += 32 * (W + 1)) {
    mbarrier_init(ring.full(i), kCopyArrivals);
    mbarrier_init(ring.empty(i), 1);
  }
  mbarrier_init_fence();
  launch_dependents();
  __syncthreads();
  grid_dependency_wait();
  if (warp == W) {
    produce<D, Conf>(p, ring, lane);
    return;
  }

  RingCursor<Conf, kEntries> cursor{warp};
  int turn = warp;  // this warp's first entry, counted from the run's first one
  int run = blockIdx.x;
  DecodeWork w = load_work(p.work, run);
  if (w.num_columns == 0) return;
  const bool joins_parts = w.num_parts > 1 && w.part == w.num_parts - 1;
  while (true) {
    load_query<D, Conf>(p, w, q_shared, merge);
    named_barrier(1, Conf::kConsumers);
    std::conditional_t<kRows, RowQuery, RunQuery<D, C, Conf::kQInRegisters>> query;
    if constexpr (kRows) {
      prepare_rows<D>(p, w, q_shared, query, reinterpret_cast<uint4*>(fragments), warp, lane);
    } else {
      query.furthest_first = column_limits<C>(p, w, t, query.limits);
      prepare_query<D, C, Conf>(p, q_shared, query, fragments, warp, lane);
    }
    if constexpr (!Conf::kQInRegisters) named_barrier(1, Conf::kConsumers);

    std::conditional_t<kRows, RowSoftmax<D>, Softmax<D, C>> state;
    state.reset();
    const int chunks = w.chunk_end - w.chunk_begin;
    const int entries = chunks + w.page_end - w.page_begin;
    for (; turn < chunks; turn += W) {
      const Chunk chunk = locate_chunk(p.cache, w.lengths, w.chunk_begin + turn);
      const uint8_t* rows = cursor.wait(ring);
      if constexpr (kRows) {
        attend_chunk<D>(state, q_shared, p.softmax_scale * kLog2e, query, rows, lane,
                        chunk.row_begin, chunk.row_end, chunk.first_position);
      } else {
        attend_chunk<D, C>(state, q_shared, p.softmax_scale * kLog2e, query.scale, rows, lane,
                           chunk.row_begin, chunk.row_end, chunk.first_position, query.limits);
      }
      cursor.release(ring, lane);
    }
    state.to_int2_units();
    const int end_position = w.lengths.sink + w.lengths.history;
    int first_position = w.lengths.sink + (w.page_begin + turn - chunks) * kInt2PageTokens;
    for (; turn < entries; turn += W, first_position += W * kInt2PageTokens) {
      const bool general = first_position + kInt2PageTokens > end_position ||
                           first_position < query.furthest_first || p.softcap > 0.0F;
      const uint8_t* records = cursor.wait(ring);
#pragma unroll 1
      for (int r = 0; r < kPageRecords; r += Conf::kBatch) {
        const uint8_t* batch = records + r * record_bytes(D);
        const int position = first_position + r * kRecordTokens;
        if constexpr (kRows) {
          if (general) {
            attend_records<D, Conf::kBatch, true>(state, query, batch, lane, position,
                                                  end_position);
          } else {
            attend_records<D, Conf::kBatch, false>(state, query, batch, lane, position,
                                                   end_position);
          }
        } else if (general) {
          attend_records<D, C, Conf::kBatch, true>(state, query.fragments, query.sum, query.scale,
                                                   batch, lane, position, end_position,
                                                   query.limits);
        } else {
          attend_records<D, C, Conf::kBatch, false>(state, query.fragments, query.sum, query.scale,
                                                    batch, lane, position, end_position,
                                                    query.limits);
        }
      }
      cursor.release(ring, lane);
    }
    turn -= entries;

    const bool last = w.next < 0;
    if (last) named_barrier(1, Conf::kConsumers);  // every entry is read: the ring is free
    merge_warps<D, Conf>(p, w, state, last ? reinterpret_cast<float*>(shared) : merge,
                         last ? Conf::kColumns : kMergeColumns, states, warp, lane);
    if (last) break;
    run = w.next;
    w = load_work(p.work, run);
  }
  if (joins_parts) {
    merge_parts<D, Conf>(p, load_work(p.work, blockIdx.x), reinterpret_cast<PartialSum*>(shared));
  }
}

}  // namespace oscar::decode
