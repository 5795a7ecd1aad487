// Joins the partial results of decode attention: over the warps of a thread block, and over the
// thread blocks that share a segment.
//
// Between thread blocks a result travels through the workspace without counters and fences: a word
// that is 0 has not been written (a result of +0 is stored as -0), the reader waits until a word is
// there and puts the 0 back. Every word has one reader. The reader of a segment is the thread block
// of its last part: all others have lower block indices, so they have started whenever it runs, and
// none of them waits for it.
#pragma once

#include "kernels/decode_query.cuh"

namespace oscar::decode {

// Partial result of part `part`: a quad (four consecutive dims of a column) is 16 bytes, and has
// its own copy of the column's log2-sum behind all quads.
template <int D, class C>
struct PartialSlots {
  static constexpr int kQuads = C::kColumns * D / 4;
  uint32_t* words;  // of the segment's first part
  __device__ __forceinline__ uint4* quad(int part, int i) const {
    return reinterpret_cast<uint4*>(words + static_cast<int64_t>(part) * 5 * kQuads) + i;
  }
  __device__ __forceinline__ uint32_t* log_sum(int part, int i) const {
    return words + static_cast<int64_t>(part) * 5 * kQuads + 4 * kQuads + i;
  }
};
template <int D, class C>
__device__ __forceinline__ PartialSlots<D, C> partial_slots(const AttendDecodeParams& p,
                                                            const DecodeWork& w) {
  constexpr int64_t kWords = 5 * PartialSlots<D, C>::kQuads;
  return {static_cast<uint32_t*>(p.workspace) + w.first_slot * kWords};
}

__device__ __forceinline__ uint32_t written_word(float x) {
  return x == 0.0F ? 0x80000000U : __float_as_uint(x);
}
__device__ __forceinline__ float4 as_float4(uint4 x) {
  return make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z),
                     __uint_as_float(x.w));
}

__device__ __forceinline__ int64_t output_row(const AttendDecodeParams& p, const DecodeWork& w,
                                              int column) {
  const int group = p.num_q_heads / p.cache.num_kv_heads;
  const int token = (w.column_begin + column) / group;
  const int head = w.kv_head * group + (w.column_begin + column) % group;
  return (static_cast<int64_t>(w.seq) * p.num_query_tokens + token) * p.num_q_heads + head;
}
template <int D>
__device__ __forceinline__ void store_result(const AttendDecodeParams& p, const DecodeWork& w,
                                             int column, int dim, float4 value, float log2_sum) {
  const int64_t row = output_row(p, w, column);
  store_four(p.out, p.out_type, row * D + dim, value);
  if (dim == 0 && p.lse_nats != nullptr) p.lse_nats[row] = log2_sum * kLn2;
}

