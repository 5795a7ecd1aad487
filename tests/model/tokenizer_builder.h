// Small byte-level tokenizers for tests, written as tokenizer.json or as GGUF metadata.
#pragma once

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "model/bpe.h"
#include "model/unicode_text.h"
#include "tests/support/gguf_writer.h"

namespace oscar_test {

// Raw bytes in the byte alphabet.
inline std::string to_byte_alphabet(const std::string& bytes) {
  std::string text;
  for (const char byte : bytes) {
    oscar::append_utf8(oscar::byte_to_code_point(static_cast<uint8_t>(byte)), text);
  }
  return text;
}

struct TokenizerBuilder {
  std::vector<std::string> tokens;  // raw bytes; the first 256 are the single bytes, in order
  std::vector<std::pair<std::string, std::string>> merges;  // raw bytes
  struct Added {
    std::string content;
    bool special = true;
    nlohmann::json flags = nlohmann::json::object();
  };
  std::vector<Added> added;  // ids follow the tokens
  std::string pre = "gpt-2";

  TokenizerBuilder() {
    for (int byte = 0; byte < 256; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
  }
  // Adds the merge and its result.
  void merge(const std::string& left, const std::string& right) {
    merges.emplace_back(left, right);
    if (std::find(tokens.begin(), tokens.end(), left + right) == tokens.end()) {
      tokens.push_back(left + right);
    }
  }
  int32_t id(const std::string& bytes) const {
    return static_cast<int32_t>(std::find(tokens.begin(), tokens.end(), bytes) - tokens.begin());
  }
  int32_t added_id(size_t index) const { return static_cast<int32_t>(tokens.size() + index); }

  nlohmann::json json() const {
    using nlohmann::json;
    json vocab = json::object();
    for (size_t i = 0; i < tokens.size(); ++i) vocab[to_byte_alphabet(tokens[i])] = i;
    json merge_list = json::array();
    for (const auto& [left, right] : merges) {
      merge_list.push_back(to_byte_alphabet(left) + " " + to_byte_alphabet(right));
    }
    json added_list = json::array();
    for (size_t i = 0; i < added.size(); ++i) {
      json entry = {{"id", tokens.size() + i},
                    {"content", added[i].content},
                    {"special", added[i].special},
                    {"single_word", false},
                    {"lstrip", false},
                    {"rstrip", false},
                    {"normalized", false}};
      entry.update(added[i].flags);
      added_list.push_back(entry);
    }
    json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}};
    json pre_tokenizer = byte_level;
    json normalizer = nullptr;
    if (pre == "smollm") {
      pre_tokenizer = {
          {"type", "Sequence"},
          {"pretokenizers", {{{"type", "Digits"}, {"individual_digits", true}}, byte_level}}};
    } else if (pre != "gpt-2") {
      byte_level["use_regex"] = false;
      const std::string pattern =
          oscar::pre_tokenizer_pattern(oscar::pre_tokenizer_of(pre, "test"));
      const json split = {{"type", "Split"},
                          {"pattern", {{"Regex", pattern}}},
                          {"behavior", "Isolated"},
                          {"invert", false}};
      pre_tokenizer = {{"type", "Sequence"}, {"pretokenizers", {split, byte_level}}};
      if (pre == "qwen2") normalizer = {{"type", "NFC"}};
    }
    return {
        {"added_tokens", added_list},
        {"normalizer", normalizer},
        {"pre_tokenizer", pre_tokenizer},
        {"decoder", {{"type", "ByteLevel"}}},
        {"model",
         {{"type", "BPE"}, {"ignore_merges", false}, {"vocab", vocab}, {"merges", merge_list}}}};
  }

  GgufWriter gguf() const {
    GgufWriter out;
    std::vector<std::string> texts, merge_list;
    std::vector<int32_t> types(tokens.size(), 1);
    for (const std::string& token : tokens) texts.push_back(to_byte_alphabet(token));
    for (const Added& token : added) {
      texts.push_back(token.content);
      types.push_back(token.special ? 3 : 4);
    }
    for (const auto& [left, right] : merges) {
      merge_list.push_back(to_byte_alphabet(left) + " " + to_byte_alphabet(right));
    }
    out.string("general.architecture", "llama");
    out.string("tokenizer.ggml.model", "gpt2");
    out.string("tokenizer.ggml.pre", pre);
    out.strings("tokenizer.ggml.tokens", texts);
    out.i32s("tokenizer.ggml.token_type", types);
    out.strings("tokenizer.ggml.merges", merge_list);
    return out;
  }
};

// Letters a, b, c with a few merges, and added tokens <s>, <s><s>, [x] (not special).
inline TokenizerBuilder small_tokenizer() {
  TokenizerBuilder builder;
  builder.merge("a", "b");
  builder.merge("b", "c");
  builder.merge("ab", "c");
  builder.merge("a", "a");
  builder.merge("aa", "aa");
  builder.merge(" ", "ab");
  builder.added = {{"<s>"}, {"<s><s>"}, {"[x]", false}};
  return builder;
}

}  // namespace oscar_test
