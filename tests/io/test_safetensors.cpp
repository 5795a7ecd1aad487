// safetensors: honest files, every lie in the header, sharded folders.
#include <catch2/catch.hpp>

#include "base/error.h"
#include "io/safetensors.h"
#include "support/paths.h"
#include "support/safetensors_writer.h"

using namespace oscar;
using Catch::Matchers::Contains;
using oscar_test::Bytes;
using oscar_test::safetensors_bytes;
using oscar_test::SafeTensorsWriter;
using oscar_test::TemporaryFolder;
using oscar_test::write_file;

namespace {

SafeTensorsWriter small_file() {
  SafeTensorsWriter writer;
  writer.tensor_f32("a", {2, 3}, {1, 2, 3, 4, 5, 6});
  writer.tensor("empty", "I64", {0, 5}, {});
  writer.tensor("scalar", "BF16", {}, {0x80, 0x3f});
  writer.tensor("flags", "BOOL", {3}, {0, 1, 1});
  return writer;
}

std::string refusal(const Bytes& bytes) {
  const TemporaryFolder folder;
  const std::string path = (folder / "x.safetensors").string();
  write_file(path, bytes);
  try {
    SafeTensors::open_file(path);
  } catch (const Error& error) {
    CHECK_THAT(error.what(), Contains("x.safetensors"));
    return error.what();
  }
  return "";
}
// Header with `count` bytes of data behind it.
std::string header_refusal(const std::string& header, size_t count) {
  return refusal(safetensors_bytes(header, Bytes(count)));
}
std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return cat("\"", name, "\":{\"dtype\":\"", dtype, "\",\"shape\":", shape,
             ",\"data_offsets\":", offsets, "}");
}
// A header of these entries.
std::string object(const std::vector<std::string>& entries) {
  std::string text;
  for (const std::string& one : entries) text += cat(text.empty() ? "" : ",", one);
  return cat("{", text, "}");
}

}  // namespace

TEST_CASE("a safetensors file gives its tensors", "[safetensors]") {
  const TemporaryFolder folder;
  const std::string path = (folder / "x.safetensors").string();
  small_file().write(path);
  const auto file = SafeTensors::open_file(path);
  REQUIRE(file->tensors().size() == 4);
  const SafeTensor* a = file->find("a");
  REQUIRE(a != nullptr);
  CHECK(a->shape == Shape{2, 3});
  std::vector<float> values(6);
  dequantize_row(weight_type(*file, *a), a->bytes, 6, values.data());
  CHECK(values == std::vector<float>{1, 2, 3, 4, 5, 6});
  const SafeTensor* scalar = file->find("scalar");
  REQUIRE(scalar != nullptr);
  CHECK(scalar->shape.empty());
  float one = 0;
  dequantize_row(weight_type(*file, *scalar), scalar->bytes, 1, &one);
  CHECK(one == 1.0F);
  CHECK(file->find("empty")->byte_count == 0);
  CHECK(file->find("nothing") == nullptr);
  REQUIRE(file->metadata().size() == 1);
  CHECK(file->metadata()[0].second == "pt");
  CHECK_THROWS_WITH(weight_type(*file, *file->find("flags")),
                    Contains("flags") && Contains("dtype BOOL"));
}

TEST_CASE("safetensors headers are refused by tensor", "[safetensors]") {
  CHECK(refusal(small_file().bytes()).empty());
  CHECK(header_refusal(object({entry("a", "U8", "[4]", "[0,4]")}), 4).empty());
  CHECK(header_refusal("{}", 0).empty());

  CHECK_THAT(refusal({1, 2, 3}), Contains("header size needs 8 bytes"));
  CHECK_THAT(refusal(Bytes(8, 0xff)), Contains("at most 104857600"));
  CHECK_THAT(refusal({9, 0, 0, 0, 0, 0, 0, 0, '{', '}'}), Contains("truncated: header of 9 bytes"));
  CHECK_THAT(header_refusal("[]", 0), Contains("expected a JSON object"));
  CHECK_THAT(header_refusal("{]", 0), Contains("not valid JSON"));
  CHECK_THAT(header_refusal("{\"a\":1}", 0), Contains("tensor \"a\": expected a JSON object"));

  const auto one = [](const std::string& dtype, const std::string& shape,
                      const std::string& offsets, size_t count = 8) {
    return header_refusal(object({entry("a", dtype, shape, offsets)}), count);
  };
  CHECK_THAT(one("F8_E4M3", "[8]", "[0,8]"), Contains("tensor \"a\": dtype F8_E4M3"));
  CHECK_THAT(one("U8", "[8]", "[8,0]"), Contains("begin 8 is after end 0"));
  CHECK_THAT(one("U8", "[9]", "[0,9]"), Contains("end at 9, the file has 8"));
  CHECK_THAT(one("U8", "[7]", "[0,8]"), Contains("needs 7 bytes, data_offsets give 8"));
  CHECK_THAT(one("F32", "[3]", "[0,8]"), Contains("needs 12 bytes"));
  CHECK_THAT(one("U8", "[8]", "[0,8]", 9), Contains("1 trailing bytes"));
  CHECK_THAT(one("U8", "[7]", "[1,8]"), Contains("hole in the data from 0 to 1"));
  CHECK_THAT(one("U8", "[-1]", "[0,8]"), Contains("shape: expected an integer >= 0"));
  CHECK_THAT(one("U8", "[1.5]", "[0,8]"), Contains("shape: expected an integer >= 0"));
  CHECK_THAT(one("U8", "8", "[0,8]"), Contains("shape: expected an array"));
  CHECK_THAT(one("U8", "[8]", "[0]"), Contains("expected [begin, end]"));
  CHECK_THAT(one("U8", "[8]", "[0,\"8\"]"), Contains("data_offsets: expected an integer"));
  CHECK_THAT(one("U8", "[4294967296,4294967296,4294967296]", "[0,8]"), Contains("overflows"));
  CHECK_THAT(one("F64", "[4611686018427387904]", "[0,8]"), Contains("overflows"));
  CHECK_THAT(one("U8", "[9223372036854775807]", "[0,9223372036854775807]"),
             Contains("the file has 8"));

  CHECK_THAT(header_refusal(
                 object({entry("a", "U8", "[4]", "[0,4]"), entry("b", "U8", "[5]", "[3,8]")}), 8),
             Contains("\"b\" begins at 3 and overlaps"));
  CHECK_THAT(header_refusal(
                 object({entry("a", "U8", "[4]", "[0,4]"), entry("a", "U8", "[4]", "[4,8]")}), 8),
             Contains("duplicate key \"a\""));
  CHECK_THAT(header_refusal("{\"a\":{\"shape\":[],\"data_offsets\":[0,0]}}", 0),
             Contains("dtype is missing"));
  CHECK_THAT(header_refusal(object({entry("a\\nb", "U8", "[0]", "[0,0]")}), 0),
             Contains("\"a?b\": the name contains control characters"));
  CHECK_THAT(header_refusal("{\"__metadata__\":{\"k\":1}}", 0), Contains("expected a string"));
  CHECK_THAT(header_refusal("{\"__metadata__\":[]}", 0), Contains("object of strings"));
}

