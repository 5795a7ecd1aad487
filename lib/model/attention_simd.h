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

// How one step of a product reads its operands. A step covers kColumns columns of a.
template <class V>
struct FloatOperands {
  using A = float;
  using B = float;
  static constexpr size_t kColumns = 1;
  template <size_t ROWS, size_t VECTORS>
  static void step(const A* a, size_t a_stride, const B* b, typename V::Reg (&sum)[ROWS][VECTORS]) {
    typename V::Reg row[VECTORS];
#pragma GCC unroll 16
    for (size_t v = 0; v < VECTORS; ++v) row[v] = V::load(b + v * V::kWidth);
#pragma GCC unroll 16
    for (size_t r = 0; r < ROWS; ++r) {
      const typename V::Reg factor = V::set(a[r * a_stride]);
#pragma GCC unroll 16
      for (size_t v = 0; v < VECTORS; ++v) sum[r][v] = V::fma(factor, row[v], sum[r][v]);
    }
  }
};

// b in bf16, two rows a step (HighPrecisionPage); expanded in registers, the bits of FloatOperands.
template <class V>
struct ExpandedOperands {
  using A = float;
  using B = uint32_t;
  static constexpr size_t kColumns = 2;
  template <size_t ROWS, size_t VECTORS>
  static void step(const A* a, size_t a_stride, const B* b, typename V::Reg (&sum)[ROWS][VECTORS]) {
    typename V::Reg first[VECTORS], second[VECTORS];
#pragma GCC unroll 16
    for (size_t v = 0; v < VECTORS; ++v) V::expand_pair(b + v * V::kWidth, first[v], second[v]);
#pragma GCC unroll 16
    for (size_t r = 0; r < ROWS; ++r) {
      const typename V::Reg factor = V::set(a[r * a_stride]);
      const typename V::Reg next = V::set(a[r * a_stride + 1]);
#pragma GCC unroll 16
      for (size_t v = 0; v < VECTORS; ++v)
        sum[r][v] = V::fma(next, second[v], V::fma(factor, first[v], sum[r][v]));
    }
  }
};

// Both in bf16 pairs, products summed in float32. V has load_pairs, set_pair and dot.
template <class V>
struct PairOperands {
  using A = uint32_t;
  using B = uint32_t;
  static constexpr size_t kColumns = 1;  // a counts in pairs
  template <size_t ROWS, size_t VECTORS>
  static void step(const A* a, size_t a_stride, const B* b, typename V::Reg (&sum)[ROWS][VECTORS]) {
    typename V::Pairs row[VECTORS];
#pragma GCC unroll 16
    for (size_t v = 0; v < VECTORS; ++v) row[v] = V::load_pairs(b + v * V::kWidth);
#pragma GCC unroll 16
    for (size_t r = 0; r < ROWS; ++r) {
      const typename V::Pairs factor = V::set_pair(a[r * a_stride]);
#pragma GCC unroll 16
      for (size_t v = 0; v < VECTORS; ++v) sum[r][v] = V::dot(factor, row[v], sum[r][v]);
    }
  }
};

// c[m, n] = scale a b, or c + a b (accumulate); `steps` steps of Operands.
template <class Operands>
struct Product {
  size_t m, n, steps;
  const typename Operands::A* a;
  size_t a_stride;
  const typename Operands::B* b;
  size_t b_stride;
  float* c;
  size_t c_stride;
  bool accumulate;
  float scale = 1.0F;
};

// One register tile: ROWS x (VECTORS * V::kWidth) elements of c.
template <class V, class Operands, size_t ROWS, size_t VECTORS>
void gemm_tile(const Product<Operands>& p, size_t row, size_t column) {
  typename V::Reg sum[ROWS][VECTORS];
  float* c = p.c + row * p.c_stride + column;
#pragma GCC unroll 16
  for (size_t r = 0; r < ROWS; ++r) {
#pragma GCC unroll 16
    for (size_t v = 0; v < VECTORS; ++v) {
      sum[r][v] = p.accumulate ? V::load(c + r * p.c_stride + v * V::kWidth) : V::set(0.0F);
    }
  }
  const typename Operands::A* a = p.a + row * p.a_stride;
  const typename Operands::B* b = p.b + column;
  const size_t steps = p.steps, a_stride = p.a_stride, b_stride = p.b_stride;
  for (size_t i = 0; i < steps; ++i) {
    Operands::template step<ROWS, VECTORS>(a, a_stride, b, sum);
    a += Operands::kColumns;
    b += b_stride;
  }
  const bool scaled = !p.accumulate && p.scale != 1.0F;
#pragma GCC unroll 16
  for (size_t r = 0; r < ROWS; ++r) {
#pragma GCC unroll 16
    for (size_t v = 0; v < VECTORS; ++v) {
      V::store(c + r * p.c_stride + v * V::kWidth,
               scaled ? V::mul(sum[r][v], V::set(p.scale)) : sum[r][v]);
    }
  }
}

// Rows from `row` on of one column strip; ROWS = the tallest tile that fits the register file.
template <class V, class Operands, size_t ROWS, size_t VECTORS>
void gemm_strip(const Product<Operands>& p, size_t row, size_t column) {
  for (; row + ROWS <= p.m; row += ROWS) gemm_tile<V, Operands, ROWS, VECTORS>(p, row, column);
  if constexpr (ROWS > 1) {
    if (row < p.m) gemm_strip<V, Operands, (ROWS + 1) / 2, VECTORS>(p, row, column);
  }
}

template <class V, class Operands>
void multiply(const Product<Operands>& p) {
  constexpr size_t kWide = V::kWideVectors * V::kWidth;
  size_t column = 0;
  for (; column + kWide <= p.n; column += kWide)
    gemm_strip<V, Operands, V::kWideRows, V::kWideVectors>(p, 0, column);
  for (; column < p.n; column += kColumnMultiple)
    gemm_strip<V, Operands, V::kNarrowRows, kColumnMultiple / V::kWidth>(p, 0, column);
}

template <class V>
void gemm(size_t m, size_t n, size_t k, const float* a, size_t a_stride, const float* b,
          size_t b_stride, float* c, size_t c_stride, bool accumulate) {
  multiply<V, FloatOperands<V>>({m, n, k, a, a_stride, b, b_stride, c, c_stride, accumulate});
}

template <class V>
void gemm_bf16(size_t m, size_t n, size_t k, const float* a, size_t a_stride, const uint32_t* b,
               size_t b_stride, float* c, size_t c_stride, bool accumulate) {
  multiply<V, ExpandedOperands<V>>(
      {m, n, k / 2, a, a_stride, b, b_stride, c, c_stride, accumulate});
}

template <class V>
void gemm_pairs(size_t m, size_t n, size_t num_pairs, const uint32_t* a, size_t a_stride,
                const uint32_t* b, size_t b_stride, float scale, float* c, size_t c_stride,
                bool accumulate) {
  multiply<V, PairOperands<V>>(
      {m, n, num_pairs, a, a_stride, b, b_stride, c, c_stride, accumulate, scale});
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
