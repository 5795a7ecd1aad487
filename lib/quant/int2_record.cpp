#include "quant/int2_record.h"

#include <array>
#include <cstring>

#include "base/error.h"
#include "base/float16.h"

namespace oscar {
namespace {

void check_arguments(int head_dim, int token) {
  OSCAR_CHECK(record_supports(head_dim),
              "INT2 record: head_dim 64, 96, 128, 192 or 256 expected, got ", head_dim);
  OSCAR_CHECK(token >= 0 && token < kRecordTokens, "INT2 record: token 0..15 expected, got ",
              token);
}

}  // namespace

void record_write_row(uint8_t* record, int head_dim, KvSide side, int token, const uint8_t* codes,
                      uint16_t scale_fp16, uint16_t min_fp16) {
  check_arguments(head_dim, token);
  uint8_t* code_bytes = record + record_code_offset(head_dim, side);
  for (int dim = 0; dim < head_dim; ++dim) {
    OSCAR_CHECK(codes[dim] <= 3, "INT2 record: code 0..3 expected, got ", int{codes[dim]},
                " at dim ", dim);
    const int bit = record_code_bit(head_dim, side, token, dim);
    uint8_t& byte = code_bytes[bit / 8];
    const int shift = bit % 8;
    byte = static_cast<uint8_t>((byte & ~(3 << shift)) | (codes[dim] << shift));
  }
  const std::array<uint16_t, 2> pair = {scale_fp16, min_fp16};
  std::memcpy(record + record_meta_offset(head_dim, side, token), pair.data(), sizeof(pair));
}

void record_read_row(const uint8_t* record, int head_dim, KvSide side, int token, uint8_t* codes,
                     uint16_t* scale_fp16, uint16_t* min_fp16) {
  check_arguments(head_dim, token);
  const uint8_t* code_bytes = record + record_code_offset(head_dim, side);
  for (int dim = 0; dim < head_dim; ++dim) {
    const int bit = record_code_bit(head_dim, side, token, dim);
    codes[dim] = static_cast<uint8_t>((code_bytes[bit / 8] >> (bit % 8)) & 3);
  }
  std::array<uint16_t, 2> pair{};
  std::memcpy(pair.data(), record + record_meta_offset(head_dim, side, token), sizeof(pair));
  if (scale_fp16 != nullptr) *scale_fp16 = pair[0];
  if (min_fp16 != nullptr) *min_fp16 = pair[1];
}

void record_decode_row(const uint8_t* record, int head_dim, KvSide side, int token, float* values) {
  std::array<uint8_t, 256> codes{};
  uint16_t scale = 0, min = 0;
  record_read_row(record, head_dim, side, token, codes.data(), &scale, &min);
  const float scale_value = fp16_to_float(scale), min_value = fp16_to_float(min);
  for (int dim = 0; dim < head_dim; ++dim)
    values[dim] = static_cast<float>(codes[static_cast<size_t>(dim)]) * scale_value + min_value;
}

}  // namespace oscar
