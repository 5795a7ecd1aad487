// The arithmetic of decode attention for 9 to 16 columns: the columns (query token, query head) are
// the mma's M, so that one tile holds all of them, tokens or dims its N. Same records and units as
// decode_tile.cuh: the fragments of codes that are A there are B here.
#pragma once

#include "kernels/decode_tile.cuh"

namespace oscar::decode {

// Lane (g, t) holds the columns g and g + 8: index c below is g + 8 c.
constexpr int kRowColumns = 16;

struct RowLimits {  // visible keys of the lane's two columns: first <= position <= last
  int first[2], last[2];
};

// Online softmax of a warp. o[item]: [2 c + j] is column g + 8 c at row 2 t + j of the item's dims.
template <int D>
struct RowSoftmax {
  float o[D / 8][4];
  float sum[2], min_sum[2];  // as in Softmax; this lane's tokens only
  float reference[2], limit[2];
  int scale_exponent;

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int i = 0; i < D / 8; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.0F;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      sum[c] = min_sum[c] = reference[c] = 0.0F;
      limit[c] = kUnseen;
    }
    scale_exponent = 0;
  }

  // As Softmax::settle; s[.][2 c + j] are scores of column g + 8 c.
  template <int N>
  __device__ __forceinline__ void settle(float (&s)[N][4], const float (&highest)[2],
                                         float scale_max) {
    const bool ok = scale_max <= __int_as_float((127 + scale_exponent) << 23) &&
                    highest[0] <= limit[0] && highest[1] <= limit[1];
    if (__all_sync(~0U, ok)) return;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1)
      scale_max = fmaxf(scale_max, __shfl_xor_sync(~0U, scale_max, d));
    const int old_exponent = scale_exponent;
    if (scale_max > 0.0F) scale_exponent = max(scale_exponent, ilogbf(scale_max) + 1);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float high = highest[c];
      high = fmaxf(high, __shfl_xor_sync(~0U, high, 1));
      high = fmaxf(high, __shfl_xor_sync(~0U, high, 2));
      const bool unseen = limit[c] == kUnseen;
      if (unseen && high <= kUnseen) continue;
      const float top =
          unseen ? high : fmaxf(high, static_cast<float>(kTopExponent - old_exponent));
      const float move = static_cast<float>(kTopExponent - scale_exponent) - top;
      const float factor = unseen ? 1.0F : exp2_fast(move);
      reference[c] -= move;
      limit[c] = static_cast<float>(kTopExponent + kHeadroom - scale_exponent);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        s[n][2 * c] += move;
        s[n][2 * c + 1] += move;
      }
      sum[c] *= factor;
      min_sum[c] *= factor;
#pragma unroll
      for (int i = 0; i < D / 8; ++i) {
        o[i][2 * c] *= factor;
        o[i][2 * c + 1] *= factor;
      }
    }
  }
  // As Softmax::to_int2_units.
  __device__ __forceinline__ void to_int2_units() {
    unroll<D / 8>([&]<int i>() {
      constexpr float factor = power_of_4(item_exponent(D, i) - 12);
#pragma unroll
      for (int j = 0; j < 4; ++j) o[i][j] *= factor;
    });
  }
};

// What the warps of a thread block need to know about the queries of a run.
struct RowQuery {
  const uint4* fragments;  // shared: [item / 2][lane], the A fragments of the scaled query
  float sum[2];            // of the column's query, in log2 score units
  ScoreScale scale;
  RowLimits limits;
  int furthest_first;  // below it some column sees no key
};