// Sums of a column over the lanes of a warp, into `states` [kColumns] of (reference, sum).
template <int D, int C>
__device__ __forceinline__ void store_states(Softmax<D, C>& state, float2* states, int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int c = 0; c < C; ++c) {
#pragma unroll
    for (int d = 4; d < 32; d <<= 1) {
      state.sum[c] += __shfl_xor_sync(~0U, state.sum[c], d);
      state.min_sum[c] += __shfl_xor_sync(~0U, state.min_sum[c], d);
    }
    if (g == 0) {
      const bool seen = state.sum[c] > 0.0F;
      states[lane_column<C>(c, t)] = make_float2(seen ? state.reference[c] : kMasked, state.sum[c]);
    }
  }
}
template <int D>
__device__ __forceinline__ void store_states(RowSoftmax<D>& state, float2* states, int lane) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
#pragma unroll
    for (int d = 1; d < 4; d <<= 1) {
      state.sum[c] += __shfl_xor_sync(~0U, state.sum[c], d);
      state.min_sum[c] += __shfl_xor_sync(~0U, state.min_sum[c], d);
    }
    if (lane % 4 == 0)
      states[lane / 4 + 8 * c] =
          make_float2(state.sum[c] > 0.0F ? state.reference[c] : kMasked, state.sum[c]);
  }
}
// Values of columns [first, first + count) of a warp into rows of kStride floats.
template <int kStride, int D, int C>
__device__ __forceinline__ void store_columns(const Softmax<D, C>& state, float* rows, int first,
                                              int count, int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int c = 0; c < C; ++c) {
    const int column = lane_column<C>(c, t) - first;
    if (column < 0 || column >= count) continue;
    float* row = rows + column * kStride;
    unroll<D / 32>([&]<int quad>() {  // four items, four consecutive dims
      constexpr int item = 4 * quad, full = D / 64 * 8;
      const int dim = item < full ? 64 * (item / 8) + 8 * g + item % 8 : full * 8 + 4 * g;
      float x[4];
      unroll<4>([&]<int j>() {
        constexpr int i = item + j;
        constexpr float unit = power_of_4(12 - item_exponent(D, i));
        x[j] = fmaf(state.o[i / 2][i % 2 * 2 + c], unit, state.min_sum[c]);
      });
      *reinterpret_cast<float4*>(row + dim) = make_float4(x[0], x[1], x[2], x[3]);
    });
  }
}
template <int kStride, int D>
__device__ __forceinline__ void store_columns(const RowSoftmax<D>& state, float* rows, int first,
                                              int count, int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int column = g + 8 * c - first;
    if (column < 0 || column >= count) continue;
    float* row = rows + column * kStride;
    unroll<D / 32>([&]<int quad>() {  // four items, four consecutive dims
      constexpr int item = 4 * quad, full = D / 64 * 8;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int run = 2 * t + j;
        const int dim = item < full ? 64 * (item / 8) + 8 * run + item % 8 : full * 8 + 4 * run;
        float x[4];
        unroll<4>([&]<int k>() {
          constexpr float unit = power_of_4(12 - item_exponent(D, item + k));
          x[k] = fmaf(state.o[item + k][2 * c + j], unit, state.min_sum[c]);
        });
        *reinterpret_cast<float4*>(row + dim) = make_float4(x[0], x[1], x[2], x[3]);
      }
    });
  }
}

// Merge over the warps of a run. area: [W][columns_at_once][kMergeStride] floats, states: [W]
// [kColumns] of (reference, sum). Every consumer warp calls it.
template <int D, class Conf, class State>
__device__ __forceinline__ void merge_warps(const AttendDecodeParams& p, const DecodeWork& w,
                                            State& state, float* area, int columns_at_once,
                                            float2* states, int warp, int lane) {
  store_states(state, states + warp * Conf::kColumns, lane);
  const bool split = w.num_parts > 1;
  const PartialSlots<D, Conf> slots = partial_slots<D, Conf>(p, w);
  for (int first = 0; first < w.num_columns; first += columns_at_once) {
    store_columns<Conf::kMergeStride>(state, area + warp * columns_at_once * Conf::kMergeStride,
                                      first, columns_at_once, lane);
    named_barrier(1, Conf::kConsumers);
    const int columns = min(columns_at_once, w.num_columns - first);
    for (int i = threadIdx.x; i < columns * D / 4; i += Conf::kConsumers) {
      const int column = first + i / (D / 4), dim = i % (D / 4) * 4;
      float high = kMasked, total = 0.0F, weight[Conf::kWarps];
#pragma unroll
      for (int k = 0; k < Conf::kWarps; ++k) {
        weight[k] = states[k * Conf::kColumns + column].x;
        high = fmaxf(high, weight[k]);
      }
#pragma unroll
      for (int k = 0; k < Conf::kWarps; ++k) {
        weight[k] = exp2_fast(weight[k] - high);
        total = fmaf(weight[k], states[k * Conf::kColumns + column].y, total);
      }
      float4 value = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
#pragma unroll
      for (int k = 0; k < Conf::kWarps; ++k)
        add(value, weight[k],
            *reinterpret_cast<const float4*>(
                area + (k * columns_at_once + column - first) * Conf::kMergeStride + dim));
      const float inverse = total > 0.0F ? __fdividef(1.0F, total) : 0.0F;
      const float log2_sum = total > 0.0F ? high + log2f(total) : kMasked;
      value.x *= inverse, value.y *= inverse, value.z *= inverse, value.w *= inverse;
      if (split) {
        const int quad = column * D / 4 + dim / 4;
        store_relaxed(slots.quad(w.part, quad),
                      make_uint4(written_word(value.x), written_word(value.y),
                                 written_word(value.z), written_word(value.w)));
        store_relaxed(slots.log_sum(w.part, quad), written_word(log2_sum));
      } else {
        store_result<D>(p, w, column, dim, value, log2_sum);
      }
    }
    named_barrier(1, Conf::kConsumers);
  }
}

