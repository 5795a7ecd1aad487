// Encoder `feedback`: a warp encodes two tiles (32 rows); in the end each lane owns one row.
//
// With A = L diag(p) L^T, x a row, y its dequantized candidate: the target of dim i is
//   t_i = x_i + sum_{j>i} L_ji (x_j - y_j) = z_i - sum_{j>i} L_ji y_j,   z = x L,
// and r_i = t_i - y_i gives e A e^T = sum p r^2, x A x^T = sum p z^2, x A y^T = sum p z (z - r). So
// after z nothing needs x, and since y_j = s c_j + low, the sum over the blocks of 16 dims that are
// done is s (c L)_i + low (1 L)_i: a tensor-core product of the codes, which fp16 holds exactly,
// with L in two fp16 pieces. Inside a block the owner of the row goes from dim to dim, all
// candidates at once.
#pragma once

#include "kernels/write_rotate.cuh"

namespace oscar::write_feedback {

using namespace write_tile;

constexpr int kFactors = kWriteMultipliers;
constexpr int kUnitRows = 32, kUnitTiles = 2;

template <int D>
struct Shape {
  static constexpr int kBlocks = D / 16;
  static constexpr int kRowFloats = D + 4;  // rows of z start at different banks
  static constexpr int kZFloats = kUnitRows * kRowFloats;
  static constexpr int kWords = kBlocks * kFactors * kUnitRows;
  static constexpr int kWarpBytes = 4 * (kZFloats + kWords);
  static constexpr int kTileUints = 64;  // uint4 of a tile of L: two pieces, 32 lanes
};

// The parts of pack_write_metric().
struct Metric {
  const uint4* tiles;
  const float *within, *later, *pivot;
};
template <int D>
__device__ __forceinline__ Metric metric_parts(const void* packed) {
  constexpr int kBlocks = Shape<D>::kBlocks;
  const auto* bytes = static_cast<const uint8_t*>(packed);
  Metric metric;
  metric.tiles = reinterpret_cast<const uint4*>(bytes);
  metric.within = reinterpret_cast<const float*>(bytes + kBlocks * (kBlocks + 1) / 2 * 1024);
  metric.later = metric.within + kBlocks * 256;
  metric.pivot = metric.later + D;
  return metric;
}
template <int D>
__device__ __forceinline__ int tile_offset(int column_block, int row_block) {
  return (column_block * Shape<D>::kBlocks - column_block * (column_block - 1) / 2 + row_block -
          column_block) *
         Shape<D>::kTileUints;
}

// A warp's memory: z, and the code words of the candidates, [block][factor][g][4]: rows g + 8 r. In
// a word dim d of the block has bits 16 (d % 2) + 2 (d % 8 / 2) + 8 (d / 8) and the one above: the
// bits under 0x00030003 << 2 t, and 8 above, are the codes that lane t of a quad multiplies.
struct WarpMemory {
  float* z;
  uint32_t* words;
};
__host__ __device__ constexpr int code_shift(int d) {
  return 16 * (d % 2) + 2 * (d % 8 / 2) + 8 * (d / 8);
}
__host__ __device__ constexpr uint32_t code_base() {
  uint32_t sum = 0;
  for (int d = 0; d < 16; ++d) sum += kCodeBase << code_shift(d);
  return sum;
}

// Pairs (dims 8 i + 2 t, + 1) of a tile's rows, centred, rounded to bf16.
template <int D>
__device__ __forceinline__ void load_in_order(const WriteParams& p, const void* base,
                                              int64_t offset, const float* mean, int t,
                                              uint32_t (&pairs)[D / 8]) {
  offset += 2 * t;
#pragma unroll
  for (int i = 0; i < D / 8; ++i) {
    float2 x;
    if (p.input_type == ElementType::kFp32) {
      x = __ldg(reinterpret_cast<const float2*>(static_cast<const float*>(base) + offset + 8 * i));
    } else {
      const uint32_t raw = __ldg(
          reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(base) + offset + 8 * i));
      x = p.input_type == ElementType::kFp16 ? ptx::unpack_fp16(raw)
                                             : make_float2(ptx::bf16_low(raw), ptx::bf16_high(raw));
    }
    if (mean != nullptr) {
      const float2 center = __ldg(reinterpret_cast<const float2*>(mean + 8 * i + 2 * t));
      x.x -= center.x;
      x.y -= center.y;
    }
    pairs[i] = ptx::pack_bf16(x.x, x.y);
  }
}

