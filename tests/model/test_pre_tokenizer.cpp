// The hand-written scanners against the published regular expressions run by PCRE2.
#include "model/pre_tokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <utf8proc.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <memory>

#include "base/random.h"
#include "model/unicode_text.h"

namespace oscar {
namespace {

class Regex {
 public:
  explicit Regex(const std::string& pattern) {
    int error = 0;
    PCRE2_SIZE offset = 0;
    code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                              PCRE2_UTF | PCRE2_UCP, &error, &offset, nullptr));
    REQUIRE(code_ != nullptr);
    pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE);
    match_.reset(pcre2_match_data_create_from_pattern(code_.get(), nullptr));
  }
  // Ends of the matches and of the gaps between them, in the text from `shift` on.
  void split(std::string_view text, size_t shift, std::vector<size_t>& ends) const {
    size_t position = 0;
    while (position < text.size()) {
      const int found =
          pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), position,
                      PCRE2_NO_UTF_CHECK, match_.get(), nullptr);
      if (found == PCRE2_ERROR_NOMATCH) {
        ends.push_back(shift + text.size());
        return;
      }
      const PCRE2_SIZE* range = pcre2_get_ovector_pointer(match_.get());
      if (found < 0 || range[1] <= range[0]) FAIL("PCRE2: " << found);
      if (range[0] > position) ends.push_back(shift + range[0]);
      ends.push_back(shift + range[1]);
      position = range[1];
    }
  }

  bool matches(std::string_view text) const {
    return pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), 0,
                       PCRE2_NO_UTF_CHECK, match_.get(), nullptr) > 0;
  }

 private:
  struct Free {
    void operator()(pcre2_code* code) const { pcre2_code_free(code); }
    void operator()(pcre2_match_data* match) const { pcre2_match_data_free(match); }
  };
  std::unique_ptr<pcre2_code, Free> code_;
  std::unique_ptr<pcre2_match_data, Free> match_;
};

// PCRE2's \s also takes U+180E, which lost its White_Space property in Unicode 6.3.
std::string with_white_space(std::string pattern) {
  const std::string members = R"(\x09-\x0d\x20\x85\xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029})"
                              R"(\x{202f}\x{205f}\x{3000})";
  const auto replace = [&](const std::string& from, const std::string& to) {
    for (size_t at = pattern.find(from); at != std::string::npos;
         at = pattern.find(from, at + to.size())) {
      pattern.replace(at, from.size(), to);
    }
  };
  replace(R"([^\s)", "[^" + members);
  replace(R"(\s)", "[" + members + "]");
  replace(R"(\S)", "[^" + members + "]");
  return pattern;
}

std::vector<size_t> reference(PreTokenizer kind, const std::string& text) {
  static const Regex numbers(R"(\p{N})");
  static const Regex gpt2(with_white_space(pre_tokenizer_pattern(PreTokenizer::kGpt2)));
  static const Regex qwen2(with_white_space(pre_tokenizer_pattern(PreTokenizer::kQwen2)));
  static const Regex llama(with_white_space(pre_tokenizer_pattern(PreTokenizer::kLlamaBpe)));
  std::vector<size_t> ends;
  switch (kind) {
    case PreTokenizer::kGpt2:
      gpt2.split(text, 0, ends);
      break;
    case PreTokenizer::kQwen2:
      qwen2.split(text, 0, ends);
      break;
    case PreTokenizer::kLlamaBpe:
      llama.split(text, 0, ends);
      break;
    case PreTokenizer::kSmollm: {
      std::vector<size_t> outer;
      numbers.split(text, 0, outer);
      size_t begin = 0;
      for (const size_t end : outer) {
        gpt2.split(std::string_view(text).substr(begin, end - begin), begin, ends);
        begin = end;
      }
      break;
    }
  }
  return ends;
}

std::vector<size_t> actual(PreTokenizer kind, const std::string& text) {
  std::vector<size_t> ends;
  pre_tokenize(kind, text, ends);
  return ends;
}

constexpr PreTokenizer kKinds[] = {PreTokenizer::kGpt2, PreTokenizer::kSmollm, PreTokenizer::kQwen2,
                                   PreTokenizer::kLlamaBpe};

// Everything the patterns tell apart, the frequent ones several times.
const std::vector<uint32_t> kAlphabet = {
    'a',    'b',     's',    't',    'r',    'e',    'v',  'l',   'm',  'd',   'S',
    'T',    'L',     'E',    'R',    'V',    '\'',   '\'', '\'',  '\'', ' ',   ' ',
    ' ',    ' ',     '\n',   '\n',   '\r',   '\t',   '1',  '2',   '3',  '.',   ',',
    '!',    '_',     0x85,   0xA0,   0x17F,  0x2028, 0xE9, 0x301, 0xB2, 0x967, 0x4E2D,
    0x3000, 0x1F600, 0x2167, 0x180E, 0xFE0F, 0x200D, 0};

}  // namespace

TEST_CASE("pre-tokenizers agree with PCRE2 on random texts") {
  Random random(11);
  for (int round = 0; round < 20000; ++round) {
    std::string text;
    for (uint64_t left = 1 + random.below(14); left > 0; --left) {
      append_utf8(kAlphabet[random.below(kAlphabet.size())], text);
    }
    for (const PreTokenizer kind : kKinds) {
      INFO("kind " << static_cast<int>(kind) << ", text \"" << text << '"');
      REQUIRE(actual(kind, text) == reference(kind, text));
    }
  }
}

TEST_CASE("pre-tokenizers agree with PCRE2 on every code point") {
  const Regex unassigned(R"(\p{Cn})");
  size_t compared = 0;
  for (uint32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    // The two libraries may know different versions of Unicode: what one of them does not know yet
    // is not compared.
    if (utf8proc_category(static_cast<utf8proc_int32_t>(c)) == UTF8PROC_CATEGORY_CN) continue;
    std::string one;
    append_utf8(c, one);
    if (c >= 0x80 && unassigned.matches(one)) continue;
    ++compared;
    const std::string text = "a" + one + one + " " + one + "1'" + one;
    for (const PreTokenizer kind : kKinds) {
      if (actual(kind, text) == reference(kind, text)) continue;
      FAIL_CHECK("code point " << std::hex << c << ", kind " << static_cast<int>(kind));
    }
  }
  CHECK(compared > 280000);
}

TEST_CASE("pieces tile the text and empty text has none") {
  for (const PreTokenizer kind : kKinds) {
    CHECK(actual(kind, "").empty());
    const std::vector<size_t> ends = actual(kind, "It's 2026,  isn't it?\n\n");
    CHECK(ends.back() == 23);
    CHECK(std::is_sorted(ends.begin(), ends.end()));
  }
  CHECK(actual(PreTokenizer::kSmollm, "a  12") == std::vector<size_t>{1, 3, 4, 5});
  CHECK(actual(PreTokenizer::kGpt2, "a  12") == std::vector<size_t>{1, 2, 5});
  CHECK(actual(PreTokenizer::kLlamaBpe, "12345") == std::vector<size_t>{3, 5});
  CHECK(actual(PreTokenizer::kQwen2, "x \n\n  y") == std::vector<size_t>{1, 4, 5, 7});
}

}  // namespace oscar
