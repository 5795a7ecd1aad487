// The tokens of a text as the command shows them.
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "tests/model/tokenizer_builder.h"
#include "tests/support/paths.h"
#include "tools/cmd_tokenize.h"

namespace oscar {

using Catch::Matchers::Contains;

TEST_CASE("tokens as a table, ids, counts and JSON", "[tokenize]") {
  const oscar_test::TemporaryFolder folder;
  const std::string model = folder / "tokenizer.json";
  oscar_test::write_file(model, oscar_test::small_tokenizer().json().dump());
  const auto run = [&](TokenizeOptions options) {
    options.model = model;
    return run_tokenize(options);
  };
  const auto builder = oscar_test::small_tokenizer();
  const std::string ab = std::to_string(builder.id("ab")), s = std::to_string(builder.added_id(0));

  CHECK_THAT(run({.text = "ab<s>\n"}).text, Contains(ab + "             0..2  \"ab\"\n") &&
                                                Contains("2..5  \"<s>\"\n") &&
                                                Contains("5..6  \"\\n\"\n"));
  CHECK(run({.text = "ab<s>", .ids = true}).text == ab + " " + s + "\n");
  CHECK(run({.text = "<s>", .no_special = true, .ids = true}).text == "60 115 62\n");
  CHECK_THAT(run({.text = "ab<s>", .count = true}).text,
             Contains("2 tokens, 5 bytes") && Contains("pre-tokenizer gpt-2"));
  const auto json = nlohmann::json::parse(run({.text = "ab", .json = true}).text);
  CHECK(json["text"] == "ab");
  CHECK(json["ids"] == nlohmann::json{builder.id("ab")});
  CHECK(json["tokenizer_sha256"].get<std::string>().size() == 64);
  CHECK(run({.text = "a", .chat_template = "chatml", .json = true})
            .text.find("<|im_start|>user\\na<|im_end|>") != std::string::npos);

  oscar_test::write_file(folder / "text", "a\xFF");
  const TokenizeOutput repaired = run({.file = folder / "text", .ids = true});
  CHECK(repaired.text == "97 239 191 189\n");
  CHECK_THAT(repaired.warning, Contains("1 invalid UTF-8"));
  CHECK(run({.text = "a"}).warning.empty());

  CHECK_THROWS_AS(run({}), Error);
  CHECK_THROWS_AS(run({.text = "a", .file = "b"}), Error);
  CHECK_THROWS_AS(run({.text = "a", .ids = true, .count = true}), Error);
  CHECK_THROWS_AS(run({.file = folder / "absent"}), Error);
  CHECK_THROWS_AS(run({.text = "a", .chat = true}), Error);  // the file has no template
}

}  // namespace oscar
