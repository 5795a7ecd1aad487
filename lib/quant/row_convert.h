// Packed rows taken apart and put together again: codes and pairs of one layout rewritten in
// another (pack order, metadata convention), without touching the codes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quant/codec.h"
#include "quant/int2_format.h"

namespace oscar {

// Codes [head_dim] of one packed row, and the inverse (which leaves the metadata alone). pack_codes
// throws Error on a code that does not fit.
void unpack_codes(const RowFormat& format, const uint8_t* row, uint8_t* codes);
void pack_codes(const RowFormat& format, const uint8_t* codes, uint8_t* row);

// Rewrites rows between two layouts of the same shape (head_dim, group, bits, levels). The pair
// goes through (scale, minimum): minimum = -zero * scale, zero = -minimum / scale, rounded to the
// new type. Source and destination must not overlap.
class RowConverter {
 public:
  // Throws Error naming the option in which the shapes differ, or for groups over tokens.
  RowConverter(const CodecSpec& from, const CodecSpec& to);
  size_t source_bytes() const { return from_.row_bytes(); }
  size_t destination_bytes() const { return to_.row_bytes(); }
  // Rows lie source_bytes() and destination_bytes() apart. Throws Error with the row's number when
  // the new metadata type cannot hold a pair.
  void convert(const uint8_t* source, size_t num_rows, uint8_t* destination) const;

 private:
  CodecSpec from_spec_, to_spec_;
  RowFormat from_{}, to_{};
};

}  // namespace oscar
