// Attention kernels as templates over a vector type; each attention_<isa>.cpp instantiates them
// with a type of its own anonymous namespace, so that no instantiation is shared between
// instruction sets.
#pragma once

#include <cstddef>
#include <cstdint>

#include "model/attention_kernels.h"

namespace oscar::attention_simd {

// 2^x on [-0.5, 0.5] is 1 + x (c[0] + c[1] x + ...): interpolation at the Chebyshev nodes, relative
// error 5e-9 (below float32 rounding).
inline constexpr float kExp2[6] = {0.69314718803F, 0.24022650761F, 0.05550357114F,
                                   0.00961808256F, 0.00133908634F, 0.00015453163F};

// One register tile: ROWS x (VECTORS * V::kWidth) elements of c.
template <class V, size_t ROWS, size_t VECTORS>
void gemm_tile(size_t k, const float* a, size_t a_stride, const float* b, size_t b_stride, float* c,
               size_t c_stride, bool accumulate) {
  using Reg = typename V::Reg;
  Reg sum[ROWS][VECTORS];
#pragma GCC unroll 16
  for (size_t r = 0; r < ROWS; ++r) {
#pragma GCC unroll 16
    for (size_t v = 0; v < VECTORS; ++v) {
      sum[r][v] = accumulate ? V::load(c + r * c_stride + v * V::kWidth) : V::set(0.0F);
    }
  }
  for (size_t i = 0; i < k; ++i) {
    Reg row[VECTORS];
#pragma GCC unroll 16
    for (size_t v = 0; v < VECTORS; ++v) row[v] = V::load(b + i * b_stride + v * V::kWidth);
#pragma GCC unroll 16
    for (size_t r = 0; r < ROWS; ++r) {
      const Reg factor = V::set(a[r * a_stride + i]);
#pragma GCC unroll 16
      for (size_t v = 0; v < VECTORS; ++v) sum[r][v] = V::fma(factor, row[v], sum[r][v]);
    }
  }
#pragma GCC unroll 16
  for (size_t r = 0; r < ROWS; ++r) {
#pragma GCC unroll 16
    for (size_t v = 0; v < VECTORS; ++v) V::store(c + r * c_stride + v * V::kWidth, sum[r][v]);
  }
}

// All rows of one column strip; ROWS = the tallest tile that fits the register file.
template <class V, size_t ROWS, size_t VECTORS>
void gemm_strip(size_t m, size_t k, const float* a, size_t a_stride, const float* b,
                size_t b_stride, float* c, size_t c_stride, bool accumulate) {
  size_t row = 0;
  for (; row + ROWS <= m; row += ROWS) {
    gemm_tile<V, ROWS, VECTORS>(k, a + row * a_stride, a_stride, b, b_stride, c + row * c_stride,
                                c_stride, accumulate);
  }
  if constexpr (ROWS > 1) {
    if (row < m) {
      gemm_strip<V, (ROWS + 1) / 2, VECTORS>(m - row, k, a + row * a_stride, a_stride, b, b_stride,
                                             c + row * c_stride, c_stride, accumulate);
    }
  }
}

template <class V>
void gemm(size_t m, size_t n, size_t k, const float* a, size_t a_stride, const float* b,
          size_t b_stride, float* c, size_t c_stride, bool accumulate) {
  constexpr size_t kWide = V::kWideVectors * V::kWidth;
  size_t column = 0;
  for (; column + kWide <= n; column += kWide) {
    gemm_strip<V, V::kWideRows, V::kWideVectors>(m, k, a, a_stride, b + column, b_stride,
                                                 c + column, c_stride, accumulate);
  }
  for (; column < n; column += kColumnMultiple) {
    gemm_strip<V, V::kNarrowRows, kColumnMultiple / V::kWidth>(
        m, k, a, a_stride, b + column, b_stride, c + column, c_stride, accumulate);
  }
}

// 2^x for x <= 0; results below 2^-126 may be 0.
template <class V>
typename V::Reg exp2_nonpositive(typename V::Reg x) {
  const typename V::Reg bounded = V::max(x, V::set(-126.0F));
  const typename V::Reg whole = V::round(bounded);
  const typename V::Reg f = V::sub(bounded, whole);
  typename V::Reg p = V::set(kExp2[5]);
#pragma GCC unroll 8
  for (int i = 4; i >= 0; --i) p = V::fma(p, f, V::set(kExp2[i]));
  p = V::fma(p, f, V::set(1.0F));
  return V::scale_by_power_of_two(p, whole);
}

template <class V>
float exp2_scalar(float x) {
  alignas(64) float lanes[V::kWidth];
  V::store(lanes, exp2_nonpositive<V>(V::set(x)));
  return lanes[0];
}

// Raises the running maximum of row r to block_max, rescaling what was summed so far; returns it.
template <class V>
float raise_maximum(const SoftmaxBlock& block, size_t r, float block_max) {
  const float running = block.max_score[r];
  if (!(block_max > running)) return running;
  const float factor = running == -__builtin_inff() ? 0.0F : exp2_scalar<V>(running - block_max);
  block.max_score[r] = block_max;
  block.sum[r] *= factor;
  float* out = block.out + r * block.out_width;
  for (size_t d = 0; d < block.out_width; d += V::kWidth) {
    V::store(out + d, V::mul(V::load(out + d), V::set(factor)));
  }
  return block_max;
}

// A row that sees all 64 keys: the scores stay in registers.
template <class V>
void softmax_full_row(const SoftmaxBlock& block, size_t r) {
  using Reg = typename V::Reg;
  constexpr size_t kCount = kKeyBlock / V::kWidth;
  float* scores = block.scores + r * kKeyBlock;
  Reg s[kCount];
#pragma GCC unroll 16
  for (size_t i = 0; i < kCount; ++i) s[i] = V::load(scores + i * V::kWidth);
  Reg maximum = s[0];
#pragma GCC unroll 16
  for (size_t i = 1; i < kCount; ++i) maximum = V::max(maximum, s[i]);
  const Reg shift = V::set(raise_maximum<V>(block, r, V::reduce_max(maximum)));
  Reg total = V::set(0.0F);
#pragma GCC unroll 16
  for (size_t i = 0; i < kCount; ++i) {
    s[i] = exp2_nonpositive<V>(V::sub(s[i], shift));
    V::store(scores + i * V::kWidth, s[i]);
    total = V::add(total, s[i]);
  }
  block.sum[r] += V::reduce_add(total);
}

template <class V>
void softmax_partial_row(const SoftmaxBlock& block, size_t r, size_t visible) {
  using Reg = typename V::Reg;
  const Reg hidden = V::set(-__builtin_inff());
  float* scores = block.scores + r * kKeyBlock;
  Reg maximum = hidden;
  for (size_t j = 0; j < visible; j += V::kWidth) {
    maximum = V::max(maximum, V::keep_first(V::load(scores + j), visible - j, hidden));
  }
  const Reg shift = V::set(raise_maximum<V>(block, r, V::reduce_max(maximum)));
  Reg total = V::set(0.0F);
  for (size_t j = 0; j < block.width; j += V::kWidth) {
    Reg p = V::set(0.0F);
    if (j < visible) {
      p = V::keep_first(exp2_nonpositive<V>(V::sub(V::load(scores + j), shift)), visible - j, p);
    }
    V::store(scores + j, p);
    total = V::add(total, p);
  }
  block.sum[r] += V::reduce_add(total);
}

template <class V>
void softmax(const SoftmaxBlock& block) {
  for (size_t r = 0; r < block.num_rows; ++r) {
    const size_t visible = block.num_visible[r];
    if (visible == kKeyBlock) {
      softmax_full_row<V>(block, r);
    } else if (visible > 0) {
      softmax_partial_row<V>(block, r, visible);
    } else {
      float* scores = block.scores + r * kKeyBlock;
      for (size_t j = 0; j < block.width; j += V::kWidth) V::store(scores + j, V::set(0.0F));
    }
  }
}

}  // namespace oscar::attention_simd