TEST_CASE("every prefix of a safetensors file is refused", "[safetensors]") {
  const Bytes whole = small_file().bytes();
  size_t accepted = 0;
  for (size_t length = 0; length < whole.size(); ++length) {
    accepted +=
        refusal(Bytes(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(length))).empty();
  }
  CHECK(accepted == 0);
}

TEST_CASE("a sharded folder: the index decides", "[safetensors]") {
  const TemporaryFolder folder;
  const std::string index = (folder / "model.safetensors.index.json").string();
  const auto shard = [&](const std::string& file, const std::vector<std::string>& names,
                         float value) {
    SafeTensorsWriter writer;
    for (const std::string& name : names) writer.tensor_f32(name, {1}, {value});
    writer.write((folder / file).string());
  };
  const auto value = [](const SafeTensors& all, const char* name) {
    float number = 0;
    dequantize_row(WeightType::kF32, all.find(name)->bytes, 1, &number);
    return number;
  };
  shard("s1.safetensors", {"a", "b"}, 1);
  shard("s2.safetensors", {"b", "c"}, 2);
  shard("unlisted.safetensors", {"d"}, 3);
  write_file(index,
             "{\"metadata\":{},\"weight_map\":{\"a\":\"s1.safetensors\",\"b\":\"s2.safetensors\","
             "\"c\":\"s2.safetensors\"}}");
  const auto all = SafeTensors::open_folder(folder.path().string());
  CHECK(all->has_index());
  CHECK(all->files().size() == 2);
  CHECK(all->tensors().size() == 3);
  CHECK(value(*all, "a") == 1);
  CHECK(value(*all, "b") == 2);
  CHECK(all->find("d") == nullptr);

  const auto refusal_of = [&](const std::string& map) {
    write_file(index, cat("{\"weight_map\":", map, "}"));
    try {
      SafeTensors::open_folder(folder.path().string());
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK_THAT(refusal_of("{\"a\":\"s9.safetensors\"}"), Contains("lists s9.safetensors"));
  CHECK_THAT(refusal_of("{\"z\":\"s1.safetensors\"}"),
             Contains("lists tensor \"z\" in s1.safetensors") && Contains("1 missing"));
  for (const char* name : {"../s1.safetensors", "/tmp/x", "a\\\\b", "..", "", "a\\u0000b"}) {
    CHECK_THAT(refusal_of(cat("{\"a\":\"", name, "\"}")), Contains("not a plain file name"));
  }
  CHECK_THAT(refusal_of("{\"a\":1}"), Contains("\"a\": expected a file name"));
  CHECK_THAT(refusal_of("[]"), Contains("weight_map: expected an object"));
  CHECK_THAT(refusal_of("{\"a\":\"s1.safetensors\",\"a\":\"s2.safetensors\"}"),
             Contains("duplicate key"));
}

TEST_CASE("a folder without an index holds model.safetensors", "[safetensors]") {
  const TemporaryFolder folder;
  CHECK_THROWS_WITH(SafeTensors::open_folder(folder.path().string()),
                    Contains("neither model.safetensors nor"));
  small_file().write((folder / "model.safetensors").string());
  CHECK_FALSE(SafeTensors::open_folder(folder.path().string())->has_index());
  CHECK_THROWS_WITH(SafeTensors::open_folder((folder / "none").string()),
                    Contains("expected a folder"));
}
