// Malformed tokenizer files: every refusal names the file and the entry.
#include <catch2/catch.hpp>
#include <functional>
#include <map>

#include "base/error.h"
#include "base/random.h"
#include "model/tokenizer.h"
#include "tests/model/tokenizer_builder.h"
#include "tests/support/paths.h"

namespace oscar {
namespace {

using oscar_test::small_tokenizer;
using oscar_test::TemporaryFolder;

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace

TEST_CASE("malformed tokenizer.json files are refused with file and entry") {
  const TemporaryFolder folder;
  const std::string path = folder / "tokenizer.json";
  using Json = nlohmann::json;
  const auto refuse = [&](const std::function<void(Json&)>& spoil, const std::string& expected) {
    Json json = small_tokenizer().json();
    spoil(json);
    oscar_test::write_file(path, json.dump());
    const std::string message = message_of([&] { Tokenizer::load(path); });
    INFO(message);
    CHECK(message.starts_with(path));
    CHECK(message.find(expected) != std::string::npos);
  };
  const auto merge = [&](Json value, const std::string& expected) {
    refuse([&](Json& j) { j["model"]["merges"][2] = std::move(value); }, expected);
  };
  merge("ab", "merge 2 is \"ab\"");
  merge("ab ", "merge 2");
  merge(Json{"a"}, "merge 2 is [\"a\"]");
  merge(Json{"a", 7}, "merge 2");
  merge(7, "merge 2 is 7");
  merge("ab q", "merge 2 (\"ab\" \"q\"): \"abq\" is not in the vocabulary");
  merge("zz c", "\"zz\" is not in the vocabulary");
  merge("a\xE4\xB8\xAD b", "byte alphabet");
  refuse([](Json& j) { j["model"]["merges"] = Json::array(); }, "merges is missing, empty");
  refuse([](Json& j) { j["model"].erase("merges"); }, "merges is missing");
  refuse([](Json& j) { j["model"]["vocab"] = Json::array(); }, "model.vocab");
  refuse([](Json& j) { j["model"]["vocab"]["q1"] = "7"; }, "vocabulary entry \"q1\"");
  refuse([](Json& j) { j["model"]["vocab"]["q1"] = -7; }, "vocabulary entry \"q1\" has id -7");
  refuse([](Json& j) { j["model"]["vocab"]["q1"] = 2000000000; }, "vocabulary entry \"q1\"");
  refuse([](Json& j) { j["model"]["vocab"]["q1"] = 0xFFFFFFFFFFFFFFFFULL; }, "expected 0..");
  refuse([](Json& j) { j["model"]["vocab"]["q1"] = 3; }, "id 3 belongs to");
  refuse([](Json& j) { j["model"]["type"] = "Unigram"; }, "model.type is \"Unigram\"");
  refuse([](Json& j) { j["model"]["byte_fallback"] = true; }, "byte_fallback");
  refuse([](Json& j) { j["model"]["end_of_word_suffix"] = "</w>"; }, "end_of_word_suffix");
  refuse([](Json& j) { j["model"]["ignore_merges"] = 1; }, "ignore_merges");
  refuse([](Json& j) { j.erase("model"); }, "model is missing");
  refuse([](Json& j) { j["added_tokens"] = "x"; }, "added_tokens is not a list");
  refuse([](Json& j) { j["added_tokens"][1].erase("id"); }, "added_tokens[1]");
  refuse([](Json& j) { j["added_tokens"][1]["content"] = ""; }, "added token 1 has no content");
  refuse([](Json& j) { j["added_tokens"][1]["id"] = 5; }, "id 5 belongs to");
  refuse([](Json& j) { j["added_tokens"][1]["special"] = "no"; }, "added_tokens[1].special");
  refuse([](Json& j) { j["normalizer"] = {{"type", "Lowercase"}}; }, "\"Lowercase\"");
  refuse([](Json& j) { j["decoder"] = {{"type", "WordPiece"}}; }, "decoder");
  refuse([](Json& j) { j["pre_tokenizer"] = {{"type", "Whitespace"}}; }, "pre_tokenizer");
  refuse([](Json& j) { j["pre_tokenizer"]["add_prefix_space"] = true; }, "add_prefix_space");
  refuse(
      [](Json& j) {
        j["pre_tokenizer"] = {
            {"type", "Sequence"},
            {"pretokenizers",
             {{{"type", "Split"}, {"pattern", {{"Regex", "\\w+"}}}, {"behavior", "Isolated"}},
              {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
      },
      "unknown pre_tokenizer pattern: \"\\w+\"");
  refuse(
      [](Json& j) {
        Json nested = j["pre_tokenizer"];
        for (int i = 0; i < 20; ++i) {
          nested = {{"type", "Sequence"}, {"pretokenizers", Json::array({nested})}};
        }
        j["pre_tokenizer"] = nested;
      },
      "nested too deeply");
  for (const std::string text : {"", "{", "[1, 2]", "\"text\"", "{\"model\": \xFF}"}) {
    oscar_test::write_file(path, text);
    CHECK(message_of([&] { Tokenizer::load(path); }).starts_with(path));
  }
  CHECK(message_of([&] { Tokenizer::load(folder / "absent.json"); }).find("no such file") !=
        std::string::npos);
  std::filesystem::remove(path);
  CHECK(message_of([&] { Tokenizer::load(folder.path().string()); }).find("no tokenizer.json") !=
        std::string::npos);
}

TEST_CASE("malformed GGUF tokenizers are refused with file and entry") {
  const TemporaryFolder folder;
  const std::string path = folder / "model.gguf";
  const auto refuse = [&](const std::map<std::string, std::vector<std::string>>& texts,
                          const std::vector<int32_t>& types, const std::string& expected) {
    oscar_test::GgufWriter out;
    out.string("general.architecture", "llama");
    for (const auto& [key, values] : texts) {
      const std::string full = "tokenizer.ggml." + key;
      if (key == "model" || key == "pre") {
        out.string(full, values[0]);
      } else {
        out.strings(full, values);
      }
    }
    out.i32s("tokenizer.ggml.token_type", types);
    out.write(path);
    const std::string message = message_of([&] { Tokenizer::load(path); });
    INFO(message);
    CHECK(message.starts_with(path));
    CHECK(message.find(expected) != std::string::npos);
  };
  using Texts = std::map<std::string, std::vector<std::string>>;
  const Texts good = {
      {"model", {"gpt2"}}, {"pre", {"gpt-2"}}, {"tokens", {"a", "b", "ab"}}, {"merges", {"a b"}}};
  const auto with = [&](const std::string& key, std::vector<std::string> values) {
    Texts texts = good;
    texts[key] = std::move(values);
    return texts;
  };
  refuse(with("model", {"llama"}), {1, 1, 1}, "tokenizer.ggml.model is \"llama\"");
  refuse(with("pre", {"deepseek"}), {1, 1, 1}, "unknown pre-tokenizer \"deepseek\"");
  refuse(with("merges", {"ab"}), {1, 1, 1}, "tokenizer.ggml.merges[0] is \"ab\"");
  refuse(with("merges", {"a b", "b a"}), {1, 1, 1}, "merge 1 (\"b\" \"a\"): \"ba\" is not");
  refuse(with("merges", {}), {1, 1, 1}, "the list of merges is empty");
  refuse(with("tokens", {"a", "b", "a"}), {1, 1, 1}, "vocabulary entry 2 (\"a\") repeats entry 0");
  refuse(with("tokens", {"a", "", "ab"}), {1, 1, 1}, "vocabulary entry 1 is empty");
  refuse(good, {1, 1}, "has 3 entries but tokenizer.ggml.token_type has 2");
  refuse(good, {1, 9, 1}, "token_type[1] is 9");
  refuse(good, {1, 6, 1}, "vocabulary entry 1 (\"b\") is marked as a byte");
  Texts missing = good;
  missing.erase("pre");
  refuse(missing, {1, 1, 1}, "tokenizer.ggml.pre");

  oscar_test::GgufWriter out = small_tokenizer().gguf();
  out.u32("tokenizer.ggml.eos_token_id", 70000);
  out.write(path);
  CHECK(message_of([&] { Tokenizer::load(path); }).find("end-of-text id 70000") !=
        std::string::npos);
}

TEST_CASE("damaged tokenizer files give a tokenizer or an Error, nothing else") {
  const TemporaryFolder folder;
  const std::string json = small_tokenizer().json().dump();
  const oscar_test::Bytes gguf = small_tokenizer().gguf().bytes();
  Random random(23);
  size_t refused = 0;
  for (int round = 0; round < 400; ++round) {
    const bool as_json = round % 2 == 0;
    std::string bytes = as_json ? json : std::string(gguf.begin(), gguf.end());
    for (uint64_t changes = 1 + random.below(4); changes > 0; --changes) {
      const size_t position = random.below(bytes.size());
      switch (random.below(3)) {
        case 0:
          bytes[position] = static_cast<char>(random.below(256));
          break;
        case 1:
          bytes.erase(position, 1 + random.below(8));
          break;
        default:
          bytes.insert(position, bytes.substr(random.below(bytes.size()), random.below(12)));
      }
    }
    const std::string path = folder / (as_json ? "tokenizer.json" : "model.gguf");
    oscar_test::write_file(path, bytes);
    try {
      const auto tokenizer = Tokenizer::load(path);
      const auto ids = tokenizer->encode("abc <s>[x] aab 12's", true);
      tokenizer->decode(ids);
    } catch (const Error& error) {
      ++refused;
      CHECK(std::string(error.what()).find(path) != std::string::npos);
    }
  }
  CHECK(refused > 100);
  CHECK(refused < 400);
}

}  // namespace oscar
