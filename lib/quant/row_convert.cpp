#include "quant/row_convert.h"

#include <cstring>
#include <vector>

#include "base/error.h"
#include "quant/metadata.h"

namespace oscar {
namespace {

RowFormat format_of(const CodecSpec& spec) {
  return {spec.head_dim, spec.group == 0 ? spec.head_dim : spec.group, spec.bits, spec.meta,
          spec.order};
}

}  // namespace

void unpack_codes(const RowFormat& format, const uint8_t* row, uint8_t* codes) {
  for (int d = 0; d < format.head_dim; ++d)
    codes[d] = static_cast<uint8_t>((row[format.code_byte(d)] >> format.code_shift(d)) &
                                    format.max_code());
}

void pack_codes(const RowFormat& format, const uint8_t* codes, uint8_t* row) {
  std::memset(row, 0, format.code_bytes());
  for (int d = 0; d < format.head_dim; ++d) {
    OSCAR_CHECK(codes[d] <= format.max_code(), "packed row: code at dim ", d, " must be at most ",
                format.max_code(), ", got ", int{codes[d]});
    uint8_t& byte = row[format.code_byte(d)];
    byte = static_cast<uint8_t>(byte | (codes[d] << format.code_shift(d)));
  }
}

RowConverter::RowConverter(const CodecSpec& from, const CodecSpec& to)
    : from_spec_(from), to_spec_(to), from_(format_of(from)), to_(format_of(to)) {
  check(from);
  check(to);
  OSCAR_CHECK(from.axis == GroupAxis::kChannels && to.axis == GroupAxis::kChannels,
              "row conversion: groups over tokens have no rows of their own");
  OSCAR_CHECK(from_.head_dim == to_.head_dim, "row conversion: head_dim ", from_.head_dim, " to ",
              to_.head_dim);
  OSCAR_CHECK(from_.group == to_.group, "row conversion: group ", from_.group, " to ", to_.group);
  OSCAR_CHECK(from_.bits == to_.bits, "row conversion: bits ", from_.bits, " to ", to_.bits);
  OSCAR_CHECK((from.meta == MetaFormat::kSymmetricFp16) == (to.meta == MetaFormat::kSymmetricFp16),
              "row conversion: symmetric metadata have no minimum and convert only to themselves");
  // kLloydMax stores a uniform grid; the other two decode by tables of their own.
  const auto grid = [](Levels levels) {
    return levels == Levels::kLloydMax ? Levels::kUniform : levels;
  };
  OSCAR_CHECK(grid(from.levels) == grid(to.levels),
              "row conversion: the levels of the two layouts differ");
}

void RowConverter::convert(const uint8_t* source, size_t num_rows, uint8_t* destination) const {
  const MetaRule from_rule = make_meta_rule(from_spec_), to_rule = make_meta_rule(to_spec_);
  std::vector<uint8_t> codes(static_cast<size_t>(from_.head_dim));
  for (size_t row = 0; row < num_rows; ++row) {
    const uint8_t* in = source + row * from_.row_bytes();
    uint8_t* out = destination + row * to_.row_bytes();
    unpack_codes(from_, in, codes.data());
    pack_codes(to_, codes.data(), out);
    for (int g = 0; g < from_.num_groups(); ++g) {
      if (from_.meta == to_.meta) {
        std::memcpy(out + to_.pair_offset(g), in + from_.pair_offset(g), to_.pair_bytes());
        continue;
      }
      const StoredPair pair = read_pair(from_rule, in + from_.pair_offset(g));
      const StoredPair rounded =
          from_rule.has_zero == to_rule.has_zero && to_rule.format != MetaFormat::kLog8
              ? round_values(to_rule, pair.scale, pair.second)
              : round_pair(to_rule, pair.scale, low_of(from_rule, pair), false);
      OSCAR_CHECK(usable(rounded), "row conversion: row ", row, " (scale ", pair.scale,
                  ", minimum ", low_of(from_rule, pair), ") does not fit the ", meta_bits(to_.meta),
                  "-bit metadata");
      write_pair(to_rule, rounded, out + to_.pair_offset(g));
    }
  }
}

}  // namespace oscar