// z = x L of one tile into rows [16 m, 16 m + 16) of the warp's z.
template <int D>
__device__ __forceinline__ void multiply_by_l(const uint32_t (&pairs)[2][D / 8],
                                              const Metric& metric, float* z, int m) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint32_t x[2][D / 8];
  float back[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < D / 8; ++i) most = __vmaxu2(most, pairs[r][i] & 0x7fff7fffU);
    most = __vmaxu2(most, __shfl_xor_sync(~0U, most, 1));
    most = __vmaxu2(most, __shfl_xor_sync(~0U, most, 2));
    // To fp16 by moving exponents, times 4^t: the rows 2 t of L's tiles carry 2^8 4^-t.
    const int shift = max(static_cast<int>(max(most & 0xffffU, most >> 16) >> 7) - 24, 6);
    const uint32_t less = static_cast<uint32_t>(-((shift - 2 * t) << 7)) & 0xffffU;
#pragma unroll
    for (int i = 0; i < D / 8; ++i) {
      const uint32_t moved = __viaddmax_s16x2(pairs[r][i] & 0x7fff7fffU, less * 0x00010001U, 0U);
      x[r][i] = (moved << 3) | (pairs[r][i] & 0x80008000U);
    }
    back[r] = __uint_as_float(static_cast<uint32_t>(shift + 7) << 23);  // 2^(shift - 112 - 8)
  }
#pragma unroll
  for (int b = 0; b < D / 16; ++b) {
    float sums[2][4] = {};
#pragma unroll
    for (int k = b; k < D / 16; ++k) {
      const uint4* tile = metric.tiles + tile_offset<D>(b, k);
#pragma unroll
      for (int piece = 0; piece < 2; ++piece) {
        const uint4 l = tile[32 * piece + lane];
        ptx::mma_fp16(sums[0], x[0][2 * k], x[1][2 * k], x[0][2 * k + 1], x[1][2 * k + 1], l.x,
                      l.y);
        ptx::mma_fp16(sums[1], x[0][2 * k], x[1][2 * k], x[0][2 * k + 1], x[1][2 * k + 1], l.z,
                      l.w);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        *reinterpret_cast<float2*>(z + (16 * m + g + 8 * r) * Shape<D>::kRowFloats + 16 * b +
                                   8 * n + 2 * t) =
            make_float2(sums[n][2 * r] * back[r], sums[n][2 * r + 1] * back[r]);
  }
}

// What one row's owner carries through the blocks.
struct Candidates {
  float scale[kFactors], low[kFactors], inverse[kFactors], offset[kFactors];
  float cost[kFactors], zr[kFactors];  // sum p r^2, sum p z r
  float xx;                            // sum p z^2
};

__device__ __forceinline__ float round_fp16(float x) { return __half2float(__float2half_rn(x)); }

// The candidates' pairs as they are stored, about the middle of the start range.
__device__ __forceinline__ Candidates make_candidates(const WriteParams& p, float low, float high) {
  Candidates c;
  const float scale = __fdiv_rn(high - low, 3.0F);
#pragma unroll
  for (int f = 0; f < kFactors; ++f) {
    c.scale[f] = round_fp16(__fmul_rn(p.multipliers[f], scale));
    c.low[f] = round_fp16(__fadd_rn(low, __fmul_rn(1.5F, __fsub_rn(scale, c.scale[f]))));
    c.inverse[f] = c.scale[f] > 0.0F ? __fdiv_rn(1.0F, 3.0F * c.scale[f]) : 0.0F;
    c.offset[f] = -c.low[f] * c.inverse[f];
    c.cost[f] = c.zr[f] = 0.0F;
  }
  c.xx = 0.0F;
  return c;
}

// targets[f][i]: t of the block's dims as far as the later blocks go; z_row, words: the owner's.
template <int D>
__device__ __forceinline__ void encode_block(const Metric& metric, int b,
                                             float (&targets)[kFactors][16], const float (&z)[16],
                                             Candidates& c, uint32_t* words) {
  uint32_t packed[kFactors];
#pragma unroll
  for (int f = 0; f < kFactors; ++f) packed[f] = 0U - code_base();
#pragma unroll
  for (int i = 15; i >= 0; --i) {
    const float pivot = metric.pivot[16 * b + i];
    const float weighted_z = pivot * z[i];
    c.xx = fmaf(weighted_z, z[i], c.xx);
    float y[kFactors];
#pragma unroll
    for (int f = 0; f < kFactors; ++f) {
      const float t = targets[f][i];
      const float level = __saturatef(fmaf(t, c.inverse[f], c.offset[f]));
      const float code = fmaf(level, 3.0F, 8388608.0F);  // rounds to an integer
      packed[f] += __float_as_uint(code) * (1U << code_shift(i));
      y[f] = fmaf(code - 8388608.0F, c.scale[f], c.low[f]);
      const float residual = t - y[f];
      c.cost[f] = fmaf(pivot * residual, residual, c.cost[f]);
      c.zr[f] = fmaf(weighted_z, residual, c.zr[f]);
    }
    const float4* row = reinterpret_cast<const float4*>(metric.within + (16 * b + i) * 16);
#pragma unroll
    for (int quad = 0; quad < 4; ++quad) {
      if (4 * quad < i) {
        const float4 l4 = row[quad];
        const float l[4] = {l4.x, l4.y, l4.z, l4.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
#pragma unroll
          for (int f = 0; f < kFactors; ++f)
            if (4 * quad + k < i)
              targets[f][4 * quad + k] = fmaf(l[k], y[f], targets[f][4 * quad + k]);
        }
      }
    }
  }
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int f = 0; f < kFactors; ++f)
    words[((b * kFactors + f) * 8 + lane % 8) * 4 + lane / 8] = packed[f];
}

