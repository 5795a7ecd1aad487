// Interface between weight_matmul.cpp and its kernels compiled for one instruction set each
// (weight_kernels_<set>.cpp): plain pointers only, so that no shared inline code is compiled for a
// newer CPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "io/weight_types.h"

namespace oscar {

// Rows of a stored matrix: row r starts at bytes + r * row_bytes.
struct StoredRows {
  WeightType type;
  const uint8_t* bytes;
  size_t row_bytes;
  size_t columns;
};

// y[t, r] = sum_c x[t, c] w[r, c] + bias[r] for rows [row_begin, row_end).
struct GemvArgs {
  StoredRows weight;
  size_t row_begin, row_end;
  const float* x;  // [tokens, weight.columns]
  size_t tokens;
  const float* bias;  // [all rows of the matrix], may be null
  bool accumulate;    // add to out instead of overwriting it
  float* out;         // [tokens, out_stride]
  size_t out_stride;
};

// Columns are cut into steps (one float32 column, or a pair of bf16 columns) and steps into blocks
// of kBlockSteps: so many that the tokens' panel stays in the first-level cache and the weights'
// panels in the second. Columns are padded with zeros to a multiple of kColumnUnit.
inline constexpr size_t kColumnUnit = 32;
inline constexpr size_t kBlockSteps = 384;

struct PackTokensArgs {
  const float* x;  // [tokens, x_stride]
  size_t x_stride;
  size_t tokens;    // <= token_width; missing ones become zeros
  size_t columns;   // unpadded
  uint32_t* panel;  // [blocks of steps] panels as MultiplyArgs::tokens
};

struct PackWeightsArgs {
  StoredRows weight;
  size_t row_begin, row_end;      // at most row_width rows; missing ones become zeros
  size_t unit_begin, unit_count;  // column range in units of kColumnUnit
  uint32_t* panel;                // [steps][row_width]
};

struct MultiplyArgs {
  const uint32_t* weights;  // [steps][row_width]
  const uint32_t* tokens;   // [token_width][kBlockSteps]; tiles: [steps / 16][token_width][16]
  size_t steps;
  size_t num_tokens, num_rows;  // valid ones in the two panels
  bool accumulate;              // add to out instead of overwriting it
  const float* bias;            // [num_rows], may be null
  float* out;                   // [num_tokens, out_stride]
  size_t out_stride;
};

// Blocked product of one element type on one instruction set. The sum over columns of an output
// element runs in an order that depends on the number of columns alone.
struct GemmKernels {
  size_t token_width;       // tokens of a panel
  size_t row_width;         // weight rows of a panel
  size_t columns_per_step;  // 1: float32, 2: bf16 pairs
  void (*pack_tokens)(const PackTokensArgs&);
  void (*pack_weights)(const PackWeightsArgs&);
  void (*multiply)(const MultiplyArgs&);
  // Called by a thread before and after its calls of multiply; may be null.
  void (*start)();
  void (*stop)();
};

struct WeightKernels {
  void (*gemv)(const GemvArgs&);
  GemmKernels gemm;
};

const WeightKernels& weight_kernels_avx2();
const WeightKernels& weight_kernels_avx512();
const WeightKernels& weight_kernels_avx512bf16();  // gemm rounds both operands to bf16
const WeightKernels& weight_kernels_amx();         // the same on tiles

}  // namespace oscar
