// The BF16 part of decode attention: 16 tokens of the sink or the recent ring by one warp.
#pragma once

#include "kernels/decode_tile.cuh"

namespace oscar::decode {

// Query as bf16 pairs (high part and rest) of item `item` of column g of n-tile n, from the fp32
// query in shared memory.
template <int D, int NT>
__device__ __forceinline__ void query_bf16(const float* q_shared, int n, int item, int lane,
                                           uint32_t& high, uint32_t& rest) {
  const int g = lane >> 2, t = lane & 3;
  const float2 q = *reinterpret_cast<const float2*>(q_shared + (8 * n + g) * (D + 8) +
                                                    32 * (item / 4) + 8 * t + 2 * (item % 4));
  high = pack_bf16(q.x, q.y);
  rest = pack_bf16(q.x - bf16_low(high), q.y - bf16_high(high));
}

// Probabilities of a chunk as B fragments, in two bf16 terms.
template <int NT>
struct ChunkWeights {
  uint32_t high[NT][2], rest[NT][2];
};

// Scores and weights of 16 rows of BF16 keys, of which rows [row_begin, row_end) hold tokens. q and
// p are split into two bf16 terms each: 16 significant bits.
template <int D, int NT>
__device__ __forceinline__ void chunk_scores(Softmax<D, NT>& state, ChunkWeights<NT>& weights,
                                             const float* q_shared, float score_scale,
                                             ScoreScale scale, const uint8_t* keys, int lane,
                                             int row_begin, int row_end, int first_position,
                                             const ColumnLimits<NT>& limits) {
  const int g = lane >> 2, t = lane & 3;
  float s[NT][1][4];
#pragma unroll
  for (int n = 0; n < NT; ++n) s[n][0][0] = s[n][0][1] = s[n][0][2] = s[n][0][3] = 0.0F;
#pragma unroll
  for (int block = 0; block < D / 32; ++block) {
    const uint8_t* at = keys + g * (2 * D) + 64 * block + 16 * t;
    const uint4 low = *reinterpret_cast<const uint4*>(at);
    const uint4 high = *reinterpret_cast<const uint4*>(at + 8 * (2 * D));
    const uint32_t a[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        uint32_t b_high[2], b_rest[2];
        query_bf16<D, NT>(q_shared, n, 4 * block + 2 * half, lane, b_high[0], b_rest[0]);
        query_bf16<D, NT>(q_shared, n, 4 * block + 2 * half + 1, lane, b_high[1], b_rest[1]);
        const int i = 2 * half;
        mma_bf16(s[n][0], a[0][i], a[1][i], a[0][i + 1], a[1][i + 1], b_high[0], b_high[1]);
        mma_bf16(s[n][0], a[0][i], a[1][i], a[0][i + 1], a[1][i + 1], b_rest[0], b_rest[1]);
      }
    }
  }
  float highest[NT][2];
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& score = s[n][0][c + 2 * h];
        const int token = g + 8 * h, position = first_position + token;
        score *= score_scale;
        if (scale.softcap > 0.0F) score = cap_score(score, scale.softcap, scale.inverse_softcap);
        score -= state.reference[n][c];
        if (token < row_begin || token >= row_end || position < limits.first[n][c] ||
            position > limits.last[n][c])
          score = kMasked;
      }
      highest[n][c] = fmaxf(s[n][0][c], s[n][0][c + 2]);
    }
  }
  state.settle(s, highest, 0.0F);
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    float p[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) p[j] = exp2_fast(s[n][0][j]);
#pragma unroll
    for (int c = 0; c < 2; ++c) state.sum[n][c] += p[c] + p[c + 2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t high = pack_bf16(p[2 * h], p[2 * h + 1]);
      const uint32_t rest = pack_bf16(p[2 * h] - bf16_low(high), p[2 * h + 1] - bf16_high(high));
      weights.high[n][h] = transpose_8x8(high);
      weights.rest[n][h] = transpose_8x8(rest);
    }
  }
}

// o += weights * values of 16 tokens.
template <int D, int NT>
__device__ __forceinline__ void chunk_values(Softmax<D, NT>& state, const ChunkWeights<NT>& weights,
                                             const uint8_t* values, int lane, int row_begin,
                                             int row_end) {
  const int g = lane >> 2, t = lane & 3;
  const auto accumulate = [&](int tile, uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3) {
    // x: elements j, j + 1 of the four tokens; item 2 tile holds j, item 2 tile + 1 holds j + 1.
    const uint32_t a0 = __byte_perm(x0, x1, 0x5410), a1 = __byte_perm(x0, x1, 0x7632);
    const uint32_t a2 = __byte_perm(x2, x3, 0x5410), a3 = __byte_perm(x2, x3, 0x7632);
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      mma_bf16(state.o[n][tile], a0, a1, a2, a3, weights.high[n][0], weights.high[n][1]);
      mma_bf16(state.o[n][tile], a0, a1, a2, a3, weights.rest[n][0], weights.rest[n][1]);
    }
  };
  bool present[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int row = 2 * t + (j & 1) + 8 * (j >> 1);
    present[j] = row >= row_begin && row < row_end;
  }
  const auto row = [&](int j) { return values + (2 * t + (j & 1) + 8 * (j >> 1)) * (2 * D); };
#pragma unroll
  for (int block = 0; block < D / 64; ++block) {
    uint4 x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[j] = *reinterpret_cast<const uint4*>(row(j) + 128 * block + 16 * g);
      if (!present[j]) x[j] = make_uint4(0, 0, 0, 0);  // whatever the ring held there
    }
    accumulate(4 * block + 0, x[0].x, x[1].x, x[2].x, x[3].x);
    accumulate(4 * block + 1, x[0].y, x[1].y, x[2].y, x[3].y);
    accumulate(4 * block + 2, x[0].z, x[1].z, x[2].z, x[3].z);
    accumulate(4 * block + 3, x[0].w, x[1].w, x[2].w, x[3].w);
  }
  if constexpr (D % 64 != 0) {
    uint2 x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[j] = *reinterpret_cast<const uint2*>(row(j) + D / 64 * 128 + 8 * g);
      if (!present[j]) x[j] = make_uint2(0, 0);
    }
    accumulate(D / 64 * 4 + 0, x[0].x, x[1].x, x[2].x, x[3].x);
    accumulate(D / 64 * 4 + 1, x[0].y, x[1].y, x[2].y, x[3].y);
  }
}

}  // namespace oscar::decode