// (c L) 2^-16 of block b over the later blocks, as fragments: [factor][tile][columns 8 n ..].
template <int D>
__device__ __forceinline__ void multiply_codes(const Metric& metric, int b, const uint32_t* words,
                                               float (&sums)[kFactors][2][2][4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t mask = 0x00030003U << (2 * t);
#pragma unroll 1
  for (int k = b + 1; k < Shape<D>::kBlocks; ++k) {
    const uint4* tile = metric.tiles + tile_offset<D>(b, k);
    const uint4 high = tile[lane], low = tile[32 + lane];
#pragma unroll
    for (int f = 0; f < kFactors; ++f) {
      const uint4 rows = *reinterpret_cast<const uint4*>(words + ((k * kFactors + f) * 8 + g) * 4);
      const uint32_t w[4] = {rows.x, rows.y, rows.z, rows.w};
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const uint32_t a0 = w[2 * m] & mask, a1 = w[2 * m + 1] & mask;
        const uint32_t a2 = (w[2 * m] >> 8) & mask, a3 = (w[2 * m + 1] >> 8) & mask;
        ptx::mma_fp16(sums[f][m][0], a0, a1, a2, a3, high.x, high.y);
        ptx::mma_fp16(sums[f][m][1], a0, a1, a2, a3, high.z, high.w);
        ptx::mma_fp16(sums[f][m][0], a0, a1, a2, a3, low.x, low.y);
        ptx::mma_fp16(sums[f][m][1], a0, a1, a2, a3, low.z, low.w);
      }
    }
  }
}

__device__ __forceinline__ void load_sixteen(const float4* source, float (&x)[16]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 quad = source[i];
    x[4 * i] = quad.x, x[4 * i + 1] = quad.y, x[4 * i + 2] = quad.z, x[4 * i + 3] = quad.w;
  }
}

// All blocks of the warp's 32 rows, last dims first.
template <int D>
__device__ __forceinline__ void encode_rows(const Metric& metric, const WarpMemory& memory,
                                            Candidates& c) {
  constexpr int kRow = Shape<D>::kRowFloats;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll 1
  for (int b = Shape<D>::kBlocks - 1; b >= 0; --b) {
    float sums[kFactors][2][2][4] = {};
    multiply_codes<D>(metric, b, memory.words, sums);
    float z[16], later[16];
    const auto* z_quads = reinterpret_cast<const float4*>(memory.z + lane * kRow + 16 * b);
    load_sixteen(z_quads, z);
    load_sixteen(reinterpret_cast<const float4*>(metric.later + 16 * b), later);
    __syncwarp();
    // From fragments to rows, through the place of z that has just been read.
    float targets[kFactors][16];
#pragma unroll
    for (int f = 0; f < kFactors; ++f) {
#pragma unroll
      for (int part = 0; part < 8; ++part) {
        const int m = part / 4, n = part / 2 % 2, r = part % 2;
        *reinterpret_cast<float2*>(memory.z + (16 * m + g + 8 * r) * kRow + 16 * b + 8 * n +
                                   2 * t) =
            make_float2(sums[f][m][n][2 * r], sums[f][m][n][2 * r + 1]);
      }
      __syncwarp();
      load_sixteen(z_quads, targets[f]);
#pragma unroll
      for (int i = 0; i < 16; ++i)
        targets[f][i] = fmaf(targets[f][i], -65536.0F * c.scale[f], fmaf(later[i], c.low[f], z[i]));
      __syncwarp();
    }
    encode_block<D>(metric, b, targets, z, c, memory.words);
    __syncwarp();
  }
}

