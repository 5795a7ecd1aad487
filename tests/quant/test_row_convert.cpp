// Rows rewritten between layouts: codes stay, values stay within the new metadata's rounding.
#include <cmath>

#include "base/error.h"
#include "codec_helpers.h"
#include "quant/row_convert.h"
#include "support/compare.h"

using oscar::CodecSpec;
using oscar::MetaFormat;
using oscar::PackOrder;
using oscar::RowConverter;

namespace {

CodecSpec layout(MetaFormat meta, PackOrder order, int group = 0) {
  CodecSpec spec;
  spec.head_dim = 96;
  spec.group = group;
  spec.meta = meta;
  spec.order = order;
  spec.log8_scale_max = 8.0F;
  return spec;
}

std::vector<float> decode(const CodecSpec& spec, const std::vector<uint8_t>& bytes) {
  const auto codec = oscar::make_codec(spec);
  const size_t rows = bytes.size() / codec->bytes_per_block();
  std::vector<float> values(rows * 96);
  codec->decode(bytes.data(), rows, values.data(), 96);
  return values;
}

std::vector<uint8_t> convert(const CodecSpec& from, const CodecSpec& to,
                             const std::vector<uint8_t>& bytes) {
  const RowConverter converter(from, to);
  const size_t rows = bytes.size() / converter.source_bytes();
  std::vector<uint8_t> out(rows * converter.destination_bytes());
  converter.convert(bytes.data(), rows, out.data());
  return out;
}

}  // namespace

TEST_CASE("row conversion: every layout to every other and back", "[quant]") {
  const std::vector<float> rows = oscar_test::normal_rows(1, 17, 96, 1.0);
  const MetaFormat metas[] = {MetaFormat::kScaleZeroFp32,     MetaFormat::kScaleZeroBf16,
                              MetaFormat::kScaleZeroFp16,     MetaFormat::kScaleMinFp16,
                              MetaFormat::kScaleMinFp16First, MetaFormat::kLog8};
  for (const int group : {0, 32})
    for (const MetaFormat from_meta : metas)
      for (const MetaFormat to_meta : metas) {
        INFO("group " << group << " from " << static_cast<int>(from_meta) << " to "
                      << static_cast<int>(to_meta));
        const CodecSpec from = layout(from_meta, PackOrder::kConsecutive, group);
        const CodecSpec to = layout(to_meta, PackOrder::kQuartered, group);
        const auto packed = oscar_test::round_trip(from, rows);
        const auto there = convert(from, to, packed.bytes);
        // A value is at most about 4 steps and two roundings away from the original.
        const double tolerance = to_meta == MetaFormat::kLog8            ? 0.15
                                 : to_meta == MetaFormat::kScaleZeroBf16 ? 16 * 0x1p-8
                                                                         : 16 * 0x1p-11;
        CHECK_CLOSE(decode(to, there).data(), packed.values.data(), rows.size(),
                    {.absolute = tolerance});
        // fp32 holds every other pair closely enough to come back to the same bytes.
        if (to_meta == MetaFormat::kScaleZeroFp32 && from_meta != MetaFormat::kLog8)
          CHECK(convert(to, from, there) == packed.bytes);
      }
}

TEST_CASE("row conversion: the same metadata keep their bytes", "[quant]") {
  for (const MetaFormat meta : {MetaFormat::kSymmetricFp16, MetaFormat::kLog8}) {
    const CodecSpec from = layout(meta, PackOrder::kConsecutive, 32);
    const CodecSpec to = layout(meta, PackOrder::kQuartered, 32);
    std::vector<float> rows = oscar_test::normal_rows(4, 5, 96);
    for (size_t d = 0; d < 96; ++d) rows[d] = 0.0F;
    const auto packed = oscar_test::round_trip(from, rows);
    const auto there = convert(from, to, packed.bytes);
    CHECK(decode(to, there) == packed.values);
    CHECK(convert(to, from, there) == packed.bytes);
  }
}

TEST_CASE("row conversion: codes in and out of both orders", "[quant]") {
  for (const int bits : {2, 4, 8})
    for (const PackOrder order : {PackOrder::kConsecutive, PackOrder::kQuartered}) {
      const oscar::RowFormat format{64, 64, bits, MetaFormat::kScaleMinFp16, order};
      std::vector<uint8_t> codes(64), again(64), row(format.row_bytes(), 0xcd);
      for (size_t d = 0; d < 64; ++d)
        codes[d] = static_cast<uint8_t>((d * 7 + 3) % static_cast<size_t>(1 << bits));
      oscar::pack_codes(format, codes.data(), row.data());
      oscar::unpack_codes(format, row.data(), again.data());
      CHECK(again == codes);
      for (size_t i = format.code_bytes(); i < row.size(); ++i) CHECK(row[i] == 0xcd);
      if (bits == 8) continue;
      codes[5] = static_cast<uint8_t>(1 << bits);
      CHECK_THROWS_WITH(oscar::pack_codes(format, codes.data(), row.data()),
                        Catch::Contains("dim 5"));
    }
}

TEST_CASE("row conversion: a vLLM slot from our rows", "[quant]") {
  const oscar::VllmSlotFormat slot{96, 96, 1};
  CHECK(slot.slot_bytes() == 56);
  CHECK(slot.v_offset() == 28);
  // Ours and vLLM's rows have the same bytes: only how the codes are chosen differs.
  const CodecSpec ours = layout(MetaFormat::kScaleMinFp16, PackOrder::kConsecutive);
  const CodecSpec vllm = layout(MetaFormat::kScaleMinFp16First, PackOrder::kConsecutive);
  const auto packed = oscar_test::round_trip(ours, oscar_test::normal_rows(2, 3, 96));
  CHECK(convert(ours, vllm, packed.bytes) == packed.bytes);
}

TEST_CASE("row conversion: refusals", "[quant]") {
  const CodecSpec spec = layout(MetaFormat::kScaleZeroFp32, PackOrder::kConsecutive);
  CodecSpec other = spec;
  other.head_dim = 64;
  CHECK_THROWS_WITH(RowConverter(spec, other), Catch::Contains("head_dim"));
  other = spec;
  other.bits = 4;
  CHECK_THROWS_WITH(RowConverter(spec, other), Catch::Contains("bits"));
  other = spec;
  other.group = 32;
  CHECK_THROWS_WITH(RowConverter(spec, other), Catch::Contains("group"));
  other = spec;
  other.levels = oscar::Levels::kLloydExact;
  CHECK_THROWS_WITH(RowConverter(spec, other), Catch::Contains("levels"));
  CHECK_THROWS_WITH(RowConverter(spec, layout(MetaFormat::kSymmetricFp16, PackOrder::kConsecutive)),
                    Catch::Contains("symmetric"));
  std::vector<float> rows = oscar_test::normal_rows(3, 2, 96);
  for (size_t d = 96; d < 192; ++d) rows[d] *= 1e6F;
  const auto packed = oscar_test::round_trip(spec, rows);
  CHECK_THROWS_WITH(
      convert(spec, layout(MetaFormat::kScaleMinFp16, PackOrder::kConsecutive), packed.bytes),
      Catch::Contains("row 1"));
}
