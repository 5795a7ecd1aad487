// Rotation of a tile's rows on the tensor cores, and the walk of a thread block over tiles that
// share matrices.
#pragma once

#include "kernels/wgmma.cuh"
#include "kernels/write_tile.cuh"

namespace oscar::write_tile {

// Consecutive tiles [begin, end) of jobs of one side pair, cut at `limit`.
struct TileRun {
  int begin, end, side_pair;
};
__device__ __forceinline__ TileRun find_run(const WriteParams& p, int begin, int limit) {
  WriteJob job;
  int index = find_job(p, begin, job);
  TileRun run{begin, job_end_tile(job), job.side_pair};
  while (run.end < limit && ++index < p.num_jobs) {
    job = load_job(p.jobs + index);
    if (job.side_pair != run.side_pair) break;
    run.end = job_end_tile(job);
  }
  run.end = min(run.end, limit);
  return run;
}

// One row as fp16 pieces times a power of two; `back` undoes it. Rows that are not finite: back is
// NaN, the pieces are zeros.
template <int D, ElementType kType>
struct RowPieces {
  static constexpr bool kSplit = kType == ElementType::kFp32;
  uint32_t high[D / 8];
  uint32_t low[kSplit ? D / 8 : 1];
  float back;

  // row: this lane's first element (8 t), read in pieces of 8 every 32.
  __device__ __forceinline__ void load(const void* row) {
    if constexpr (kSplit) {
      load_split(static_cast<const float*>(row));
    } else {
      load_16_bits(static_cast<const uint16_t*>(row));
    }
  }

 private:
  __device__ __forceinline__ void load_16_bits(const uint16_t* row) {
    load_pairs<D>(row, high);
    // Magnitudes of 16-bit floats order as integers; the ones beyond the infinity are NaN.
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < D / 8; ++i) most = __vmaxu2(most, high[i] & 0x7fff7fffU);
    most = __vmaxu2(most, __shfl_xor_sync(~0U, most, 1));
    most = __vmaxu2(most, __shfl_xor_sync(~0U, most, 2));
    const uint32_t top = max(most & 0xffffU, most >> 16);
    back = 1.0F;
    if constexpr (kType == ElementType::kBf16) {
      // Exponents are moved so that the largest becomes 24; what is 2^24 times smaller vanishes.
      const int shift = max(static_cast<int>(top >> 7) - 24, 0);
      const uint32_t less = static_cast<uint32_t>(-(shift << 7)) & 0xffffU;
#pragma unroll
      for (int i = 0; i < D / 8; ++i) {
        const uint32_t moved = __viaddmax_s16x2(high[i] & 0x7fff7fffU, less * 0x00010001U, 0U);
        high[i] = (moved << 3) | (high[i] & 0x80008000U);
      }
      back = __uint_as_float(static_cast<uint32_t>(shift + 15) << 23);  // 2^(shift - 112)
    }
    if (top >= (kType == ElementType::kBf16 ? 0x7F80U : 0x7C00U)) refuse();
  }
  __device__ __forceinline__ void load_split(const float* row) {
    float x[D / 4];
#pragma unroll
    for (int block = 0; block < D / 32; ++block)
      load_eight<ElementType::kFp32>(row, 32 * block, x + 8 * block);
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < D / 4; ++i) most = max(most, __float_as_uint(x[i]) & 0x7fffffffU);
    most = max(most, __shfl_xor_sync(~0U, most, 1));
    most = max(most, __shfl_xor_sync(~0U, most, 2));
    const int exponent = max(static_cast<int>(most >> 23), 10);
    const float forth = __uint_as_float(static_cast<uint32_t>(263 - exponent) << 23);
    back = __uint_as_float(static_cast<uint32_t>(exponent - 9) << 23);
#pragma unroll
    for (int i = 0; i < D / 8; ++i) {
      const float a = x[2 * i] * forth, b = x[2 * i + 1] * forth;
      high[i] = ptx::pack_fp16(a, b);
      const float2 taken = ptx::unpack_fp16(high[i]);
      low[i] = ptx::pack_fp16(a - taken.x, b - taken.y);
    }
    if (most >= 0x7F800000U) refuse();
  }
  __device__ __forceinline__ void refuse() {
    back = __uint_as_float(0x7FC00000U);
#pragma unroll
    for (int i = 0; i < D / 8; ++i) high[i] = 0;
    if constexpr (kSplit) {
#pragma unroll
      for (int i = 0; i < D / 8; ++i) low[i] = 0;
    }
  }
};

