// Strict JSON: the tree, typed access, refusals with a place.
#include <catch2/catch.hpp>

#include "base/error.h"
#include "io/json_file.h"
#include "support/gguf_writer.h"
#include "support/paths.h"

using namespace oscar;
using Catch::Matchers::Contains;
using oscar_test::TemporaryFolder;

TEST_CASE("every kind of value is kept", "[json]") {
  const JsonValue root = parse_json(
      " {\"n\": null, \"t\": true, \"i\": -7, \"d\": 2.5, \"s\": \"\\u00e9\\n\", "
      "\"a\": [1, [2], {}], \"o\": {\"k\": 1e2}} ",
      "x");
  REQUIRE(root.is_object());
  CHECK(root.members.size() == 7);
  CHECK(root.members[0].first == "n");
  CHECK(root.find("n")->is_null());
  CHECK(root.find("t")->boolean);
  CHECK(root.find("i")->integer == -7);
  CHECK(root.find("i")->number == -7.0);
  CHECK(root.find("d")->number == 2.5);
  CHECK_FALSE(root.find("d")->is_integer());
  CHECK(root.find("s")->text == "\xc3\xa9\n");
  REQUIRE(root.find("a")->items.size() == 3);
  CHECK(root.find("a")->items[1].items[0].integer == 2);
  CHECK(root.find("o")->find("k")->number == 100.0);
  CHECK(root.find("absent") == nullptr);
  CHECK(parse_json("3", "x").integer == 3);
}

TEST_CASE("typed access names file and field", "[json]") {
  const JsonValue root =
      parse_json("{\"i\": 3, \"d\": 1.5, \"b\": true, \"s\": \"t\", \"n\": null}", "f");
  const JsonObject object(root, "f.json");
  CHECK(object.integer("i") == 3);
  CHECK(object.integer("n", 9) == 9);
  CHECK(object.number("i") == 3.0);
  CHECK(object.number("d", 0.0) == 1.5);
  CHECK(object.boolean("b", false));
  CHECK(object.boolean("absent", true));
  CHECK(object.string("s") == "t");
  CHECK(object.string("absent", "u") == "u");
  CHECK_FALSE(object.has("n"));
  CHECK_THROWS_WITH(object.integer("d"), "f.json: field d: expected an integer, got number");
  CHECK_THROWS_WITH(object.integer("n"), "f.json: field n is missing");
  CHECK_THROWS_WITH(object.number("s"), Contains("field s: expected a number, got string"));
  CHECK_THROWS_WITH(object.boolean("i", false), Contains("expected true or false, got integer"));
  CHECK_THROWS_WITH(object.string("b"), Contains("expected a string, got bool"));
  CHECK_THROWS_WITH(JsonObject(parse_json("[]", "f"), "f.json"), Contains("got array"));
}

TEST_CASE("what is not one strict JSON value is refused", "[json]") {
  const auto refusal = [](const std::string& text) {
    try {
      parse_json(text, "file.json");
    } catch (const Error& error) {
      CHECK_THAT(error.what(), Contains("file.json: "));
      return std::string(error.what());
    }
    return std::string();
  };
  for (const char* text : {"", " ", "{", "{\"a\"}", "[1,]", "{} {}", "nul", "\"\\x\"", "01",
                           "{'a': 1}", "\"\xff\"", "// c"}) {
    CHECK_THAT(refusal(text), Contains("not valid JSON at byte"));
  }
  CHECK_THAT(refusal("{\"a\": 1, \"a\": 2}"), Contains("duplicate key \"a\""));
  CHECK(refusal("[{\"a\": 1}, {\"a\": 2}]").empty());
  CHECK_THAT(refusal("18446744073709551615"), Contains("does not fit"));
  CHECK_THAT(refusal("1e999"), Contains("file.json"));
  CHECK_THAT(refusal(std::string(100000, '[')), Contains("nested deeper"));
  std::string objects;
  for (int i = 0; i < 100000; ++i) objects += "{\"a\":";
  CHECK_THAT(refusal(objects), Contains("nested deeper"));
  CHECK(refusal(std::string(64, '[') + std::string(64, ']')).empty());
  CHECK_THAT(refusal(std::string(65, '[') + std::string(65, ']')), Contains("nested deeper"));
}

TEST_CASE("the depth of a text is found without parsing it", "[json]") {
  const std::string open(64, '['), close(64, ']');
  CHECK_NOTHROW(check_json_depth(open + close + open + close, "x"));
  CHECK_NOTHROW(check_json_depth("[\"" + open + "\\\"" + open + "\"]", "x"));
  CHECK_THROWS_WITH(check_json_depth("{\"a\": " + open, "x.json"),
                    "x.json: nested deeper than 64 at byte 69");
  CHECK_NOTHROW(check_json_depth("]]}}\"", "x"));
}

TEST_CASE("JSON files are bounded", "[json]") {
  const TemporaryFolder folder;
  const std::string path = (folder / "x.json").string();
  oscar_test::write_file(path, "{\"a\": 1}");
  CHECK(read_json_file(path).find("a")->integer == 1);
  CHECK_THROWS_WITH(read_json_file(path, 7), Contains("8 bytes, expected at most 7"));
  CHECK_THROWS_WITH(read_json_file((folder / "none.json").string()), Contains("No such file"));
  oscar_test::write_file(path, "");
  CHECK_THROWS_WITH(read_json_file(path), Contains("zero bytes"));
}
