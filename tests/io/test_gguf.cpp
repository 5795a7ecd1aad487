// The GGUF reader: values of every type, tensors, split files, refusals, and the real demo model.
#include <catch2/catch.hpp>

#include "base/error.h"
#include "io/gguf.h"
#include "support/gguf_writer.h"
#include "support/paths.h"

using namespace oscar;
using Catch::Matchers::Contains;
using oscar_test::append;
using oscar_test::append_string;
using oscar_test::append_value;
using oscar_test::Bytes;
using oscar_test::GgufWriter;
using oscar_test::TemporaryFolder;

namespace {

const std::vector<float> kEight = {1, 2, 3, 4, 5, 6, 7, 8};

GgufWriter small_file() {
  GgufWriter writer;
  writer.string("general.architecture", "llama");
  writer.u32("llama.block_count", 2);
  writer.f32("llama.eps", 0.25F);
  writer.boolean("flag", true);
  writer.u64("big", 1ULL << 40);
  writer.strings("tokens", {"a", "", "long token"});
  writer.i32s("kinds", {1, -2, 3});
  writer.tensor_f32("token_embd.weight", {4, 2}, kEight);
  writer.tensor_f32("norm.weight", {4}, {1, 1, 1, 1});
  return writer;
}

// Writes and opens; the message of the refusal, or "" when it was accepted.
std::string refusal(const Bytes& bytes) {
  const TemporaryFolder folder;
  const std::string path = (folder / "x.gguf").string();
  oscar_test::write_file(path, bytes);
  try {
    GgufFile::open(path);
  } catch (const Error& error) {
    CHECK_THAT(error.what(), Contains("x.gguf"));
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("a GGUF file gives its keys and tensors", "[gguf]") {
  const TemporaryFolder folder;
  const std::string path = (folder / "small.gguf").string();
  for (const uint32_t version : {2U, 3U}) {
    GgufWriter writer = small_file();
    writer.version = version;
    writer.write(path);
    const auto file = GgufFile::open(path);
    CHECK(file->version() == version);
    CHECK(file->string("general.architecture") == "llama");
    CHECK(file->integer("llama.block_count") == 2);
    CHECK(file->integer("absent", -7) == -7);
    CHECK(file->number("llama.eps") == 0.25);
    CHECK(file->number("llama.block_count") == 2.0);
    CHECK(file->boolean("flag", false));
    CHECK_FALSE(file->boolean("absent", false));
    CHECK(file->integer("big") == int64_t{1} << 40);
    CHECK(file->strings("tokens") == std::vector<std::string_view>{"a", "", "long token"});
    CHECK(file->integers("kinds") == std::vector<int64_t>{1, -2, 3});
    REQUIRE(file->tensors().size() == 2);
    const GgufTensor* tensor = file->find_tensor("token_embd.weight");
    REQUIRE(tensor != nullptr);
    CHECK(tensor->shape() == Shape{2, 4});
    CHECK(tensor->byte_count == 32);
    CHECK(weight_type(*file, *tensor) == WeightType::kF32);
    std::vector<float> values(8);
    dequantize_row(WeightType::kF32, tensor->bytes, 8, values.data());
    CHECK(values == kEight);
    CHECK(file->find_tensor("nothing") == nullptr);
  }
}

TEST_CASE("values of every scalar and array type are read and described", "[gguf]") {
  GgufWriter writer;
  const auto one = [&](const std::string& name, uint32_t type, auto number) {
    Bytes value, array;
    append_value(value, number);
    writer.raw(name, type, value);
    append_value(array, type);
    append_value<uint64_t>(array, 4);
    for (int i = 0; i < 4; ++i) append_value(array, number);
    writer.raw(name + "s", 9, array);
  };
  one("u8", 0, uint8_t{200});
  one("i8", 1, int8_t{-3});
  one("u16", 2, uint16_t{60000});
  one("i16", 3, int16_t{-300});
  one("u32", 4, uint32_t{4000000000U});
  one("i32", 5, int32_t{-70000});
  one("u64", 10, uint64_t{1} << 33);
  one("i64", 11, -(int64_t{1} << 33));
  one("f32", 6, 1.5F);
  one("f64", 12, -2.25);
  writer.string("text", "line\nbreak \x01");
  writer.boolean("yes", true);
  writer.u64("huge", ~0ULL);
  const TemporaryFolder folder;
  writer.write((folder / "x.gguf").string());
  const auto file = GgufFile::open((folder / "x.gguf").string());

  const std::vector<std::pair<const char*, int64_t>> integers = {{"u8", 200},
                                                                 {"i8", -3},
                                                                 {"u16", 60000},
                                                                 {"i16", -300},
                                                                 {"u32", 4000000000},
                                                                 {"i32", -70000},
                                                                 {"u64", int64_t{1} << 33},
                                                                 {"i64", -(int64_t{1} << 33)}};
  for (const auto& [name, expected] : integers) {
    CHECK(file->integer(name) == expected);
    CHECK(file->integers(std::string(name) + "s") == std::vector<int64_t>(4, expected));
    CHECK(describe(*file->find(name)) == std::to_string(expected));
  }
  CHECK(file->number("f32") == 1.5);
  CHECK(file->numbers("f64s") == std::vector<double>(4, -2.25));
  CHECK(file->numbers("u8s") == std::vector<double>(4, 200));
  CHECK(describe(*file->find("text")) == "\"line\\nbreak ?\"");
  CHECK(describe(*file->find("yes")) == "true");
  CHECK(describe(*file->find("i16s")) == "[4 x i16: -300, -300, -300, ...]");
  CHECK(describe(*file->find("f64")) == "-2.25");

  CHECK_THROWS_WITH(file->integer("f32"), Contains("f32") && Contains("expected an integer"));
  CHECK_THROWS_WITH(file->integer("u8s"), Contains("array of u8"));
  CHECK_THROWS_WITH(file->number("text"), Contains("expected a number, got string"));
  CHECK_THROWS_WITH(file->string("u8"), Contains("expected string, got u8"));
  CHECK_THROWS_WITH(file->strings("u8s"), Contains("expected array of string"));
  CHECK_THROWS_WITH(file->integers("u8"), Contains("expected array of integers"));
  CHECK_THROWS_WITH(file->boolean("u8", false), Contains("expected bool"));
  CHECK_THROWS_WITH(file->integer("huge"), Contains("does not fit"));
  CHECK_THROWS_WITH(file->integer("absent"), Contains("key absent is missing"));
}

TEST_CASE("hostile GGUF headers are refused by name", "[gguf]") {
  CHECK(refusal(small_file().bytes()).empty());
  CHECK_THAT(refusal({}), Contains("zero bytes"));
  CHECK_THAT(refusal({'G', 'G', 'M', 'L', 0, 0, 0, 0}), Contains("not a GGUF file"));

  GgufWriter writer = small_file();
  writer.version = 1;
  CHECK_THAT(refusal(writer.bytes()), Contains("version 1, expected 2 or 3"));
  writer.version = __builtin_bswap32(3);
  CHECK_THAT(refusal(writer.bytes()), Contains("big-endian"));

  Bytes counts = small_file().bytes();
  for (const size_t offset : {size_t{8}, size_t{16}}) {
    for (const uint64_t lie : {1ULL << 20, ~0ULL}) {
      Bytes bytes = counts;
      std::memcpy(bytes.data() + offset, &lie, 8);
      CHECK_THAT(refusal(bytes), Contains("truncated"));
    }
  }

  const auto with = [](auto&& change) {
    GgufWriter w = small_file();
    change(w);
    return refusal(w.bytes());
  };
  CHECK_THAT(with([](GgufWriter& w) { w.u32("llama.block_count", 3); }),
             Contains("duplicate key \"llama.block_count\""));
  CHECK_THAT(with([](GgufWriter& w) {
               w.tensor_f32("norm.weight", {4}, {1, 1, 1, 1});
             }),
             Contains("duplicate tensor name \"norm.weight\""));
  CHECK_THAT(with([](GgufWriter& w) { w.u32("general.alignment", 24); }),
             Contains("power of two, got 24"));
  CHECK_THAT(with([](GgufWriter& w) { w.u32("general.alignment", 0); }), Contains("power of two"));
  CHECK_THAT(with([](GgufWriter& w) { w.u64("general.alignment", 32); }), Contains("expected u32"));
  CHECK_THAT(with([](GgufWriter& w) { w.u32("general.alignment", 1U << 31); }),
             Contains("truncated: tensor data starts at"));
  CHECK_THAT(with([](GgufWriter& w) { w.raw("odd", 13, {0}); }), Contains("unknown type 13"));
  CHECK_THAT(with([](GgufWriter& w) {
               Bytes nested;
               append_value<uint32_t>(nested, 9);
               append_value<uint64_t>(nested, 0);
               w.raw("nested", 9, nested);
             }),
             Contains("nested arrays"));
  for (const uint32_t element : {0U, 8U, 12U}) {
    CHECK_THAT(with([element](GgufWriter& w) {
                 Bytes array;
                 append_value<uint32_t>(array, element);
                 append_value<uint64_t>(array, 1ULL << 61);
                 w.raw("huge", 9, array);
               }),
               Contains("truncated") && Contains("\"huge\""));
  }
  CHECK_THAT(with([](GgufWriter& w) {
               Bytes text;
               append_value<uint64_t>(text, ~0ULL - 3);
               w.raw("text", 8, text);
             }),
             Contains("truncated"));
}

TEST_CASE("hostile GGUF tensors are refused by name", "[gguf]") {
  const auto with = [](const char* name, std::vector<uint64_t> ne, uint32_t type, uint64_t offset) {
    GgufWriter w = small_file();
    w.tensor_at(name, ne, type, offset);
    return refusal(w.bytes());
  };
  CHECK_THAT(with("t", {4}, 0, 1ULL << 40), Contains("tensor \"t\" needs 16 bytes"));
  CHECK_THAT(with("t", {4}, 0, ~0ULL - 31), Contains("tensor \"t\" needs 16 bytes"));
  CHECK_THAT(with("t", {4}, 0, 4), Contains("not a multiple of the alignment"));
  CHECK_THAT(with("t", {1ULL << 40}, 0, 0), Contains("needs"));
  CHECK_THAT(with("t", {1ULL << 32, 1ULL << 32}, 0, 0), Contains("overflows"));
  CHECK_THAT(with("t", {1ULL << 62}, 0, 0), Contains("overflows"));
  CHECK_THAT(with("t", {0}, 0, 0), Contains("dimension 0 is zero"));
  CHECK_THAT(with("t", {}, 0, 0), Contains("1..4 dimensions, got 0"));
  CHECK_THAT(with("t", {1, 1, 1, 1, 1}, 0, 0), Contains("1..4 dimensions, got 5"));
  CHECK_THAT(with("t", {33}, 2, 0), Contains("Q4_0 block of 32"));
  CHECK_THAT(with("t", {32}, 4, 0), Contains("unknown type 4"));
  CHECK_THAT(with("t", {4}, 0, 0), Contains("overlap"));
  CHECK_THAT(with("", {4}, 0, 0), Contains("expected a name"));
  CHECK_THAT(with("a\nb", {4}, 0, 0), Contains("\"a?b\": the name contains control characters"));
  CHECK_THAT(with(std::string(64, 'n').c_str(), {4}, 0, 0), Contains("expected a name"));
}

TEST_CASE("types that cannot be expanded are listed, and refused on use", "[gguf]") {
  GgufWriter writer;
  writer.tensor("blk.0.attn_q.weight", {256}, 10, Bytes(84));
  const TemporaryFolder folder;
  writer.write((folder / "x.gguf").string());
  const auto file = GgufFile::open((folder / "x.gguf").string());
  CHECK(gguf_type_name(file->tensors()[0].type_id) == "Q2_K");
  CHECK_THROWS_WITH(weight_type(*file, file->tensors()[0]),
                    Contains("blk.0.attn_q.weight") && Contains("type Q2_K"));
}

TEST_CASE("every prefix of a GGUF file is refused", "[gguf]") {
  const Bytes whole = small_file().bytes();
  size_t accepted = 0;
  for (size_t length = 0; length < whole.size(); ++length) {
    accepted +=
        refusal(Bytes(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(length))).empty();
  }
  CHECK(accepted == 0);
}

TEST_CASE("split files are joined, and missing parts named", "[gguf]") {
  const TemporaryFolder folder;
  const auto part = [&](uint16_t number, uint16_t count, const std::string& tensor) {
    GgufWriter writer;
    if (number == 0) writer.string("general.architecture", "llama");
    writer.u16("split.no", number);
    writer.u16("split.count", count);
    writer.i32("split.tensors.count", 3);
    writer.tensor_f32(tensor, {4, 2}, kEight);
    return writer;
  };
  const auto name = [&](int number) {
    return (folder / ("m-0000" + std::to_string(number) + "-of-00003.gguf")).string();
  };
  part(0, 3, "a").write(name(1));
  part(1, 3, "b").write(name(2));
  CHECK_THROWS_WITH(GgufFile::open(name(1)),
                    Contains("part 3 of 3 is missing") && Contains("m-00003-of-00003.gguf"));
  part(2, 3, "c").write(name(3));
  for (const int opened : {1, 2, 3}) {
    const auto file = GgufFile::open(name(opened));
    CHECK(file->files().size() == 3);
    CHECK(file->string("general.architecture") == "llama");
    REQUIRE(file->tensors().size() == 3);
    CHECK(file->find_tensor("c")->file == 2);
  }
  part(1, 3, "c").write(name(3));
  CHECK_THROWS_WITH(GgufFile::open(name(1)), Contains("split.no: expected 2, got 1"));
  part(2, 3, "a").write(name(3));
  CHECK_THROWS_WITH(GgufFile::open(name(1)), Contains("duplicate tensor name \"a\""));
  part(0, 3, "a").write((folder / "renamed.gguf").string());
  CHECK_THROWS_WITH(GgufFile::open((folder / "renamed.gguf").string()),
                    Contains("must end in -00001-of-00003.gguf"));
  part(2, 4, "c").write(name(3));
  CHECK_THROWS_AS(GgufFile::open(name(3)), Error);
}

TEST_CASE("paths that are no files are refused", "[gguf]") {
  const TemporaryFolder folder;
  CHECK_THROWS_WITH(GgufFile::open((folder / "absent.gguf").string()),
                    Contains("absent.gguf") && Contains("No such file"));
  CHECK_THROWS_WITH(GgufFile::open(folder.path().string()), Contains("regular file"));
}

TEST_CASE("the demo model's GGUF", "[gguf][model]") {
  const auto path = oscar_test::demo_model();
  SKIP_UNLESS(path, "demo model not fetched");
  const auto file = GgufFile::open(path->string());
  CHECK(file->string("general.architecture") == "llama");
  CHECK(file->integer("llama.block_count") == 30);
  CHECK(file->strings("tokenizer.ggml.tokens").size() == 49152);
  const GgufTensor* q = file->find_tensor("blk.0.attn_q.weight");
  REQUIRE(q != nullptr);
  CHECK(q->shape() == Shape{576, 576});
}
