// Engine rows to records and back: the test vectors of the published layouts, and every layout
// through a record.
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "base/float16.h"
#include "base/random.h"
#include "quant/record_rows.h"

using namespace oscar;

namespace {

const std::vector<MetaFormat> kMetas = {MetaFormat::kScaleZeroFp32, MetaFormat::kScaleZeroBf16,
                                        MetaFormat::kScaleZeroFp16, MetaFormat::kScaleMinFp16First};
size_t at(int i) { return static_cast<size_t>(i); }

// A record with random codes and pairs that every metadata format holds exactly: powers of two.
std::vector<uint8_t> random_record(int head_dim, uint64_t seed) {
  Random random(seed);
  std::vector<uint8_t> record(at(record_bytes(head_dim)));
  std::vector<uint8_t> codes(at(head_dim));
  for (const KvSide side : {KvSide::kKey, KvSide::kValue}) {
    for (int token = 0; token < kRecordTokens; ++token) {
      for (uint8_t& code : codes) code = static_cast<uint8_t>(random.below(4));
      const float scale = std::ldexp(1.0F, static_cast<int>(random.below(6)) - 3);
      const float min = -scale * static_cast<float>(1 + random.below(3));
      record_write_row(record.data(), head_dim, side, token, codes.data(), float_to_fp16(scale),
                       float_to_fp16(min));
    }
  }
  return record;
}

}  // namespace

TEST_CASE("record rows: bytes of both pack orders", "[quant]") {
  std::vector<uint8_t> record(at(record_bytes(64)));
  std::vector<uint8_t> codes(64);
  for (size_t d = 0; d < 64; ++d) codes[d] = static_cast<uint8_t>(d / 16);  // 0, 1, 2, 3 by quarter
  record_write_row(record.data(), 64, KvSide::kKey, 5, codes.data(), float_to_fp16(0.5F),
                   float_to_fp16(-0.75F));
  const RecordRowConverter sglang(64, MetaFormat::kScaleZeroFp32, PackOrder::kQuartered);
  const RecordRowConverter vllm(64, MetaFormat::kScaleMinFp16First, PackOrder::kConsecutive);
  REQUIRE(sglang.row_bytes() == 24);
  REQUIRE(vllm.row_bytes() == 20);
  std::vector<uint8_t> row(24);
  sglang.to_row(record.data(), KvSide::kKey, 5, row.data());
  for (size_t i = 0; i < 16; ++i) CHECK(row[i] == 0xE4);
  float pair[2];
  std::memcpy(pair, row.data() + 16, 8);
  CHECK(pair[0] == 0.5F);
  CHECK(pair[1] == 1.5F);
  vllm.to_row(record.data(), KvSide::kKey, 5, row.data());
  for (size_t i = 0; i < 16; ++i) CHECK(row[i] == 0x55 * (i / 4));
  uint16_t half[2];
  std::memcpy(half, row.data() + 16, 4);
  CHECK(half[0] == float_to_fp16(0.5F));
  CHECK(half[1] == float_to_fp16(-0.75F));
}

TEST_CASE("record rows: every layout there and back", "[quant]") {
  for (const int head_dim : {64, 96, 128, 192, 256}) {
    const std::vector<uint8_t> record = random_record(head_dim, static_cast<uint64_t>(head_dim));
    for (const MetaFormat meta : kMetas) {
      for (const PackOrder order : {PackOrder::kQuartered, PackOrder::kConsecutive}) {
        const RecordRowConverter converter(head_dim, meta, order);
        std::vector<uint8_t> back(record.size(), 0xA5), row(converter.row_bytes());
        for (const KvSide side : {KvSide::kKey, KvSide::kValue}) {
          for (int token = 0; token < kRecordTokens; ++token) {
            converter.to_row(record.data(), side, token, row.data());
            converter.from_row(row.data(), back.data(), side, token);
          }
        }
        INFO("D " << head_dim << ", metadata " << static_cast<int>(meta));
        CHECK((back == record));
      }
    }
  }
}

TEST_CASE("record rows: what cannot be held is refused", "[quant]") {
  CHECK_THROWS_AS(RecordRowConverter(80, MetaFormat::kScaleZeroFp32, PackOrder::kQuartered), Error);
  CHECK_THROWS_AS(RecordRowConverter(128, MetaFormat::kLog8, PackOrder::kQuartered), Error);
  const RecordRowConverter converter(64, MetaFormat::kScaleZeroFp32, PackOrder::kQuartered);
  std::vector<uint8_t> row(24), record(at(record_bytes(64)));
  const float pair[2] = {1e9F, 0.0F};  // beyond fp16
  std::memcpy(row.data() + 16, pair, 8);
  CHECK_THROWS_AS(converter.from_row(row.data(), record.data(), KvSide::kKey, 0), Error);
}
