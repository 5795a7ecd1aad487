// The arithmetic of decode attention for one warp: online softmax state, INT2 record batches, BF16
// chunks, for up to 8 columns. Columns (query token, query head) are the mma's N, tokens or dims
// its M.
#pragma once

#include "kernels/ptx.cuh"
#include "quant/int2_record.h"

namespace oscar::decode {

using namespace ptx;

constexpr float kLog2e = 1.4426950408889634F;
constexpr float kMasked = -1e30F;  // score of a masked key, relative or not
constexpr float kUnseen =
    -1e25F;  // limit of a column that has seen no key: any real score passes it
// p = 2^(score - reference) is at most 2^kTopExponent right after a rescale and may grow by
// 2^kHeadroom before the next one; p and p * scale(V) then fit fp16 (below 2^15.99).
constexpr int kTopExponent = 12;
constexpr int kHeadroom = 3;

// Exponent of the factor 4^e that item `item` carries when it is cut out of its word by one AND.
__host__ __device__ constexpr int item_exponent(int head_dim, int item) {
  const int full_items = head_dim / 64 * 8;
  if (item >= full_items) return item - full_items;
  return item % 8 < 5 ? item % 8 : item % 8 - 5;
}
__host__ __device__ constexpr float power_of_4(int e) {
  float x = 1.0F;
  for (int i = 0; i < e; ++i) x *= 4.0F;
  for (int i = 0; i > e; --i) x *= 0.25F;
  return x;
}

// Two codes of `item` for tokens 0-7 (kHalf 0) or 8-15, as fp16 subnormals; `words` are the lane's.
template <int D, int kItem, int kHalf>
__device__ __forceinline__ uint32_t cut(const uint32_t* words, const uint32_t* shifted) {
  constexpr RecordPosition at = record_item_position(D, kItem, kHalf);
  constexpr uint32_t mask = 0x00030003U << (2 * item_exponent(D, kItem));
  constexpr bool tail = kItem >= D / 64 * 8;
  constexpr bool plain = tail ? kHalf == 0 : kItem % 8 < 5;
  return (plain ? words[at.word] : shifted[at.word]) & mask;
}
template <int D>
__device__ __forceinline__ void shift_words(const uint32_t* words, uint32_t* shifted) {
#pragma unroll
  for (int w = 0; w < D / 32; ++w)
    shifted[w] = words[w] >> ((D % 64 != 0 && w == D / 32 - 1) ? 8 : 10);
}
template <int D>
__device__ __forceinline__ void load_words(const uint8_t* codes, int lane, uint32_t* words) {
  constexpr int kWords = D / 32;
#pragma unroll
  for (int w = 0; w < kWords / 4 * 4; w += 4) {
    const uint4 x =
        *reinterpret_cast<const uint4*>(codes + 4 * record_word_index(D, 0, w) + 16 * lane);
    words[w] = x.x, words[w + 1] = x.y, words[w + 2] = x.z, words[w + 3] = x.w;
  }
  if constexpr (kWords % 4 >= 2) {
    constexpr int w = kWords / 4 * 4;
    const uint2 x =
        *reinterpret_cast<const uint2*>(codes + 4 * record_word_index(D, 0, w) + 8 * lane);
    words[w] = x.x, words[w + 1] = x.y;
  }
  if constexpr (kWords % 2 == 1) {
    words[kWords - 1] = *reinterpret_cast<const uint32_t*>(
        codes + 4 * record_word_index(D, 0, kWords - 1) + 4 * lane);
  }
}

// Columns. The mma has 8; lane (g, t) holds accumulator columns 2 t and 2 t + 1. C =
// 2: all 8 are used. C = 1: at most 4 columns, put at the even places, so that every lane has one
// and the softmax costs half.
template <int C>
__device__ __forceinline__ constexpr int lane_column(int c, int t) {
  return C == 2 ? 2 * t + c : t;
}
// Column whose query the lane of row g holds as B fragment.
template <int C>
__device__ __forceinline__ constexpr int fragment_column(int g) {
  return C == 2 ? g : g / 2;
}
// Lane whose fragment column is the lane's accumulator column c.
template <int C>
__device__ __forceinline__ constexpr int fragment_lane(int c, int t) {
  return 4 * (2 * t + c);
}

// Calls body.template operator()<0>() ... <kCount - 1>().
template <int kCount, int kIndex = 0, class Body>
__device__ __forceinline__ void unroll(const Body& body) {
  if constexpr (kIndex < kCount) {
    body.template operator()<kIndex>();
    unroll<kCount, kIndex + 1>(body);
  }
}

// Visible keys of the lane's columns: first <= position <= last.
template <int C>
struct ColumnLimits {
  int first[C], last[C];
};

// Online softmax of a warp: lane (g, t) holds columns lane_column(c, t). `o` of tile
// i: [0..1] dims of item 2 i, [2..3] of item 2 i + 1, row g; with C = 1 only [0] and [2] count.
template <int D, int C>
struct Softmax {
  float o[D / 16][4];
  float sum[C];        // sum of p, this lane's rows only
  float min_sum[C];    // sum of p * min(V)
  float reference[C];  // p = 2^(score - reference); 0 while the column is unseen
  float limit[C];      // scores relative to the reference may reach this
  int scale_exponent;  // V scales seen are <= 2^scale_exponent, which is >= 0

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) o[i][j] = 0.0F;
    }
