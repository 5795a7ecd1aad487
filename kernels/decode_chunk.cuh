// The BF16 part of decode attention: 8 tokens of the sink or the recent ring by one warp.
#pragma once

#include "kernels/decode_schedule.h"
#include "kernels/decode_tile.cuh"

namespace oscar::decode {

constexpr int kChunkRows = kDecodeChunkTokens;

// Query as bf16 pairs of item `item` of the lane's fragment column: the rounded query (`high`) and
// what rounding lost (`rest`), from the fp32 query in shared memory.
template <int D, int C>
__device__ __forceinline__ void query_bf16(const float* q_shared, int item, int lane,
                                           uint32_t& high, uint32_t& rest) {
  const int g = lane >> 2, t = lane & 3;
  const float2 q = *reinterpret_cast<const float2*>(q_shared + fragment_column<C>(g) * (D + 8) +
                                                    32 * (item / 4) + 8 * t + 2 * (item % 4));
  high = pack_bf16(q.x, q.y);
  rest = pack_bf16(q.x - bf16_low(high), q.y - bf16_high(high));
}

// Keys [8][D] and values [8][D] of a chunk in shared memory, of which rows [row_begin, row_end)
// hold tokens. q and p are split into two bf16 terms each: 16 significant bits. The mma's rows 8-15
// are empty in Q K^T; in P V they carry the second term.
template <int D, int C>
__device__ __forceinline__ void attend_chunk(Softmax<D, C>& state, const float* q_shared,
                                             float score_scale, ScoreScale scale,
                                             const uint8_t* keys, int lane, int row_begin,
                                             int row_end, int first_position,
                                             const ColumnLimits<C>& limits) {
  const int g = lane >> 2, t = lane & 3;
  float s[1][4];
  s[0][0] = s[0][1] = s[0][2] = s[0][3] = 0.0F;
#pragma unroll
  for (int block = 0; block < D / 32; ++block) {
    const uint4 row = *reinterpret_cast<const uint4*>(keys + g * (2 * D) + 64 * block + 16 * t);
    const uint32_t a[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t high[2], rest[2];
      query_bf16<D, C>(q_shared, 4 * block + 2 * half, lane, high[0], rest[0]);
      query_bf16<D, C>(q_shared, 4 * block + 2 * half + 1, lane, high[1], rest[1]);
      if constexpr (C == 1) {  // the odd columns are free for the rest
        const bool odd = g % 2 != 0;
        mma_bf16(s[0], a[2 * half], 0U, a[2 * half + 1], 0U, odd ? rest[0] : high[0],
                 odd ? rest[1] : high[1]);
      } else {
        mma_bf16(s[0], a[2 * half], 0U, a[2 * half + 1], 0U, high[0], high[1]);
        mma_bf16(s[0], a[2 * half], 0U, a[2 * half + 1], 0U, rest[0], rest[1]);
      }
    }
  }
  float highest[C];
  const int position = first_position + g;
  const bool present = g >= row_begin && g < row_end;
  if constexpr (C == 1) s[0][0] += s[0][1];
#pragma unroll
  for (int c = 0; c < C; ++c) {
    float& score = s[0][c];
    score *= score_scale;
    if (scale.softcap > 0.0F) score = cap_score(score, scale.softcap, scale.inverse_softcap);
    score -= state.reference[c];
    if (!present || position < limits.first[c] || position > limits.last[c]) score = kMasked;
    highest[c] = score;
  }
  state.settle(s, highest, 0.0F);
  uint32_t weight_high, weight_rest;
  float p[2] = {0.0F, 0.0F};
#pragma unroll
  for (int c = 0; c < C; ++c) {
    p[c] = exp2_fast(s[0][c]);
    state.sum[c] += p[c];
  }
  const uint32_t high = pack_bf16(p[0], p[1]);
  weight_high = transpose_8x8(high);
  weight_rest = transpose_8x8(pack_bf16(p[0] - bf16_low(high), p[1] - bf16_high(high)));

  const uint8_t* values = keys + kChunkRows * 2 * D;
  const auto accumulate = [&](int tile, uint32_t x0, uint32_t x1) {
    // x: elements j, j + 1 of the two tokens; item 2 tile holds j, item 2 tile + 1 holds j + 1.
    const uint32_t a0 = __byte_perm(x0, x1, 0x5410), a1 = __byte_perm(x0, x1, 0x7632);
    mma_bf16(state.o[tile], a0, a1, a0, a1, weight_high, weight_rest);
  };
  bool holds[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) holds[j] = 2 * t + j >= row_begin && 2 * t + j < row_end;
#pragma unroll
  for (int block = 0; block < D / 64; ++block) {
    uint4 x[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      x[j] = *reinterpret_cast<const uint4*>(values + (2 * t + j) * (2 * D) + 128 * block + 16 * g);
      if (!holds[j]) x[j] = make_uint4(0, 0, 0, 0);  // whatever the page held there
    }
    accumulate(4 * block + 0, x[0].x, x[1].x);
    accumulate(4 * block + 1, x[0].y, x[1].y);
    accumulate(4 * block + 2, x[0].z, x[1].z);
    accumulate(4 * block + 3, x[0].w, x[1].w);
  }
  if constexpr (D % 64 != 0) {
    uint2 x[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      x[j] = *reinterpret_cast<const uint2*>(values + (2 * t + j) * (2 * D) + D / 64 * 128 + 8 * g);
      if (!holds[j]) x[j] = make_uint2(0, 0);
    }
    accumulate(D / 64 * 4 + 0, x[0].x, x[1].x);
    accumulate(D / 64 * 4 + 1, x[0].y, x[1].y);
  }
}

}  // namespace oscar::decode
