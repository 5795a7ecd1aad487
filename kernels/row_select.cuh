// Order statistics and reductions of rows that are spread over four lanes of a warp (a quad).
#pragma once

#include <cuda_bf16.h>

#include <cmath>
#include <cstdint>

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

// The same for a row of bf16 values held as pairs: the keys are the values, so the bisection runs
// to the end and nothing has to be gone through. Largest key of the quad: `top`.
template <int N>
__device__ __forceinline__ float kth_largest_bf16(const uint32_t (&pairs)[N], int top, int rank) {
  // At or above `low` there are at least `rank` elements, at or above `high` fewer.
  int low = 0, high = top + 1;
  int probe = max(high - 128, 1);  // an octave below the largest: where clip thresholds are
  while (__any_sync(~0U, high - low > 1)) {
    const uint32_t both = static_cast<uint32_t>(probe) * 0x00010001U;
    const __nv_bfloat162 threshold = *reinterpret_cast<const __nv_bfloat162*>(&both);
    __nv_bfloat162 sums[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = __float2bfloat162_rn(0.0F);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const __nv_bfloat162 value = __habs2(*reinterpret_cast<const __nv_bfloat162*>(&pairs[i]));
      sums[i % 4] = __hadd2(sums[i % 4], __hge2(value, threshold));
    }
    const __nv_bfloat162 sum = __hadd2(__hadd2(sums[0], sums[1]), __hadd2(sums[2], sums[3]));
    const int count = quad_sum(static_cast<int>(__low2float(sum) + __high2float(sum)));
    if (high - low > 1) (count >= rank ? low : high) = probe;
    probe = (low + high) / 2;
  }
  return __uint_as_float(static_cast<uint32_t>(low) << 16);
}

}  // namespace oscar::row_select
