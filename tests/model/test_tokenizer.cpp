#include <catch2/catch.hpp>
#include <limits>
#include <map>

#include "base/error.h"
#include "base/random.h"
#include "model/tokenizer.h"
#include "model/unicode_text.h"
#include "tests/model/tokenizer_builder.h"
#include "tests/support/paths.h"

namespace oscar {
namespace {

using oscar_test::small_tokenizer;
using oscar_test::TemporaryFolder;
using oscar_test::TokenizerBuilder;
using Ids = std::vector<int32_t>;
using Spans = std::vector<std::pair<size_t, size_t>>;

std::shared_ptr<const Tokenizer> load(const TokenizerBuilder& builder) {
  const TemporaryFolder folder;
  oscar_test::write_file(folder / "tokenizer.json", builder.json().dump());
  return Tokenizer::load(folder.path().string());
}

// Merges by the definition: lowest rank first, leftmost on ties.
Ids merge_by_definition(const TokenizerBuilder& builder, const std::string& piece) {
  std::map<std::pair<std::string, std::string>, size_t> ranks;
  for (size_t i = 0; i < builder.merges.size(); ++i) ranks[builder.merges[i]] = i;
  std::vector<std::string> symbols;
  for (const char c : piece) symbols.emplace_back(1, c);
  while (true) {
    size_t best = 0, best_rank = std::numeric_limits<size_t>::max();
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const auto found = ranks.find({symbols[i], symbols[i + 1]});
      if (found != ranks.end() && found->second < best_rank) {
        best = i;
        best_rank = found->second;
      }
    }
    if (best_rank == std::numeric_limits<size_t>::max()) break;
    symbols[best] += symbols[best + 1];
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
  Ids ids;
  for (const std::string& symbol : symbols) ids.push_back(builder.id(symbol));
  return ids;
}

}  // namespace

TEST_CASE("merges follow the definition in short and in long pieces") {
  Random random(5);
  for (int vocabulary = 0; vocabulary < 20; ++vocabulary) {
    TokenizerBuilder builder;
    std::vector<std::string> parts = {"a", "b", "c"};
    for (int i = 0; i < 25; ++i) {
      const std::string left = parts[random.below(parts.size())];
      const std::string right = parts[random.below(parts.size())];
      const auto pair = std::make_pair(left, right);
      if (std::find(builder.merges.begin(), builder.merges.end(), pair) != builder.merges.end()) {
        continue;
      }
      builder.merge(left, right);
      parts.push_back(left + right);
    }
    const auto tokenizer = load(builder);
    for (const size_t length : {1, 2, 7, 30, 47, 48, 49, 50, 120, 300}) {
      std::string piece;
      for (size_t i = 0; i < length; ++i) piece += static_cast<char>('a' + random.below(3));
      INFO("vocabulary " << vocabulary << ", piece " << piece);
      const Ids expected = merge_by_definition(builder, piece);
      REQUIRE(tokenizer->encode(piece, false) == expected);
      Ids ids;
      const Spans spans = tokenizer->offsets(piece, false, &ids);
      REQUIRE(ids == expected);
      REQUIRE(tokenizer->decode(ids) == piece);
      size_t position = 0;
      for (size_t i = 0; i < ids.size(); ++i) {
        REQUIRE(spans[i].first == position);
        position += tokenizer->decode({ids[i]}).size();
        REQUIRE(spans[i].second == position);
      }
    }
  }
}

TEST_CASE("GGUF metadata and tokenizer.json give the same tokenizer") {
  for (const char* pre : {"gpt-2", "smollm", "qwen2", "llama-bpe"}) {
    TokenizerBuilder builder = small_tokenizer();
    builder.pre = pre;
    const TemporaryFolder folder;
    auto json = builder.json();
    oscar_test::GgufWriter gguf = builder.gguf();
    if (std::string(pre) == "llama-bpe") {  // its GGUF defaults: ignore_merges and a BOS
      json["model"]["ignore_merges"] = true;
      json["post_processor"] = {
          {"type", "TemplateProcessing"},
          {"single", {{{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}}, {{"Sequence", {}}}}}};
      gguf.u32("tokenizer.ggml.bos_token_id", static_cast<uint32_t>(builder.added_id(0)));
    }
    oscar_test::write_file(folder / "tokenizer.json", json.dump());
    gguf.write(folder / "model.gguf");
    const auto from_json = Tokenizer::load(folder / "tokenizer.json");
    const auto from_gguf = Tokenizer::load(folder / "model.gguf");
    INFO(pre);
    CHECK(from_json->sha256() == from_gguf->sha256());
    CHECK(from_json->pre_tokenizer() == pre);
    CHECK(from_gguf->pre_tokenizer() == pre);
    CHECK(from_json->add_bos() == from_gguf->add_bos());
    CHECK(from_json->bos_id() == from_gguf->bos_id());
    for (const std::string text :
         {"abc aab<s>12", "caf\x65\xCC\x81 x", "ABC's abc's", "  abc\n\n abcabc"}) {
      CHECK(from_json->encode(text, true) == from_gguf->encode(text, true));
    }
  }
  TokenizerBuilder other = small_tokenizer();
  other.merges.pop_back();
  CHECK(load(other)->sha256() != load(small_tokenizer())->sha256());
}

TEST_CASE("added tokens: longest match, special only on request") {
  const TokenizerBuilder builder = small_tokenizer();
  const auto tokenizer = load(builder);
  const int32_t s = builder.added_id(0), ss = builder.added_id(1), x = builder.added_id(2);
  const int32_t a = builder.id("a");
  CHECK(tokenizer->encode("<s>a", true) == Ids{s, a});
  CHECK(tokenizer->encode("<s><s>a<s><s><s>", true) == Ids{ss, a, ss, s});
  CHECK(tokenizer->encode("[x]a", false) == Ids{x, a});
  const Ids as_text = tokenizer->encode("<s>[x]", false);
  CHECK(as_text == Ids{builder.id("<"), builder.id("s"), builder.id(">"), x});
  CHECK(tokenizer->decode(as_text) == "<s>[x]");
  CHECK(tokenizer->decode({s, a, x}, true) == "a[x]");
  CHECK(tokenizer->decode({s, a, 100000}) == "<s>a");
  CHECK_THROWS_AS(tokenizer->decode({-1}), Error);
  // Pieces do not reach across an added token.
  CHECK(tokenizer->encode("a<s>b", true) == Ids{a, s, builder.id("b")});
}

TEST_CASE("added tokens: flags") {
  TokenizerBuilder builder = small_tokenizer();
  builder.added = {{"<l>", true, {{"lstrip", true}}},
                   {"<r>", true, {{"rstrip", true}}},
                   {"word", false, {{"single_word", true}}},
                   {"caf\xC3\xA9", false, {{"normalized", true}}}};
  builder.pre = "qwen2";
  const auto tokenizer = load(builder);
  const auto id = [&](size_t i) { return builder.added_id(i); };
  const auto one = [&](const char* text) { return builder.id(text); };
  CHECK(tokenizer->encode("a \n<l> b", true) == Ids{one("a"), id(0), one(" "), one("b")});
  CHECK(tokenizer->encode("a <r> \t b", true) == Ids{one("a"), one(" "), id(1), one("b")});
  CHECK(tokenizer->encode("<r>  <l>", true) == Ids{id(1), id(0)});
  CHECK(tokenizer->encode("word", true) == Ids{id(2)});
  CHECK(tokenizer->encode("a-word.", true).at(2) == id(2));
  CHECK(tokenizer->encode("sword", true).size() == 5);
  CHECK(tokenizer->encode("words", true).size() == 5);
  CHECK(tokenizer->encode("word\xC3\xA9", true).size() == 6);
  // Matched in the normalized text, whatever form the input has; offsets are those of the input.
  Ids ids;
  const Spans spans = tokenizer->offsets("a cafe\xCC\x81!", true, &ids);
  CHECK(ids == Ids{one("a"), one(" "), id(3), one("!")});
  CHECK(spans == Spans{{0, 1}, {1, 2}, {2, 8}, {8, 9}});
}

TEST_CASE("offsets lead back through normalization and repair") {
  TokenizerBuilder builder = small_tokenizer();
  builder.pre = "qwen2";
  const auto tokenizer = load(builder);
  Ids ids;
  const std::string text =
      "<s>\xFF"
      "abe\xCC\x81";
  const Spans spans = tokenizer->offsets(text, true, &ids);
  CHECK(tokenizer->decode(ids) ==
        "<s>\xEF\xBF\xBD"
        "ab\xC3\xA9");
  CHECK(spans == Spans{{0, 3}, {3, 4}, {3, 4}, {3, 4}, {4, 6}, {6, 9}, {6, 9}});
  CHECK(tokenizer->encode(text, true) == ids);
}

TEST_CASE("an added token ends the normalization before it") {
  TokenizerBuilder builder = small_tokenizer();
  builder.pre = "qwen2";
  const auto tokenizer = load(builder);
  // '>' and U+0338 would compose, but the token is split off first.
  const Ids ids = tokenizer->encode("<s>\xCC\xB8", true);
  CHECK(ids == Ids{builder.added_id(0), 0xCC, 0xB8});
}

TEST_CASE("ignore_merges emits whole vocabulary entries") {
  TokenizerBuilder builder = small_tokenizer();
  builder.tokens.push_back("cab");  // no merge leads to it
  builder.pre = "llama-bpe";
  auto json = builder.json();
  const TemporaryFolder folder;
  oscar_test::write_file(folder / "tokenizer.json", json.dump());
  CHECK(Tokenizer::load(folder / "tokenizer.json")->encode("cab", true) ==
        Ids{builder.id("c"), builder.id("ab")});
  json["model"]["ignore_merges"] = true;
  oscar_test::write_file(folder / "tokenizer.json", json.dump());
  CHECK(Tokenizer::load(folder / "tokenizer.json")->encode("cab", true) == Ids{builder.id("cab")});
  CHECK(Tokenizer::load(folder / "tokenizer.json")->encode("caba", true) ==
        Ids{builder.id("c"), builder.id("ab"), builder.id("a")});
}

TEST_CASE("bytes without a token give nothing") {
  TokenizerBuilder builder = small_tokenizer();
  auto json = builder.json();
  std::string symbol;
  append_utf8(byte_to_code_point(0xF3), symbol);
  json["model"]["vocab"].erase(symbol);
  const TemporaryFolder folder;
  oscar_test::write_file(folder / "tokenizer.json", json.dump());
  const auto tokenizer = Tokenizer::load(folder / "tokenizer.json");
  CHECK(tokenizer->encode("\xF3\xA0\x80\x81", true) == Ids{0xA0, 0x80, 0x81});
}

TEST_CASE("exactly one BOS where the model defines one") {
  TokenizerBuilder builder = small_tokenizer();
  const TemporaryFolder folder;
  oscar_test::GgufWriter gguf = builder.gguf();
  const int32_t bos = builder.added_id(0), a = builder.id("a");
  gguf.u32("tokenizer.ggml.bos_token_id", static_cast<uint32_t>(bos));
  gguf.boolean("tokenizer.ggml.add_bos_token", true);
  gguf.write(folder / "with.gguf");
  const auto with = Tokenizer::load(folder / "with.gguf");
  CHECK(with->add_bos());
  CHECK(encode_prompt(*with, "a") == Ids{bos, a});
  CHECK(encode_prompt(*with, "<s>a") == Ids{bos, a});
  CHECK(encode_prompt(*with, "") == Ids{bos});
  CHECK(with->encode("a", true) == Ids{a});
  builder.gguf().write(folder / "without.gguf");
  CHECK(encode_prompt(*Tokenizer::load(folder / "without.gguf"), "a") == Ids{a});
}

TEST_CASE("stop ids and chat template of a folder") {
  TokenizerBuilder builder = small_tokenizer();
  builder.added = {{"<eos>"}, {"<|im_end|>"}, {"<bos>"}};
  const TemporaryFolder folder;
  oscar_test::write_file(folder / "tokenizer.json", builder.json().dump());
  oscar_test::write_file(folder / "tokenizer_config.json",
                         R"({"eos_token": {"content": "<eos>"}, "bos_token": "<bos>",
                             "add_bos_token": true, "chat_template": [
                               {"name": "tool_use", "template": "no"},
                               {"name": "default", "template": "yes"}]})");
  oscar_test::write_file(folder / "generation_config.json", R"({"eos_token_id": [97, 98]})");
  const auto tokenizer = Tokenizer::load(folder.path().string());
  const int64_t first = builder.added_id(0);
  CHECK(tokenizer->stop_ids() == std::vector<int64_t>{first, 97, 98, first + 1});
  CHECK(tokenizer->bos_id() == first + 2);
  CHECK(tokenizer->add_bos());
  CHECK(tokenizer->chat_template() == "yes");
  oscar_test::write_file(folder / "chat_template.jinja", "newer");
  CHECK(Tokenizer::load(folder.path().string())->chat_template() == "newer");
}

