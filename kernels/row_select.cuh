// Order statistics and reductions of rows that are spread over four lanes of a warp (a quad).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "kernels/ptx.cuh"

namespace oscar::row_select {

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0U, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0U, x, 2));
}
__device__ __forceinline__ float quad_min(float x) { return -quad_max(-x); }
__device__ __forceinline__ int quad_sum(int x) {
  x += __shfl_xor_sync(~0U, x, 1);
  return x + __shfl_xor_sync(~0U, x, 2);
}

// The rank-th largest |x| of the quad's row, exactly, without a sort. The upper 16 bits of |x| are
// bf16 keys in the same order: two keys a register, compared and counted two at a time. A bisection
// over keys stops when exactly `rank` elements are at or above the bound (their minimum is the
// answer) or the bound's key is settled (then the key's few elements are gone through).
template <int N>
__device__ __forceinline__ float kth_largest(const float (&x)[N], int rank) {
  __nv_bfloat162 keys[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const uint32_t packed =
        __byte_perm(__float_as_uint(x[2 * i]), __float_as_uint(x[2 * i + 1]), 0x7632) & 0x7fff7fffU;
    keys[i] = *reinterpret_cast<const __nv_bfloat162*>(&packed);
  }
  const auto count_from = [&](int bound) {
    const uint32_t both = static_cast<uint32_t>(bound) * 0x00010001U;
    const __nv_bfloat162 threshold = *reinterpret_cast<const __nv_bfloat162*>(&both);
    __nv_bfloat162 sum = __float2bfloat162_rn(0.0F);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sum = __hadd2(sum, __hge2(keys[i], threshold));
    return quad_sum(static_cast<int>(__low2float(sum) + __high2float(sum)));
  };
  float largest = 0.0F;
#pragma unroll
  for (int i = 0; i < N; ++i) largest = fmaxf(largest, fabsf(x[i]));
  largest = quad_max(largest);
  int high = static_cast<int>(__float_as_uint(largest) >> 16) + 1;  // nothing is at or above it
  int low = 0;                                                      // everything is
  int below_high = 0;                                               // elements at or above `high`
  int at_low = 4 * N;
  int probe = max(high - 128, 1);  // an octave below the largest: where clip thresholds are
  while (true) {
    const bool open = high - low > 1 && at_low != rank;
    if (!__any_sync(~0U, open)) break;
    const int count = count_from(probe);
    if (open) {
      if (count >= rank) {
        low = probe;
        at_low = count;
      } else {
        high = probe;
        below_high = count;
      }
    }
    probe = (low + high) / 2;
  }
  // Elements with key in [low, high): the answer is the (rank - below_high)-th largest of them.
  const float floor_value = __uint_as_float(static_cast<uint32_t>(low) << 16);
  if (__all_sync(~0U, at_low == rank)) {
    float least = INFINITY;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float a = fabsf(x[i]);
      least = a >= floor_value ? fminf(least, a) : least;
    }
    return quad_min(least);
  }
  int left = rank - below_high;
  float previous = __uint_as_float(static_cast<uint32_t>(high) << 16);
  float answer = 0.0F;
  bool found = false;
  while (__any_sync(~0U, !found)) {
    float next = -1.0F;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float a = fabsf(x[i]);
      next = a < previous ? fmaxf(next, a) : next;
    }
    next = quad_max(next);
    int equal = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) equal += fabsf(x[i]) == next ? 1 : 0;
    equal = quad_sum(equal);
    if (!found) {
      left -= equal;
      previous = next;
      if (left <= 0) {
        found = true;
        answer = next;
      }
    }
  }
  return answer;
}

// --- sixteen rows of bf16 values, rows g and g + 8 in the quad g, pairs of values a register ---

// Adds the ones that `compare(row, pair)` yields (two a register) over the rows g and g + 8 of the
// quad: products with a matrix of ones, by `product(sums, a0, a1, a2, a3)`.
template <int N, class Compare, class Product>
__device__ __forceinline__ void add_ones(const Compare& compare, const Product& product,
                                         float (&counts)[2]) {
  float sums[2][4] = {};
#pragma unroll
  for (int i = 0; i < N; i += 2)
    product(sums[i / 2 % 2], compare(0, i), compare(1, i), compare(0, i + 1), compare(1, i + 1));
  counts[0] = sums[0][0] + sums[1][0];
  counts[1] = sums[0][2] + sums[1][2];
}

