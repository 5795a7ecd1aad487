// Rows of the serving engines' packed layouts (SGLang: quartered, scale and zero; vLLM:
// consecutive, scale and minimum) to and from the records of the CUDA cache: the oracle of
// kernels/repack_int2.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quant/codec.h"
#include "quant/int2_record.h"
#include "quant/row_convert.h"

namespace oscar {

// One row layout: 2 bits, one group a row.
class RecordRowConverter {
 public:
  // meta: a scale and zero format, or kScaleMinFp16 / kScaleMinFp16First. Throws Error on a
  // head_dim that records do not have, or a metadata format of another kind.
  RecordRowConverter(int head_dim, MetaFormat meta, PackOrder order);

  // Bytes of a row: codes, then the metadata pair.
  size_t row_bytes() const { return to_row_.destination_bytes(); }
  size_t code_bytes() const { return static_cast<size_t>(head_dim_) / 4; }
  // One token's row of a record. Throws Error when the row's metadata type cannot hold the pair.
  void to_row(const uint8_t* record, KvSide side, int token, uint8_t* row) const;
  // Inverse; the record's other tokens keep their bits.
  void from_row(const uint8_t* row, uint8_t* record, KvSide side, int token) const;

 private:
  int head_dim_;
  RowConverter to_row_, from_row_;
};

}  // namespace oscar
