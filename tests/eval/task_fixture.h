// A text, a tokenizer and scorers for tests of the long-context tasks without a model.
#pragma once

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/random.h"
#include "eval/continuation_scorer.h"
#include "tests/model/tokenizer_builder.h"
#include "tests/support/paths.h"

namespace oscar_test {

// Sentences of made-up words: `num_words` of them, the same for the same number.
inline std::string made_up_text(size_t num_words) {
  oscar::Random random(17);
  std::vector<std::string> vocabulary;
  for (int i = 0; i < 200; ++i) {
    std::string word;
    for (uint64_t length = 4 + random.below(4); length > 0; --length) {
      word += static_cast<char>('a' + random.below(26));
    }
    vocabulary.push_back(word);
  }
  std::string text = "Emma";
  for (size_t i = 1; i < num_words; ++i) {
    text += (i % 11 == 0 ? ".\n" : " ") + vocabulary[random.below(vocabulary.size())];
  }
  return text + ".";
}

// One token a byte, but the letters of frequent pairs.
inline std::shared_ptr<const oscar::Tokenizer> byte_tokenizer() {
  TokenizerBuilder builder;
  builder.merge("e", "r");
  builder.merge(" ", "t");
  builder.added = {{"<|im_start|>"}, {"<|im_end|>"}};
  const TemporaryFolder folder;
  write_file(folder / "tokenizer.json", builder.json().dump());
  return oscar::Tokenizer::load(folder.path().string());
}

// Continues a prompt as it went on after the longest earlier match of its last tokens.
class CopyingScorer : public oscar::ContinuationScorer {
 public:
  void set_prefix(std::span<const int32_t> prefix) override {
    prefix_.assign(prefix.begin(), prefix.end());
    ++num_prefixes;
  }
  std::vector<std::vector<oscar::TokenScore>> score(
      std::span<const int32_t> tail,
      const std::vector<std::vector<int32_t>>& continuations) override {
    std::vector<std::vector<oscar::TokenScore>> scores;
    for (size_t i = 0; i < continuations.size(); ++i) {
      std::vector<int32_t> text = prompt(tail);
      std::vector<oscar::TokenScore>& tokens = scores.emplace_back();
      for (const int32_t token : continuations[i]) {
        const int32_t top1 = next(text);
        tokens.push_back({std::log(token == top1 ? kLikely : 1e-3), top1});
        text.push_back(token);
      }
      if (i == 0) tokens.push_back({std::log(kLikely), next(text)});
    }
    return scores;
  }
  std::vector<int32_t> generate(
      std::span<const int32_t> tail, size_t max_tokens,
      const std::function<bool(std::span<const int32_t>)>& stop) override {
    std::vector<int32_t> text = prompt(tail), answer;
    while (answer.size() < max_tokens) {
      answer.push_back(next(text));
      text.push_back(answer.back());
      if (stop && stop(answer)) break;
    }
    ++num_generated;
    return answer;
  }
  oscar::CacheUse cache_use() const override { return {1, 2, 3}; }

  static constexpr double kLikely = 0.5;
  size_t num_prefixes = 0, num_generated = 0;

 protected:
  std::vector<int32_t> prompt(std::span<const int32_t> tail) const {
    std::vector<int32_t> text = prefix_;
    text.insert(text.end(), tail.begin(), tail.end());
    return text;
  }
  virtual int32_t next(const std::vector<int32_t>& text) const {
    size_t best_length = 0;
    int32_t best = 0;
    for (size_t end = 1; end < text.size(); ++end) {
      size_t length = 0;
      while (length < end && text[end - 1 - length] == text[text.size() - 1 - length]) ++length;
      if (length >= best_length && length > 0) {
        best_length = length;
        best = text[end];
      }
    }
    return best;
  }
  std::vector<int32_t> prefix_;
};

// Always expects the same token.
class StubbornScorer : public CopyingScorer {
 public:
  explicit StubbornScorer(int32_t token) : token_(token) {}

 protected:
  int32_t next(const std::vector<int32_t>&) const override { return token_; }
  int32_t token_;
};

inline std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const oscar::Error& error) {
    return error.what();
  }
  return "no error";
}

// The number after "shortest usable length is".
inline size_t shortest_length_in(const std::string& message) {
  const std::string words = "shortest usable length is ";
  const size_t at = message.find(words);
  return at == std::string::npos ? 0 : std::stoul(message.substr(at + words.size()));
}

}  // namespace oscar_test
