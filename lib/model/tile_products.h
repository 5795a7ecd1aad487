// Products of bf16 pairs on tiles of 16 x 16 elements, over any tile unit: AmxTiles (amx_tiles.h),
// or plain loops in the tests. Included only by *_amx.cpp and the tests.
//
// A tile unit `T` has eight registers of 16 rows x 16 words:
//   zero<C>()               all zeros
//   load<R>(words, stride)  row i = the 16 words at words + i * stride
//   store<R>(words, stride) the reverse
//   dot<C, A, B>()          C[i, j] += sum over p of A[i, p] B[p, j], words of A and B being bf16
//                           pairs, C float32: the even and the odd halves are summed apart in the
//                           order of p, from 0, their sums added, then the total to C
// Sums of an element therefore depend on neither the other rows nor the other columns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "model/weight_kernels.h"

namespace oscar {
namespace {

inline constexpr size_t kTile = 16;        // rows, and words of a row
inline constexpr size_t kPanelWidth = 32;  // tokens of a panel, and weight rows: two tiles each

// ---- weights

// c [16 or 32 tokens, 32 rows] = tokens x weights. tokens [steps / 16][32][16], weights
// [steps][32]; steps is a multiple of 16.
template <class T, bool kTwoTiles>
void multiply_tiles(const uint32_t* tokens, const uint32_t* weights, size_t steps, float* c,
                    size_t c_stride) {
  T::template zero<0>();
  T::template zero<1>();
  if constexpr (kTwoTiles) {
    T::template zero<2>();
    T::template zero<3>();
  }
  constexpr size_t kPanelTile = kTile * kPanelWidth;
  for (size_t step = 0; step < steps; step += kTile) {
    T::template load<4>(tokens, kTile);
    T::template load<6>(weights, kPanelWidth);
    T::template dot<0, 4, 6>();
    T::template load<7>(weights + kTile, kPanelWidth);
    T::template dot<1, 4, 7>();
    if constexpr (kTwoTiles) {
      T::template load<5>(tokens + kTile * kTile, kTile);
      T::template dot<2, 5, 6>();
      T::template dot<3, 5, 7>();
    }
    tokens += kPanelTile;
    weights += kPanelTile;
  }
  T::template store<0>(c, c_stride);
  T::template store<1>(c + kTile, c_stride);
  if constexpr (kTwoTiles) {
    T::template store<2>(c + kTile * c_stride, c_stride);
    T::template store<3>(c + kTile * c_stride + kTile, c_stride);
  }
}

// GemmKernels::multiply for panels of 32 tokens and 32 rows.
template <class T>
void multiply_panels(const MultiplyArgs& args) {
  // The outputs are written after about a thousand cycles: fetched now, they are there then.
  for (size_t t = 0; t < args.num_tokens; ++t) {
    for (size_t r = 0; r < args.num_rows; r += kTile)
      __builtin_prefetch(args.out + t * args.out_stride + r, 1);
  }
  const bool two = args.num_tokens > kTile;
  const bool whole = args.num_tokens % kTile == 0 && args.num_rows == kPanelWidth;
  const bool direct = whole && !args.accumulate && args.bias == nullptr;
  alignas(64) float block[kPanelWidth * kPanelWidth];
  float* c = direct ? args.out : block;
  const size_t c_stride = direct ? args.out_stride : kPanelWidth;
  if (two) {
    multiply_tiles<T, true>(args.tokens, args.weights, args.steps, c, c_stride);
  } else {
    multiply_tiles<T, false>(args.tokens, args.weights, args.steps, c, c_stride);
  }
  if (direct) return;
  for (size_t t = 0; t < args.num_tokens; ++t) {
    float* __restrict out = args.out + t * args.out_stride;
    const float* __restrict sums = block + t * kPanelWidth;
    if (args.accumulate) {
      for (size_t r = 0; r < args.num_rows; ++r) out[r] += sums[r];
    } else {
      for (size_t r = 0; r < args.num_rows; ++r) out[r] = sums[r];
    }
    if (args.bias == nullptr) continue;
    for (size_t r = 0; r < args.num_rows; ++r) out[r] += args.bias[r];
  }
}

// ---- attention

// Arguments of PairKernels::gemm.
struct PairProduct {
  size_t m, n, num_pairs;
  const uint32_t* a;
  size_t a_stride;
  const uint32_t* b;
  size_t b_stride;
  float scale;
  float* c;
  size_t c_stride;
  bool accumulate;
};

// Loads [rows, columns] of a matrix, zeros behind.
template <class T, int kRegister>
void load_partial(const uint32_t* words, size_t stride, size_t rows, size_t columns) {
  if (rows == kTile && columns == kTile) {
    T::template load<kRegister>(words, stride);
    return;
  }
  alignas(64) uint32_t padded[kTile * kTile] = {};
  for (size_t i = 0; i < rows; ++i)
    std::memcpy(padded + i * kTile, words + i * stride, columns * sizeof(uint32_t));
  T::template load<kRegister>(padded, kTile);
}

// Columns [16 kColumn, 16 kTiles) of one block of rows: C in registers 0 .. 3, A in 4, B in 5 .. 7.
template <class T, int kTiles, int kColumn = 0>
void dot_columns(const uint32_t* b, size_t b_stride, size_t pairs) {
  if constexpr (kColumn < kTiles) {
    constexpr int kB = 5 + kColumn % 3;
    load_partial<T, kB>(b + kColumn * kTile, b_stride, pairs, kTile);
    T::template dot<kColumn, 4, kB>();
    dot_columns<T, kTiles, kColumn + 1>(b, b_stride, pairs);
  }
}
template <class T, int kTiles, int kColumn = 0>
void start_columns(const float* c, size_t c_stride, bool accumulate) {
  if constexpr (kColumn < kTiles) {
    if (accumulate) {
      T::template load<kColumn>(c + kColumn * kTile, c_stride);
    } else {
      T::template zero<kColumn>();
    }
    start_columns<T, kTiles, kColumn + 1>(c, c_stride, accumulate);
  }
}
template <class T, int kTiles, int kColumn = 0>
void store_columns(float* c, size_t c_stride) {
  if constexpr (kColumn < kTiles) {
    T::template store<kColumn>(c + kColumn * kTile, c_stride);
    store_columns<T, kTiles, kColumn + 1>(c, c_stride);
  }
}

// All rows of kTiles tiles of columns, the first one `column`.
template <class T, int kTiles>
void pair_strip(const PairProduct& p, size_t column) {
  constexpr size_t kWidth = kTiles * kTile;
  for (size_t row = 0; row < p.m; row += kTile) {
    const size_t rows = p.m - row < kTile ? p.m - row : kTile;
    float* const out = p.c + row * p.c_stride + column;
    alignas(64) float block[kTile * kWidth];
    const bool whole = rows == kTile;
    float* const c = whole ? out : block;
    const size_t c_stride = whole ? p.c_stride : kWidth;
    if (!whole && p.accumulate) {
      std::memset(block, 0, sizeof block);
      for (size_t r = 0; r < rows; ++r)
        std::memcpy(block + r * kWidth, out + r * p.c_stride, kWidth * sizeof(float));
    }
    start_columns<T, kTiles>(c, c_stride, p.accumulate);
    for (size_t step = 0; step < p.num_pairs; step += kTile) {
      const size_t pairs = p.num_pairs - step < kTile ? p.num_pairs - step : kTile;
      load_partial<T, 4>(p.a + row * p.a_stride + step, p.a_stride, rows, pairs);
      dot_columns<T, kTiles>(p.b + step * p.b_stride + column, p.b_stride, pairs);
    }
    store_columns<T, kTiles>(c, c_stride);
    const float factor = p.accumulate ? 1.0F : p.scale;
    if (whole && factor == 1.0F) continue;
    for (size_t r = 0; r < rows; ++r) {
      for (size_t j = 0; j < kWidth; ++j) out[r * p.c_stride + j] = c[r * c_stride + j] * factor;
    }
  }
}

template <class T>
void multiply_pairs(const PairProduct& p) {
  size_t column = 0;
  for (; p.n - column >= 4 * kTile; column += 4 * kTile) pair_strip<T, 4>(p, column);
  if (p.n - column >= 2 * kTile) {
    pair_strip<T, 2>(p, column);
    column += 2 * kTile;
  }
  if (column < p.n) pair_strip<T, 1>(p, column);
}

}  // namespace
}  // namespace oscar