#pragma unroll
    for (int c = 0; c < C; ++c) {
      sum[c] = min_sum[c] = reference[c] = 0.0F;
      limit[c] = kUnseen;
    }
    scale_exponent = 0;
  }

  // Makes the scores s[r][column + 2 half], relative to the references, fit: nothing to do as a
  // rule, else the references move (and s, o and the sums with them). highest: this lane's largest
  // score of each column; scale_max: this lane's largest V scale.
  template <int R>
  __device__ __forceinline__ void settle(float (&s)[R][4], const float (&highest)[C],
                                         float scale_max) {
    bool ok = scale_max <= __int_as_float((127 + scale_exponent) << 23);
#pragma unroll
    for (int c = 0; c < C; ++c) ok = ok && highest[c] <= limit[c];
    if (__all_sync(~0U, ok)) return;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1)
      scale_max = fmaxf(scale_max, __shfl_xor_sync(~0U, scale_max, d));
    const int old_exponent = scale_exponent;
    if (scale_max > 0.0F) scale_exponent = max(scale_exponent, ilogbf(scale_max) + 1);
#pragma unroll
    for (int c = 0; c < C; ++c) {
      float high = highest[c];
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) high = fmaxf(high, __shfl_xor_sync(~0U, high, d));
      const bool unseen = limit[c] == kUnseen;
      if (unseen && high <= kUnseen) continue;
      // Both relative to the old reference.
      const float top =
          unseen ? high : fmaxf(high, static_cast<float>(kTopExponent - old_exponent));
      const float move = static_cast<float>(kTopExponent - scale_exponent) - top;
      const float factor = exp2_fast(move);
      reference[c] -= move;
      limit[c] = static_cast<float>(kTopExponent + kHeadroom - scale_exponent);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        s[r][c] += move;
        s[r][c + 2] += move;
      }
      if (unseen) continue;  // nothing summed yet; the factor may be infinite
      sum[c] *= factor;
      min_sum[c] *= factor;
#pragma unroll
      for (int i = 0; i < D / 16; ++i) {
        o[i][c] *= factor;
        o[i][c + 2] *= factor;
      }
    }
  }
  // Switches `o` between plain units (BF16 chunks) and INT2 units: item q carries 4^e(q) 2^-24.
  __device__ __forceinline__ void to_int2_units() {
    unroll<D / 8>([&]<int q>() {
      constexpr float factor = power_of_4(item_exponent(D, q) - 12);
      o[q / 2][q % 2 * 2] *= factor;
      o[q / 2][q % 2 * 2 + 1] *= factor;
    });
  }
};

// Query fragments of the INT2 part: registers when they fit, else shared memory
// ([item / 2][lane] pairs, the same for all warps).
template <int D, bool kInRegisters>
struct QueryFragments {
  uint32_t regs[kInRegisters ? D / 8 : 1];
  const uint2* shared;
  __device__ __forceinline__ uint2 get(int step, int lane) const {
    if constexpr (kInRegisters) return make_uint2(regs[2 * step], regs[2 * step + 1]);
    return shared[step * 32 + lane];
  }
};

struct ScoreScale {
  float code;                      // score = acc * (scale_k * code) + min_k * q_sum
  float softcap, inverse_softcap;  // cap in log2 units and 1 / cap, 0 = off
};

__device__ __forceinline__ float cap_score(float score, float cap, float inverse_cap) {
  // cap * tanh(score / cap), tanh through exp2: exact to a few 1e-7.
  const float e = exp2_fast(score * inverse_cap * (2.0F * kLog2e));
  return cap * (1.0F - __fdividef(2.0F, e + 1.0F));
}