// RB records (16 RB tokens) of a page already in shared memory. kGeneral: masks and softcap.
template <int D, int RB, bool kGeneral>
__device__ __forceinline__ void attend_records(RowSoftmax<D>& state, const RowQuery& query,
                                               const uint8_t* records, int lane, int first_position,
                                               int end_position) {
  const int t = lane & 3;
  float s[2 * RB][4];  // [2 record + token half]: tokens 2 t and 2 t + 1 of the half
#pragma unroll
  for (int n = 0; n < 2 * RB; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0F;
  {
    uint32_t words[RB][D / 32], shifted[RB][D / 32];
#pragma unroll
    for (int r = 0; r < RB; ++r) {
      load_words<D>(records + r * record_bytes(D), lane, words[r]);
      shift_words<D>(words[r], shifted[r]);
    }
    unroll<D / 16>([&]<int step>() {
      const uint4 a = query.fragments[step * 32 + lane];
#pragma unroll
      for (int r = 0; r < RB; ++r) {
        mma_fp16(s[2 * r], a.x, a.y, a.z, a.w, cut<D, 2 * step, 0>(words[r], shifted[r]),
                 cut<D, 2 * step + 1, 0>(words[r], shifted[r]));
        mma_fp16(s[2 * r + 1], a.x, a.y, a.z, a.w, cut<D, 2 * step, 1>(words[r], shifted[r]),
                 cut<D, 2 * step + 1, 1>(words[r], shifted[r]));
      }
    });
  }
  // Metadata of tokens 2 t and 2 t + 1: K, V of the lower half, K, V of the upper half.
  const auto load_meta = [&](int r, int token) {
    return *reinterpret_cast<const uint4*>(records + r * record_bytes(D) + 8 * D + 32 * t +
                                           16 * token);
  };
  uint32_t v_meta[2 * RB][2];
  float highest[2] = {kMasked, kMasked};
  __half2 v_meta_max = __float2half2_rn(0.0F);
#pragma unroll
  for (int r = 0; r < RB; ++r) {
    const uint4 even = load_meta(r, 0), odd = load_meta(r, 1);
    const uint32_t k_meta[2][2] = {{even.x, odd.x}, {even.z, odd.z}};
    v_meta[2 * r][0] = even.y, v_meta[2 * r][1] = odd.y;
    v_meta[2 * r + 1][0] = even.w, v_meta[2 * r + 1][1] = odd.w;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int n = 2 * r + half;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int position = first_position + r * kRecordTokens + 8 * half + 2 * t + j;
        if (kGeneral && position >= end_position) v_meta[n][j] = 0;
        v_meta_max = __hmax2(v_meta_max, *reinterpret_cast<const __half2*>(&v_meta[n][j]));
        float2 k = unpack_fp16(k_meta[half][j]);
        k.x *= query.scale.code;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& score = s[n][2 * c + j];
          // Relative to the reference at once, unless a softcap comes between.
          score = fmaf(score, k.x, fmaf(k.y, query.sum[c], kGeneral ? 0.0F : -state.reference[c]));
          if constexpr (kGeneral) {
            if (query.scale.softcap > 0.0F)
              score = cap_score(score, query.scale.softcap, query.scale.inverse_softcap);
            score -= state.reference[c];
            if (position >= end_position || position < query.limits.first[c] ||
                position > query.limits.last[c])
              score = kMasked;
          }
          highest[c] = fmaxf(highest[c], score);
        }
      }
    }
  }
  state.settle(s, highest, __low2float(v_meta_max));
  uint32_t a[2 * RB][2];  // weights times the values' scale, [.][c]
#pragma unroll
  for (int n = 0; n < 2 * RB; ++n) {
    const float2 even = unpack_fp16(v_meta[n][0]), odd = unpack_fp16(v_meta[n][1]);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float p_even = exp2_fast(s[n][2 * c]), p_odd = exp2_fast(s[n][2 * c + 1]);
      state.sum[c] += p_even + p_odd;
      state.min_sum[c] = fmaf(p_even, even.y, fmaf(p_odd, odd.y, state.min_sum[c]));
      a[n][c] = pack_fp16(p_even * even.x, p_odd * odd.x);
    }
  }
#pragma unroll
  for (int r = 0; r < RB; ++r) {
    uint32_t words[D / 32], shifted[D / 32];
    load_words<D>(records + r * record_bytes(D) + 4 * D, lane, words);
    shift_words<D>(words, shifted);
    unroll<D / 8>([&]<int i>() {
      mma_fp16(state.o[i], a[2 * r][0], a[2 * r][1], a[2 * r + 1][0], a[2 * r + 1][1],
               cut<D, i, 0>(words, shifted), cut<D, i, 1>(words, shifted));
    });
  }
}