TEST_CASE("very long runs") {
  TokenizerBuilder builder;
  std::string run = "a";
  for (int i = 0; i < 6; ++i, run += run) builder.merge(run, run);  // up to 64
  for (const char* pre : {"gpt-2", "smollm", "qwen2", "llama-bpe"}) {
    builder.pre = pre;
    const auto tokenizer = load(builder);
    INFO(pre);
    const Ids ids = tokenizer->encode(std::string(1 << 20, 'a'), false);
    CHECK((ids == Ids((1 << 20) / 64, builder.id(std::string(64, 'a')))));
    // White space and line breaks, where a careless scanner is quadratic.
    const std::string blank = std::string(1 << 19, ' ') + "\n" + std::string(1 << 19, ' ') + "b";
    CHECK((tokenizer->decode(tokenizer->encode(blank, false)) == blank));
    std::string tabs;
    for (int i = 0; i < 1 << 18; ++i) tabs += " \t'\n";
    CHECK((tokenizer->decode(tokenizer->encode(tabs, false)) == tabs));
  }
}

TEST_CASE("any bytes can be encoded and come back repaired") {
  Random random(9);
  const auto tokenizer = load(small_tokenizer());
  for (int round = 0; round < 300; ++round) {
    std::string bytes;
    for (uint64_t left = random.below(60); left > 0; --left) {
      bytes.push_back(static_cast<char>(random.below(256)));
    }
    Ids ids;
    const Spans spans = tokenizer->offsets(bytes, true, &ids);
    REQUIRE(tokenizer->decode(ids) == to_valid_utf8(bytes));
    REQUIRE(tokenizer->encode(bytes, true) == ids);
    size_t covered = 0;
    for (const auto& [begin, end] : spans) {
      REQUIRE(begin <= covered);
      REQUIRE(end >= covered);
      covered = end;
    }
    REQUIRE(covered == bytes.size());
  }
}

}  // namespace oscar