// Elements of the rows g and g + 8 (magnitudes) that are at or above the (duplicated) bf16 keys.
template <int N>
__device__ __forceinline__ void count_at_least(const uint32_t (&pairs)[2][N],
                                               const uint32_t (&keys)[2], float (&counts)[2]) {
  constexpr uint32_t kOnes = 0x3F803F80U;
  const auto compare = [&](int row, int i) {
    const auto value = *reinterpret_cast<const __nv_bfloat162*>(&pairs[row][i]);
    const auto key = *reinterpret_cast<const __nv_bfloat162*>(&keys[row]);
    const __nv_bfloat162 found = __hge2(value, key);
    return *reinterpret_cast<const uint32_t*>(&found);
  };
  add_ones<N>(
      compare,
      [](float(&sums)[4], uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
        ptx::mma_bf16(sums, a, b, c, d, kOnes, kOnes);
      },
      counts);
}

// The same on the FMA pipe, which has room where the ALU has none: the bits of bf16 magnitudes are
// read as fp16, which order alike, and saturate((x - below) * scale) is 1 from the key after
// `below` on, else 0. offsets: -below * scale; scales: powers of two for which a step between
// neighbours of `below` becomes 1 or more.
template <int N>
__device__ __forceinline__ void count_above(const uint32_t (&pairs)[2][N],
                                            const __half2 (&scales)[2], const __half2 (&offsets)[2],
                                            float (&counts)[2]) {
  constexpr uint32_t kOnes = 0x3C003C00U;
  const auto compare = [&](int row, int i) {
    const auto value = *reinterpret_cast<const __half2*>(&pairs[row][i]);
    const __half2 found = __hfma2_sat(value, scales[row], offsets[row]);
    return *reinterpret_cast<const uint32_t*>(&found);
  };
  add_ones<N>(
      compare,
      [](float(&sums)[4], uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
        ptx::mma_fp16(sums, a, b, c, d, kOnes, kOnes);
      },
      counts);
}

// The ranks[r]-th largest of the rows' magnitudes, exactly; top: largest key (upper 16 bits) of the
// rows. Thresholds mostly lie in the octave below the largest: seven halvings. Rows where they do
// not, or whose keys fp16 cannot scale, are searched over all keys.
template <int N>
__device__ __forceinline__ void kth_largest_tile(const uint32_t (&pairs)[2][N], const int (&top)[2],
                                                 const float (&ranks)[2], float (&thresholds)[2]) {
  // Of base - 1, whose fp16 exponent e gives the scale 2^(10 - e).
  constexpr int kLeast = 10 << 10, kLimit = 31 << 10;
  uint32_t low[2], base[2], probe[2];  // low and base: of keys, less one
  __half2 scales[2], offsets[2];
  float counts[2];
  bool sure = true;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int below = max(top[r] - 128, 0);
    sure = sure && below >= kLeast && top[r] < kLimit;
    low[r] = base[r] = static_cast<uint32_t>(below) * 0x00010001U;
    const uint32_t scale = static_cast<uint32_t>(40 - (below >> 10)) * 0x04000400U;
    scales[r] = *reinterpret_cast<const __half2*>(&scale);
  }
#pragma unroll
  for (int step = 64; step > 0; step /= 2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      probe[r] = low[r] + static_cast<uint32_t>(step) * 0x00010001U;
      offsets[r] = __hmul2(*reinterpret_cast<const __half2*>(&probe[r]), __hneg2(scales[r]));
    }
    count_above(pairs, scales, offsets, counts);
#pragma unroll
    for (int r = 0; r < 2; ++r) low[r] = counts[r] >= ranks[r] ? probe[r] : low[r];
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sure = sure && low[r] != base[r];
    low[r] += 0x00010001U;
  }
  if (!__all_sync(~0U, sure)) {
    low[0] = low[1] = 0U;
#pragma unroll 1
    for (uint32_t step = 0x40004000U; step >= 0x00010001U; step = step / 2 & 0x7fff7fffU) {
#pragma unroll
      for (int r = 0; r < 2; ++r) probe[r] = low[r] + step;
      count_at_least(pairs, probe, counts);
#pragma unroll
      for (int r = 0; r < 2; ++r) low[r] = counts[r] >= ranks[r] ? probe[r] : low[r];
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) thresholds[r] = __uint_as_float(low[r] << 16);
}

}  // namespace oscar::row_select