// As attend_chunk of decode_chunk.cuh: 8 tokens of BF16 keys and values. q and p are split into two
// bf16 terms each; in P V the mma's tokens 8-15 carry the second term.
template <int D>
__device__ __forceinline__ void attend_chunk(RowSoftmax<D>& state, const float* q_shared,
                                             float score_scale, const RowQuery& query,
                                             const uint8_t* keys, int lane, int row_begin,
                                             int row_end, int first_position) {
  const int g = lane >> 2, t = lane & 3;
  float s[1][4] = {};
#pragma unroll
  for (int block = 0; block < D / 32; ++block) {
    const uint4 row = *reinterpret_cast<const uint4*>(keys + g * (2 * D) + 64 * block + 16 * t);
    const uint32_t b[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t high[4], rest[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {  // column g + 8 (k % 2), item 2 half + k / 2 of the block
        const float2 q = *reinterpret_cast<const float2*>(
            q_shared + (g + 8 * (k % 2)) * (D + 8) + 32 * block + 8 * t + 2 * (2 * half + k / 2));
        high[k] = pack_bf16(q.x, q.y);
        rest[k] = pack_bf16(q.x - bf16_low(high[k]), q.y - bf16_high(high[k]));
      }
      mma_bf16(s[0], high[0], high[1], high[2], high[3], b[2 * half], b[2 * half + 1]);
      mma_bf16(s[0], rest[0], rest[1], rest[2], rest[3], b[2 * half], b[2 * half + 1]);
    }
  }
  float highest[2] = {kMasked, kMasked};
#pragma unroll
  for (int c = 0; c < 2; ++c) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float& score = s[0][2 * c + j];
      const int row = 2 * t + j, position = first_position + row;
      score *= score_scale;
      if (query.scale.softcap > 0.0F)
        score = cap_score(score, query.scale.softcap, query.scale.inverse_softcap);
      score -= state.reference[c];
      if (row < row_begin || row >= row_end || position < query.limits.first[c] ||
          position > query.limits.last[c])
        score = kMasked;
      highest[c] = fmaxf(highest[c], score);
    }
  }
  state.settle(s, highest, 0.0F);
  uint32_t weight_high[2], weight_rest[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float even = exp2_fast(s[0][2 * c]), odd = exp2_fast(s[0][2 * c + 1]);
    state.sum[c] += even + odd;
    weight_high[c] = pack_bf16(even, odd);
    weight_rest[c] = pack_bf16(even - bf16_low(weight_high[c]), odd - bf16_high(weight_high[c]));
  }

  const uint8_t* values = keys + kDecodeChunkTokens * 2 * D;
  bool holds[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) holds[j] = 2 * t + j >= row_begin && 2 * t + j < row_end;
  const auto accumulate = [&](int item, uint32_t x0, uint32_t x1) {
    // x: dims of `item` and of the next one, of the two tokens.
    if (!holds[0]) x0 = 0;  // whatever the page held there
    if (!holds[1]) x1 = 0;
    const uint32_t b0 = __byte_perm(x0, x1, 0x5410), b1 = __byte_perm(x0, x1, 0x7632);
    mma_bf16(state.o[item], weight_high[0], weight_high[1], weight_rest[0], weight_rest[1], b0, b0);
    mma_bf16(state.o[item + 1], weight_high[0], weight_high[1], weight_rest[0], weight_rest[1], b1,
             b1);
  };
  const auto token = [&](int j) { return values + (2 * t + j) * (2 * D); };
#pragma unroll
  for (int block = 0; block < D / 64; ++block) {
    const uint4 even = *reinterpret_cast<const uint4*>(token(0) + 128 * block + 16 * g);
    const uint4 odd = *reinterpret_cast<const uint4*>(token(1) + 128 * block + 16 * g);
    accumulate(8 * block, even.x, odd.x);
    accumulate(8 * block + 2, even.y, odd.y);
    accumulate(8 * block + 4, even.z, odd.z);
    accumulate(8 * block + 6, even.w, odd.w);
  }
  if constexpr (D % 64 != 0) {
    constexpr int block = D / 64;
    const uint2 even = *reinterpret_cast<const uint2*>(token(0) + 128 * block + 8 * g);
    const uint2 odd = *reinterpret_cast<const uint2*>(token(1) + 128 * block + 8 * g);
    accumulate(8 * block, even.x, odd.x);
    accumulate(8 * block + 2, even.y, odd.y);
  }
}

}  // namespace oscar::decode