// A weighted sum in the making: value and sum are relative to 2^high.
struct PartialSum {
  float4 value = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
  float sum = 0.0F, high = kMasked;
  __device__ __forceinline__ void add_part(float4 x, float x_sum, float x_high) {
    const float top = fmaxf(high, x_high);
    const float keep = exp2_fast(high - top), weight = exp2_fast(x_high - top);
    value.x = fmaf(weight, x.x, keep * value.x), value.y = fmaf(weight, x.y, keep * value.y);
    value.z = fmaf(weight, x.z, keep * value.z), value.w = fmaf(weight, x.w, keep * value.w);
    sum = fmaf(weight, x_sum, keep * sum);
    high = top;
  }
};

// Merge over the parts of segment w, by the thread block of the last one. shared_sums:
// [kConsumers].
template <int D, class C>
__device__ __forceinline__ void merge_parts(const AttendDecodeParams& p, const DecodeWork& w,
                                            PartialSum* shared_sums) {
  const PartialSlots<D, C> slots = partial_slots<D, C>(p, w);
  // Threads share out the parts when there are more threads than output quads.
  const int quads = w.num_columns * D / 4;
  const int shares = max(1, min(w.num_parts, C::kConsumers / quads));
  for (int base = 0; base < quads; base += C::kConsumers) {
    const int i = base + threadIdx.x % (shares > 1 ? quads : C::kConsumers);
    const int share = shares > 1 ? threadIdx.x / quads : 0;
    const bool active = i < quads && share < shares;
    PartialSum result;
    if (active) {
      constexpr int kAtOnce = 4;
      for (int first = share; first < w.num_parts; first += kAtOnce * shares) {
        uint4 quad[kAtOnce];
        uint32_t log_sum[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const int part = first + k * shares;
          if (part < w.num_parts) {
            quad[k] = load_relaxed(slots.quad(part, i));
            log_sum[k] = load_relaxed(slots.log_sum(part, i));
          }
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const int part = first + k * shares;
          if (part >= w.num_parts) break;
          while (quad[k].x == 0 || quad[k].y == 0 || quad[k].z == 0 || quad[k].w == 0 ||
                 log_sum[k] == 0) {
            quad[k] = load_relaxed(slots.quad(part, i));
            log_sum[k] = load_relaxed(slots.log_sum(part, i));
          }
          store_relaxed(slots.quad(part, i), make_uint4(0, 0, 0, 0));
          store_relaxed(slots.log_sum(part, i), 0);
          result.add_part(as_float4(quad[k]), 1.0F, __uint_as_float(log_sum[k]));
        }
      }
    }
    if (shares > 1) {
      if (active) shared_sums[threadIdx.x] = result;
      named_barrier(1, C::kConsumers);
      if (active && share == 0) {
        for (int k = 1; k < shares; ++k) {
          const PartialSum other = shared_sums[k * quads + i];
          result.add_part(other.value, other.sum, other.high);
        }
      }
    }
    if (active && share == 0) {
      const float inverse = __fdividef(1.0F, result.sum);
      float4 value = result.value;
      value.x *= inverse, value.y *= inverse, value.z *= inverse, value.w *= inverse;
      store_result<D>(p, w, i / (D / 4), i % (D / 4) * 4, value, result.high + log2f(result.sum));
    }
  }
}

}  // namespace oscar::decode
