// Dequantization of packed 2-bit rows as templates over a vector type (see attention_simd.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "model/attention_kernels.h"

namespace oscar::attention_simd {

// 16 codes of a row lie in 4 bytes.
inline constexpr size_t kWordCodes = 16;

template <class V>
typename V::Reg packed_value(typename V::Reg code, typename V::Reg scale, typename V::Reg second,
                             bool has_zero) {
  return has_zero ? V::mul(V::sub(code, second), scale) : V::add(V::mul(code, scale), second);
}

template <class V>
void dequantize_rows(const PackedRows& rows, float* out, size_t out_stride) {
  for (size_t r = 0; r < rows.num_rows; ++r) {
    const uint8_t* codes = rows.bytes + r * rows.row_bytes;
    for (size_t begin = 0; begin < rows.head_dim; begin += rows.group) {
      const size_t meta = begin / rows.group * kKeyBlock + r;
      const typename V::Reg scale = V::set(rows.scale[meta]);
      const typename V::Reg second = V::set(rows.second[meta]);
      for (size_t d = begin; d < begin + rows.group; d += V::kWidth) {
        V::store(out + r * out_stride + d,
                 packed_value<V>(V::row_codes(codes + d / 4), scale, second, rows.has_zero));
      }
    }
  }
}

// Lanes are rows: the words of kWidth rows are gathered and shifted out two bits at a time.
template <class V>
void dequantize_panel(const PackedRows& rows, float* panel, size_t column) {
  for (size_t r = 0; r < rows.num_rows; r += V::kWidth) {
    const size_t count = rows.num_rows - r < V::kWidth ? rows.num_rows - r : V::kWidth;
    const uint8_t* codes = rows.bytes + r * rows.row_bytes;
    for (size_t d = 0; d < rows.head_dim; d += kWordCodes) {
      const size_t meta = d / rows.group * kKeyBlock + r;
      const typename V::Reg scale = V::load(rows.scale + meta);
      const typename V::Reg second = V::load(rows.second + meta);
      typename V::Int words = V::gather(codes + d / 4, rows.row_bytes, count);
      float* out = panel + d * kKeyBlock + column + r;
      for (size_t i = 0; i < kWordCodes; ++i) {
        V::store_first(out + i * kKeyBlock, count,
                       packed_value<V>(V::low_codes(words), scale, second, rows.has_zero));
        words = V::next_codes(words);
      }
    }
  }
}

template <class V>
void expand_half_pairs(const uint8_t* pairs, size_t row_bytes, size_t num_rows, float* first,
                       float* second) {
  for (size_t r = 0; r < num_rows; r += V::kWidth) {
    const size_t count = num_rows - r < V::kWidth ? num_rows - r : V::kWidth;
    const typename V::Int words = V::gather(pairs + r * row_bytes, row_bytes, count);
    V::store(first + r, V::low_halves(words));
    V::store(second + r, V::high_halves(words));
  }
}

}  // namespace oscar::attention_simd
