#include <catch2/catch.hpp>
#include <set>
#include <vector>

#include "base/error.h"
#include "base/float16.h"
#include "base/random.h"
#include "quant/int2_record.h"

using namespace oscar;

namespace {
const std::vector<int> kHeadDims = {64, 96, 128, 192, 256};
const std::vector<KvSide> kSides = {KvSide::kKey, KvSide::kValue};
size_t at(int i) { return static_cast<size_t>(i); }
}  // namespace

TEST_CASE("int2 record: the code positions are distinct and cover every bit") {
  for (const int head_dim : kHeadDims) {
    for (const KvSide side : kSides) {
      std::set<int> bits;
      for (int token = 0; token < kRecordTokens; ++token) {
        for (int dim = 0; dim < head_dim; ++dim) {
          const int bit = record_code_bit(head_dim, side, token, dim);
          REQUIRE(bit % 2 == 0);
          REQUIRE(bit >= 0);
          REQUIRE(bit < 8 * record_code_bytes(head_dim));
          bits.insert(bit);
        }
      }
      CHECK(bits.size() == at(kRecordTokens * head_dim));
      CHECK(bits.size() * 2 == at(8 * record_code_bytes(head_dim)));
    }
  }
}

TEST_CASE("int2 record: the metadata positions are distinct and fill the tail") {
  for (const int head_dim : kHeadDims) {
    std::set<int> offsets;
    for (const KvSide side : kSides) {
      for (int token = 0; token < kRecordTokens; ++token)
        offsets.insert(record_meta_offset(head_dim, side, token));
    }
    CHECK(offsets.size() == 32);
    CHECK(*offsets.begin() == 8 * head_dim);
    CHECK(*offsets.rbegin() == record_bytes(head_dim) - 4);
  }
}

TEST_CASE("int2 record: one AND of a word gives the two codes of a fragment register") {
  // The property the kernels rely on: a lane's item of the tokens 0-7 and 8-15 is found at one
  // position of two sister words (or at +4 of the single last word of D = 96).
  for (const int head_dim : kHeadDims) {
    for (int item = 0; item < head_dim / 8; ++item) {
      const RecordPosition low = record_item_position(head_dim, item, 0);
      const RecordPosition high = record_item_position(head_dim, item, 1);
      if (low.word == high.word) {
        CHECK(head_dim == 96);
        CHECK(high.position == low.position + 4);
      } else {
        CHECK(high.word == low.word + 1);
        CHECK(high.position == low.position);
      }
    }
  }
}

TEST_CASE("int2 record: rows written in any order are read back, neighbours untouched") {
  for (const int head_dim : kHeadDims) {
    std::vector<uint8_t> record(at(record_bytes(head_dim)), 0xA5);
    std::vector<std::vector<uint8_t>> codes(32, std::vector<uint8_t>(at(head_dim)));
    std::vector<uint16_t> scales(32), mins(32);
    Random random(7);
    std::vector<int> order;
    for (int row = 0; row < 32; ++row) order.push_back(row);
    random.shuffle(order);
    for (const int row : order) {
      for (uint8_t& code : codes[at(row)]) code = static_cast<uint8_t>(random.below(4));
      scales[at(row)] = float_to_fp16(static_cast<float>(random.uniform()));
      mins[at(row)] = float_to_fp16(static_cast<float>(random.normal()));
      record_write_row(record.data(), head_dim, kSides[at(row / 16)], row % 16,
                       codes[at(row)].data(), scales[at(row)], mins[at(row)]);
    }
    for (int row = 0; row < 32; ++row) {
      std::vector<uint8_t> read(at(head_dim));
      uint16_t scale = 0, min = 0;
      record_read_row(record.data(), head_dim, kSides[at(row / 16)], row % 16, read.data(), &scale,
                      &min);
      CHECK(read == codes[at(row)]);
      CHECK(scale == scales[at(row)]);
      CHECK(min == mins[at(row)]);
      std::vector<float> values(at(head_dim));
      record_decode_row(record.data(), head_dim, kSides[at(row / 16)], row % 16, values.data());
      CHECK(values[5] == static_cast<float>(read[5]) * fp16_to_float(scale) + fp16_to_float(min));
    }
  }
}

TEST_CASE("int2 record: wrong arguments are refused") {
  std::vector<uint8_t> record(2176);
  std::vector<uint8_t> codes(256, 0);
  CHECK_THROWS_AS(record_write_row(record.data(), 80, KvSide::kKey, 0, codes.data(), 0, 0), Error);
  CHECK_THROWS_AS(record_write_row(record.data(), 128, KvSide::kKey, 16, codes.data(), 0, 0),
                  Error);
  codes[3] = 4;
  CHECK_THROWS_AS(record_write_row(record.data(), 128, KvSide::kKey, 0, codes.data(), 0, 0), Error);
}
