// Online softmax of prefill attention for one warp of 16 query rows: scores and outputs are
// accumulator fragments (lane 4 g + t: rows g and g + 8, columns 8 n + 2 t and + 1 of tile n), the
// same for mma.sync and wgmma.
#pragma once

#include "kernels/attend_prefill.h"
#include "kernels/prefill_tile.cuh"
#include "kernels/ptx.cuh"

namespace oscar::prefill {

// p = 2^(score - reference): the reference follows the row's maximum only when it is left behind by
// more than this, so that outputs are rarely rescaled.
constexpr float kHeadroom = 8.0F;

// The lane's two rows.
struct QueryRows {
  int position[2];  // of the row's token; rows of no token have the last one's
  bool present[2];
  int64_t token[2];  // in q, k, v and out
  int head[2];

  __device__ __forceinline__ QueryRows(const AttendPrefillParams& p, const PrefillWork& w,
                                       int first_row_of_warp, int lane) {
    const int group = p.num_q_heads / p.cache.num_kv_heads;
    const int cached = w.lengths.sink + w.lengths.history + w.lengths.recent;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row_of_warp + lane / 4 + 8 * h;
      present[h] = row < w.num_rows;
      const int packed = w.first_row + (present[h] ? row : w.num_rows - 1);
      token[h] = w.new_begin + packed / group;
      head[h] = w.kv_head * group + packed % group;
      position[h] = cached + packed / group;
    }
  }
};

// Scores to log2 units. softcap: cap * tanh(x / cap) through exp2, in log2 units too.
struct ScoreScale {
  float scale;        // log2(e) * softmax_scale
  float cap, factor;  // cap in log2 units (0 = off); 2 log2(e) * softmax_scale / softcap
  __device__ __forceinline__ explicit ScoreScale(const AttendPrefillParams& p) {
    constexpr float kLog2e = 1.4426950408889634F;
    scale = p.softmax_scale * kLog2e;
    cap = p.softcap * kLog2e;
    factor = p.softcap > 0.0F ? 2.0F * kLog2e * p.softmax_scale / p.softcap : 0.0F;
  }
};

// Keys of a block the rows may see: columns first <= column <= last.
struct ColumnRange {
  int first[2], last[2];
  bool all;  // no row of the tile is masked
};
__device__ __forceinline__ ColumnRange visible_columns(const PrefillWork& w,
                                                       const PrefillBlock& block,
                                                       const QueryRows& rows, int window,
                                                       int group) {
  const int cached = w.lengths.sink + w.lengths.history + w.lengths.recent;
  const int first_token = cached + w.first_row / group;
  const int last_token = cached + (w.first_row + w.num_rows - 1) / group;
  ColumnRange range;
  range.all = block.count == kKeys && block.position + kKeys - 1 <= first_token &&
              (window == 0 || block.position > last_token - window);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    range.last[h] = min(block.count - 1, rows.position[h] - block.position);
    range.first[h] = window == 0 ? 0 : rows.position[h] - window + 1 - block.position;
  }
  return range;
}

struct SoftmaxRows {
  float reference[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.0F, 0.0F};  // this lane's columns only

  // Scores of a block to probabilities, in place. Returns true when the outputs summed so far must
  // be multiplied by factor.
  __device__ __forceinline__ bool step(float (&s)[8][4], const ScoreScale& scale,
                                       const ColumnRange& range, int lane, float (&factor)[2]) {
    float unit = scale.scale;  // of s, in log2 units
    if (scale.cap > 0.0F) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float e = ptx::exp2_fast(s[n][j] * scale.factor);
          s[n][j] = scale.cap * (1.0F - __fdividef(2.0F, e + 1.0F));
        }
      }
      unit = 1.0F;
    }
    if (!range.all) {
      const int t = lane % 4;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int column = 8 * n + 2 * t + j % 2;
          if (column < range.first[j / 2] || column > range.last[j / 2]) s[n][j] = -INFINITY;
        }
      }
    }
    bool moved = false;
    float high[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
      for (int n = 1; n < 8; ++n) x = fmaxf(x, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
      x = fmaxf(x, __shfl_xor_sync(~0U, x, 1));
      x = fmaxf(x, __shfl_xor_sync(~0U, x, 2));
      high[h] = x * unit;
      moved = moved || high[h] > reference[h] + kHeadroom;
    }
    moved = __any_sync(~0U, moved);
    if (moved) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float next = fmaxf(reference[h], high[h]);
        // A row that has seen nothing keeps -infinity, and the factor of nothing is 0.
        factor[h] = next == -INFINITY ? 0.0F : ptx::exp2_fast(reference[h] - next);
        reference[h] = next;
        sum[h] *= factor[h];
      }
    }
    const float base[2] = {reference[0] == -INFINITY ? 0.0F : reference[0],
                           reference[1] == -INFINITY ? 0.0F : reference[1]};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        s[n][j] = ptx::exp2_fast(fmaf(s[n][j], unit, -base[j / 2]));
        sum[j / 2] += s[n][j];
      }
    }
    return moved;
  }
};

// Probabilities as bf16 A fragments of four k = 16 steps.
__device__ __forceinline__ void pack_weights(const float (&s)[8][4], uint32_t (&p)[4][4]) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    p[n / 2][n % 2 * 2] = ptx::pack_bf16(s[n][0], s[n][1]);
    p[n / 2][n % 2 * 2 + 1] = ptx::pack_bf16(s[n][2], s[n][3]);
  }
}

template <int kTiles>
__device__ __forceinline__ void rescale(float (&o)[kTiles][4], const float (&factor)[2]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    o[n][0] *= factor[0], o[n][1] *= factor[0];
    o[n][2] *= factor[1], o[n][3] *= factor[1];
  }
}

// Divides by the sums and writes the rows and their log-sum-exp.
template <int D>
__device__ __forceinline__ void store_rows(const AttendPrefillParams& p, const QueryRows& rows,
                                           const SoftmaxRows& softmax, const float (&o)[D / 8][4],
                                           int lane) {
  const int t = lane % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = softmax.sum[h];
    sum += __shfl_xor_sync(~0U, sum, 1);
    sum += __shfl_xor_sync(~0U, sum, 2);
    if (!rows.present[h]) continue;
    const float inverse = 1.0F / sum;
    const int64_t element =
        rows.token[h] * p.out_token_stride + rows.head[h] * p.out_head_stride + 2 * t;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      const float x = o[n][2 * h] * inverse, y = o[n][2 * h + 1] * inverse;
      if (p.out_type == ElementType::kFp32) {
        *reinterpret_cast<float2*>(static_cast<float*>(p.out) + element + 8 * n) =
            make_float2(x, y);
      } else {
        *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + element + 8 * n) =
            p.out_type == ElementType::kBf16 ? ptx::pack_bf16(x, y) : ptx::pack_fp16(x, y);
      }
    }
    if (p.lse_nats != nullptr && t == 0) {
      constexpr float kLn2 = 0.6931471805599453F;
      p.lse_nats[rows.token[h] * p.num_q_heads + rows.head[h]] =
          (softmax.reference[h] + log2f(sum)) * kLn2;
    }
  }
}

}  // namespace oscar::prefill