// RB records (16 RB tokens) of a page already in shared memory. kGeneral: masks and softcap.
template <int D, int C, int RB, bool kGeneral, bool kQInRegisters>
__device__ __forceinline__ void attend_records(Softmax<D, C>& state,
                                               const QueryFragments<D, kQInRegisters>& query,
                                               const float (&q_sum)[C], ScoreScale scale,
                                               const uint8_t* records, int lane, int first_position,
                                               int end_position, const ColumnLimits<C>& limits) {
  const int g = lane >> 2;
  float s[RB][4];
#pragma unroll
  for (int r = 0; r < RB; ++r) s[r][0] = s[r][1] = s[r][2] = s[r][3] = 0.0F;
  {
    uint32_t words[RB][D / 32], shifted[RB][D / 32];
#pragma unroll
    for (int r = 0; r < RB; ++r) {
      load_words<D>(records + r * record_bytes(D), lane, words[r]);
      shift_words<D>(words[r], shifted[r]);
    }
    unroll<D / 16>([&]<int step>() {
      uint2 b;
      b = query.get(step, lane);
#pragma unroll
      for (int r = 0; r < RB; ++r) {
        const uint32_t a0 = cut<D, 2 * step, 0>(words[r], shifted[r]);
        const uint32_t a1 = cut<D, 2 * step, 1>(words[r], shifted[r]);
        const uint32_t a2 = cut<D, 2 * step + 1, 0>(words[r], shifted[r]);
        const uint32_t a3 = cut<D, 2 * step + 1, 1>(words[r], shifted[r]);
        mma_fp16(s[r], a0, a1, a2, a3, b.x, b.y);
      }
    });
  }
  // Scale and minimum of K; metadata of V is kept as loaded.
  uint32_t v_meta[RB][2];
  float highest[C];
#pragma unroll
  for (int c = 0; c < C; ++c) highest[c] = kMasked;
  __half2 v_meta_max = __float2half2_rn(0.0F);
#pragma unroll
  for (int r = 0; r < RB; ++r) {
    const uint4 meta =
        *reinterpret_cast<const uint4*>(records + r * record_bytes(D) + 8 * D + 16 * g);
    float2 k_low = unpack_fp16(meta.x), k_high = unpack_fp16(meta.z);
    v_meta[r][0] = meta.y, v_meta[r][1] = meta.w;
    bool seen[2] = {true, true};
    const int position = first_position + r * kRecordTokens + g;
    if constexpr (kGeneral) {
      seen[0] = position < end_position;
      seen[1] = position + 8 < end_position;
      if (!seen[0]) v_meta[r][0] = 0;
      if (!seen[1]) v_meta[r][1] = 0;
    }
    v_meta_max = __hmax2(v_meta_max, *reinterpret_cast<const __half2*>(&v_meta[r][0]));
    v_meta_max = __hmax2(v_meta_max, *reinterpret_cast<const __half2*>(&v_meta[r][1]));
    k_low.x *= scale.code, k_high.x *= scale.code;
#pragma unroll
    for (int c = 0; c < C; ++c) {
      // Relative to the reference at once, unless a softcap comes between.
      const float reference = kGeneral ? 0.0F : state.reference[c];
      s[r][c] = fmaf(s[r][c], k_low.x, fmaf(k_low.y, q_sum[c], -reference));
      s[r][c + 2] = fmaf(s[r][c + 2], k_high.x, fmaf(k_high.y, q_sum[c], -reference));
      if constexpr (kGeneral) {
        if (scale.softcap > 0.0F) {
          s[r][c] = cap_score(s[r][c], scale.softcap, scale.inverse_softcap);
          s[r][c + 2] = cap_score(s[r][c + 2], scale.softcap, scale.inverse_softcap);
        }
        s[r][c] -= state.reference[c];
        s[r][c + 2] -= state.reference[c];
        const int first = limits.first[c], last = limits.last[c];
        if (!seen[0] || position < first || position > last) s[r][c] = kMasked;
        if (!seen[1] || position + 8 < first || position + 8 > last) s[r][c + 2] = kMasked;
      }
      highest[c] = fmaxf(highest[c], fmaxf(s[r][c], s[r][c + 2]));
    }
  }
  state.settle(s, highest, __low2float(v_meta_max));
  uint32_t b[RB][2];
#pragma unroll
  for (int r = 0; r < RB; ++r) {
    const float2 v_low = unpack_fp16(v_meta[r][0]), v_high = unpack_fp16(v_meta[r][1]);
    float low[2] = {0.0F, 0.0F}, high[2] = {0.0F, 0.0F};  // weights of tokens 0-7 and 8-15
#pragma unroll
    for (int c = 0; c < C; ++c) {
      const float p_low = exp2_fast(s[r][c]), p_high = exp2_fast(s[r][c + 2]);
      state.sum[c] += p_low + p_high;
      state.min_sum[c] = fmaf(p_low, v_low.y, fmaf(p_high, v_high.y, state.min_sum[c]));
      low[c] = p_low * v_low.x;
      high[c] = p_high * v_high.x;
    }
    b[r][0] = transpose_8x8(pack_fp16(low[0], low[1]));
    b[r][1] = transpose_8x8(pack_fp16(high[0], high[1]));
  }
#pragma unroll
  for (int r = 0; r < RB; ++r) {
    uint32_t words[D / 32], shifted[D / 32];
    load_words<D>(records + r * record_bytes(D) + 4 * D, lane, words);
    shift_words<D>(words, shifted);
    unroll<D / 16>([&]<int i>() {
      const uint32_t a0 = cut<D, 2 * i, 0>(words, shifted);
      const uint32_t a1 = cut<D, 2 * i + 1, 0>(words, shifted);
      const uint32_t a2 = cut<D, 2 * i, 1>(words, shifted);
      const uint32_t a3 = cut<D, 2 * i + 1, 1>(words, shifted);
      mma_fp16(state.o[i], a0, a1, a2, a3, b[r][0], b[r][1]);
    });
  }
}

}  // namespace oscar::decode