// The chosen pair of a row.
struct Choice {
  int factor;
  uint32_t stored;
  bool refused, constant, clamped;
};
__device__ __forceinline__ Choice choose(const Candidates& c, bool gain, bool refused) {
  float best = INFINITY, scale = 0.0F, low = 0.0F, zr = 0.0F;
  Choice choice{0, 0, true, false, false};
#pragma unroll
  for (int f = 0; f < kFactors; ++f) {
    if (refused || !(c.cost[f] < best)) continue;
    choice.refused = false;
    choice.factor = f;
    best = c.cost[f], scale = c.scale[f], low = c.low[f], zr = c.zr[f];
  }
  if (choice.refused) {
    choice.stored = pack_halves(__float2half_rn(1.0F), __float2half_rn(0.0F));
    return choice;
  }
  choice.constant = scale == 0.0F;
  if (choice.constant) scale = 1.0F;
  if (gain) {
    const float xy = c.xx - zr;
    float factor = c.xx > 0.0F ? (xy > 0.0F ? __fdiv_rn(c.xx, xy) : INFINITY) : 1.0F;
    choice.clamped = !(factor >= 0.8F && factor <= 1.5F);
    if (choice.clamped) factor = factor < 0.8F ? 0.8F : 1.5F;
    const float new_scale = round_fp16(factor * scale), new_low = round_fp16(factor * low);
    if (new_scale > 0.0F && isfinite(new_scale) && isfinite(new_low)) {
      scale = new_scale;
      low = new_low;
    }
  }
  choice.stored = pack_halves(__float2half_rn(scale), __float2half_rn(low));
  return choice;
}

// Two bits apart: 16 bits of eight codes to 32 bits, a gap of one code after each.
__device__ __forceinline__ uint32_t spread(uint32_t codes) {
  codes = (codes | codes << 8) & 0x00FF00FFU;
  codes = (codes | codes << 4) & 0x0F0F0F0FU;
  return (codes | codes << 2) & 0x33333333U;
}

// One row's codes into its record. words: the row's word of block b at words[b * stride].
template <int D>
__device__ __forceinline__ void place_codes(uint8_t* record, bool key, int token,
                                            const uint32_t* words, int stride, bool zeros) {
  constexpr int kFullBlocks = D / 64 * 4;
  const int half = token / 8;
  uint8_t* area = record + (key ? 0 : record_code_bytes(D));
  const auto word_of = [&](int b) { return zeros ? 0U : words[b * stride]; };
#pragma unroll
  for (int b = 0; b < D / 16; ++b) {
    const uint32_t word = word_of(b);
    const uint32_t in_order = spread(word & 0xffffU) | spread(word >> 16) << 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (key && b < kFullBlocks) {
        if (b % 4 >= 2) continue;  // written with the block two before
        const int lane = 4 * (token % 8) + 2 * (b % 2) + h;
        const uint32_t other = word_of(b + 2);
        *reinterpret_cast<uint32_t*>(area + 4 * record_word_index(D, lane, b / 4 * 2 + half)) =
            ((word >> 8 * h) & 0x00FF00FFU) | ((other >> 8 * h) & 0x00FF00FFU) << 8;
      } else if (key) {
        const int lane = 4 * (token % 8) + 2 * (b % 2) + h;
        uint8_t* at = area + 4 * record_word_index(D, lane, D / 32 - 1) + half;
        at[0] = static_cast<uint8_t>(word >> 8 * h);
        at[2] = static_cast<uint8_t>(word >> (8 * h + 16));
      } else if (b < kFullBlocks) {
        const int lane = 4 * (b % 4 * 2 + h) + token % 8 / 2;
        *reinterpret_cast<uint16_t*>(area + 4 * record_word_index(D, lane, b / 4 * 2 + half) +
                                     2 * (token % 2)) = static_cast<uint16_t>(in_order >> 16 * h);
      } else {
#pragma unroll
        for (int part = 0; part < 2; ++part) {  // runs of four dims
          const int lane = 4 * ((b - kFullBlocks) * 4 + 2 * h + part) + token % 8 / 2;
          area[4 * record_word_index(D, lane, D / 32 - 1) + 2 * (token % 2) + half] =
              static_cast<uint8_t>(in_order >> (16 * h + 8 * part));
        }
      }
    }
  }
}

}  // namespace oscar::write_feedback