// rows[r]: row g + 8 r, this lane's first element (8 t). fragments: pack_write_rotation() of the
// head. mean: of the head, may be null; mean_dim(i) = dim of the first element of output register
// i. The rotated, centred rows, rounded to bf16; NaN where a row is not finite.
template <int D, ElementType kType, class MeanDim>
__device__ __forceinline__ void rotate_tile(const void* const (&rows)[2], const uint4* fragments,
                                            const float* mean, const MeanDim& mean_dim,
                                            uint32_t (&out)[2][D / 8]) {
  RowPieces<D, kType> pieces[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) pieces[r].load(rows[r]);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int tile = 0; tile < D / 8; ++tile) {
    float sums[2][4] = {};
#pragma unroll
    for (int block = 0; block < D / 16; ++block) {
      const uint4 b = fragments[(tile * (D / 16) + block) * 32 + lane];
      const auto multiply = [&](float(&sum)[4], const auto& a0, const auto& a1, uint32_t b0,
                                uint32_t b1) {
        ptx::mma_fp16(sum, a0[2 * block], a1[2 * block], a0[2 * block + 1], a1[2 * block + 1], b0,
                      b1);
      };
      multiply(sums[0], pieces[0].high, pieces[1].high, b.x, b.y);
      multiply(sums[1], pieces[0].high, pieces[1].high, b.z, b.w);
      if constexpr (kType == ElementType::kFp32)
        multiply(sums[1], pieces[0].low, pieces[1].low, b.x, b.y);
    }
    float2 center = make_float2(0.0F, 0.0F);
    if (mean != nullptr) center = __ldg(reinterpret_cast<const float2*>(mean + mean_dim(tile)));
#pragma unroll
    for (int r = 0; r < 2; ++r)
      out[r][tile] =
          ptx::pack_bf16(fmaf(sums[0][2 * r] + sums[1][2 * r], pieces[r].back, -center.x),
                         fmaf(sums[0][2 * r + 1] + sums[1][2 * r + 1], pieces[r].back, -center.y));
  }
}

#ifdef OSCAR_HAS_WGMMA
// The same products with wgmma, a warpgroup = four tiles. R in shared memory: for 64 columns, 64
// contraction indices and a piece 64 rows (columns of R) of 128 bytes, swizzled.
inline constexpr int kSwizzledBytes = 8192;

template <int D>
__device__ __forceinline__ void load_swizzled(const uint4* fragments, uint8_t* shared) {
  for (int i = threadIdx.x; i < D * D / 4; i += blockDim.x) {
    const uint4 b = __ldg(fragments + i);
    const int lane = i % 32, block = i / 32 % (D / 16), tile = i / 32 / (D / 16);
    const int column = 8 * tile + lane / 4;
    const auto place = [&](int piece, int half, uint32_t value) {
      const int byte = (16 * (block % 4) + 8 * half + 2 * (lane % 4)) * 2;
      const int area = (column / 64 * (D / 64) + block / 4) * 2 + piece;
      *reinterpret_cast<uint32_t*>(shared + area * kSwizzledBytes + column % 64 * 128 +
                                   ((byte / 16) ^ (column % 8)) * 16 + byte % 16) = value;
    };
    place(0, 0, b.x);
    place(0, 1, b.y);
    place(1, 0, b.z);
    place(1, 1, b.w);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <int D, ElementType kType>
__device__ __forceinline__ void rotate_tile_wgmma(const void* const (&rows)[2],
                                                  const uint8_t* shared, const float* mean,
                                                  uint32_t (&out)[2][D / 8]) {
  RowPieces<D, kType> pieces[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) pieces[r].load(rows[r]);
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int columns = 0; columns < D / 64; ++columns) {
    float sums[8][4];
    wgmma::fence();
#pragma unroll
    for (int block = 0; block < D / 16; ++block) {
      const uint64_t b =
          wgmma::make_descriptor(
              ptx::shared_address(shared + (columns * (D / 64) + block / 4) * 2 * kSwizzledBytes),
              0) +
          static_cast<uint64_t>(2 * (block % 4));
      const auto operand = [&](const auto& row0, const auto& row1, uint32_t(&a)[4]) {
        a[0] = row0[2 * block], a[1] = row1[2 * block];
        a[2] = row0[2 * block + 1], a[3] = row1[2 * block + 1];
      };
      uint32_t a[4];
      operand(pieces[0].high, pieces[1].high, a);
      wgmma::multiply_nk_fp16(sums, a, b, block > 0);
      wgmma::multiply_nk_fp16(sums, a, b + (kSwizzledBytes >> 4), true);
      if constexpr (kType == ElementType::kFp32) {
        uint32_t low[4];
        operand(pieces[0].low, pieces[1].low, low);
        wgmma::multiply_nk_fp16(sums, low, b, true);
      }
    }
    wgmma::commit();
    wgmma::wait<0>();
    wgmma::hold(sums);
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
      const int i = 8 * columns + tile;
      float2 center = make_float2(0.0F, 0.0F);
      if (mean != nullptr)
        center = __ldg(reinterpret_cast<const float2*>(mean + 32 * (i / 4) + 8 * t + 2 * (i % 4)));
#pragma unroll
      for (int r = 0; r < 2; ++r)
        out[r][i] = ptx::pack_bf16(fmaf(sums[tile][2 * r], pieces[r].back, -center.x),
                                   fmaf(sums[tile][2 * r + 1], pieces[r].back, -center.y));
    }
  }
}
#endif

}  // namespace oscar::write_tile
