#include "quant/record_rows.h"

#include <array>
#include <cstring>

#include "base/error.h"

namespace oscar {
namespace {

constexpr size_t kMaxHeadDim = 256;

CodecSpec spec_of(int head_dim, MetaFormat meta, PackOrder order) {
  OSCAR_CHECK(record_supports(head_dim),
              "record rows: head_dim 64, 96, 128, 192 or 256 expected, got ", head_dim);
  OSCAR_CHECK(meta != MetaFormat::kLog8 && meta != MetaFormat::kSymmetricFp16,
              "record rows: metadata of two 16- or 32-bit values expected");
  CodecSpec spec;
  spec.head_dim = head_dim;
  spec.meta = meta;
  spec.order = order;
  return spec;
}

CodecSpec record_spec(int head_dim) {
  return spec_of(head_dim, MetaFormat::kScaleMinFp16, PackOrder::kConsecutive);
}

RowFormat record_row_format(int head_dim) {
  return {head_dim, head_dim, 2, MetaFormat::kScaleMinFp16, PackOrder::kConsecutive};
}

using RecordRow = std::array<uint8_t, kMaxHeadDim / 4 + 4>;

}  // namespace

RecordRowConverter::RecordRowConverter(int head_dim, MetaFormat meta, PackOrder order)
    : head_dim_(head_dim),
      to_row_(record_spec(head_dim), spec_of(head_dim, meta, order)),
      from_row_(spec_of(head_dim, meta, order), record_spec(head_dim)) {}

void RecordRowConverter::to_row(const uint8_t* record, KvSide side, int token, uint8_t* row) const {
  std::array<uint8_t, kMaxHeadDim> codes{};
  std::array<uint16_t, 2> pair{};
  record_read_row(record, head_dim_, side, token, codes.data(), &pair[0], &pair[1]);
  const RowFormat format = record_row_format(head_dim_);
  RecordRow plain{};
  pack_codes(format, codes.data(), plain.data());
  std::memcpy(plain.data() + format.pair_offset(0), pair.data(), sizeof(pair));
  to_row_.convert(plain.data(), 1, row);
}

void RecordRowConverter::from_row(const uint8_t* row, uint8_t* record, KvSide side,
                                  int token) const {
  const RowFormat format = record_row_format(head_dim_);
  RecordRow plain{};
  from_row_.convert(row, 1, plain.data());
  std::array<uint8_t, kMaxHeadDim> codes{};
  std::array<uint16_t, 2> pair{};
  unpack_codes(format, plain.data(), codes.data());
  std::memcpy(pair.data(), plain.data() + format.pair_offset(0), sizeof(pair));
  record_write_row(record, head_dim_, side, token, codes.data(), pair[0], pair[1]);
}

}  // namespace oscar
