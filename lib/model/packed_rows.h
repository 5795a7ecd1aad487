// Reading packed rows of one head fast: the common layouts through SIMD kernels, all others through
// the codec. Both give the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "model/attention_kernels.h"
#include "quant/codec.h"
#include "quant/int2_format.h"
#include "quant/metadata.h"

namespace oscar {

class PackedRowReader {
 public:
  // The codec must outlive the reader and encode single tokens or blocks of tokens.
  explicit PackedRowReader(const Codec& codec);

  // num_blocks blocks -> [num_blocks * token_block, D], out_stride floats apart.
  void rows(const uint8_t* bytes, size_t num_blocks, float* out, size_t out_stride) const;
  // Whether panel() may be used: kernels exist for the layout.
  bool has_panel() const { return fast_; }
  // num_rows rows -> columns [column, column + num_rows) of panel [D, kKeyBlock].
  void panel(const uint8_t* bytes, size_t num_rows, float* panel, size_t column) const;

 private:
  struct Metadata;
  PackedRows expand(const uint8_t* bytes, size_t num_rows, Metadata& metadata) const;

  const Codec* codec_;
  RowFormat format_{};
  MetaRule rule_;
  bool fast_ = false;
};

}  // namespace oscar
