// The inner loops of CPU attention as a table of functions per instruction set: small matrix
// product, online softmax of one key block, layout conversions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace oscar {

inline constexpr size_t kKeyBlock = 64;  // keys of one softmax step = tokens of one cache page

// Widths handed to the kernels are multiples of this (rows are padded with zeros).
inline constexpr size_t kColumnMultiple = 16;
inline size_t padded_width(size_t width) {
  return (width + kColumnMultiple - 1) / kColumnMultiple * kColumnMultiple;
}

// Pairs of a product in bf16 are counted in whole multiples of this (zeros behind the last).
inline constexpr size_t kPairMultiple = 8;

// Online softmax of `num_rows` query rows over one block of keys, in base 2.
struct SoftmaxBlock {
  size_t num_rows = 0;
  size_t width = 0;  // columns of `scores` in use, a multiple of kColumnMultiple, <= kKeyBlock
  float* scores = nullptr;  // [num_rows, kKeyBlock] scores * log2(e); replaced by the weights
                            // 2^(score - max), 0 for keys that are not visible
  const uint32_t* num_visible = nullptr;  // [num_rows] keys 0 .. num_visible - 1 of the block
  float* max_score = nullptr;             // [num_rows] running maximum, -inf before the first block
  float* sum = nullptr;                   // [num_rows] running sum of weights
  float* out = nullptr;  // [num_rows, out_width] running weighted values, rescaled when max moves
  size_t out_width = 0;  // a multiple of kColumnMultiple
};

// Packed 2-bit rows of one head in consecutive order (quant/int2_format.h), their metadata already
// expanded: value = has_zero ? (code - second) * scale : code * scale + second.
struct PackedRows {
  const uint8_t* bytes = nullptr;
  size_t row_bytes = 0;
  size_t num_rows = 0;            // <= kKeyBlock
  size_t head_dim = 0;            // a multiple of 16
  size_t group = 0;               // a multiple of 16
  const float* scale = nullptr;   // [head_dim / group, kKeyBlock]
  const float* second = nullptr;  // [head_dim / group, kKeyBlock]
  bool has_zero = false;
};

struct AttentionKernels {
  // c[m, n] = (accumulate ? c : 0) + a[m, k] b[k, n]; n a multiple of kColumnMultiple. Each element
  // is summed in the order of k whatever m is, so a row's bits do not depend on its neighbours.
  void (*gemm)(size_t m, size_t n, size_t k, const float* a, size_t a_stride, const float* b,
               size_t b_stride, float* c, size_t c_stride, bool accumulate);
  void (*softmax)(const SoftmaxBlock& block);
  // The bits of gemm after expanding b. b holds bf16 rows in pairs [k / 2, n]: the low half of an
  // element is row 2 i, the high half row 2 i + 1 (HighPrecisionPage). k even.
  void (*gemm_bf16)(size_t m, size_t n, size_t k, const float* a, size_t a_stride,
                    const uint32_t* b, size_t b_stride, float* c, size_t c_stride, bool accumulate);
  // rows [kKeyBlock, width] (row_stride floats apart, only the first num_rows are read, the others
  // count as zero) -> panel [width, kKeyBlock].
  void (*transpose)(const float* rows, size_t row_stride, size_t num_rows, size_t width,
                    float* panel);
  // The three below are null where the codec's own decoder has to do.
  // Rows -> out [num_rows, head_dim], out_stride floats apart. Not fused: the bits of
  // Codec::decode.
  void (*dequantize_rows)(const PackedRows& rows, float* out, size_t out_stride);
  // Rows -> columns [column, column + num_rows) of panel [head_dim, kKeyBlock].
  void (*dequantize_panel)(const PackedRows& rows, float* panel, size_t column);
  // num_rows (<= kKeyBlock) pairs of IEEE halves, row_bytes apart -> first, second [kKeyBlock].
  void (*expand_half_pairs)(const uint8_t* pairs, size_t row_bytes, size_t num_rows, float* first,
                            float* second);
};

extern const AttentionKernels kAttentionGeneric;
extern const AttentionKernels kAttentionAvx2;    // AVX2, FMA
extern const AttentionKernels kAttentionAvx512;  // AVX-512 F, BW, VL, DQ

// The best table for this processor (cpu_features()).
const AttentionKernels& attention_kernels();

// Products of two bf16 operands.
struct PairKernels {
  // c[m, n] = scale a b, or c + a b when accumulating (scale not used): a in pairs of columns
  // [m, num_pairs], b in pairs of rows [num_pairs, n], sums in float32. n a multiple of
  // kColumnMultiple, num_pairs of kPairMultiple. Rows do not depend on each other, as in gemm.
  void (*gemm)(size_t m, size_t n, size_t num_pairs, const uint32_t* a, size_t a_stride,
               const uint32_t* b, size_t b_stride, float scale, float* c, size_t c_stride,
               bool accumulate);
  // rows [m, width] (row_stride floats apart) rounded to bf16 -> out [m, width / 2] pairs,
  // out_stride apart. width a multiple of kColumnMultiple.
  void (*round)(size_t m, size_t width, const float* rows, size_t row_stride, uint32_t* out,
                size_t out_stride);
  // Called by a thread around many calls of gemm to save time; may be null.
  void (*start)();
  void (*stop)();
};

extern const PairKernels kPairsAvx512Bf16;
extern const PairKernels kPairsAmx;

// Null where the processor has no bf16 products.
const PairKernels* pair_kernels();

}  // namespace oscar
