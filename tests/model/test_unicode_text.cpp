#include <utf8proc.h>

#include <catch2/catch.hpp>
#include <cstdlib>
#include <memory>

#include "base/random.h"
#include "model/unicode_text.h"

namespace oscar {
namespace {

std::string replacements(size_t count) {
  std::string text;
  for (size_t i = 0; i < count; ++i) append_utf8(kReplacementCharacter, text);
  return text;
}

std::string nfc(const std::string& text) {
  std::string out;
  return normalize_nfc(text, out, nullptr) ? out : text;
}

// The library's own normalization of a whole text.
std::string nfc_reference(const std::string& text) {
  utf8proc_uint8_t* raw = nullptr;
  const auto length =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                   static_cast<utf8proc_ssize_t>(text.size()), &raw,
                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  REQUIRE(length >= 0);
  std::string result(reinterpret_cast<const char*>(raw), static_cast<size_t>(length));
  std::free(raw);
  return result;
}

// Characters that compose, decompose, reorder or sit beside those that do.
const std::vector<uint32_t> kTrickyCharacters = {
    'a',    'e',    'o',    ' ',    '>',     0xC5,    0xE9,    0x300,   0x301,   0x302,  0x307,
    0x31B,  0x323,  0x338,  0x344,  0x345,   0x3B1,   0x3C9,   0x3F4,   0x958,   0x93C,  0x915,
    0x9BE,  0x9C7,  0x9D7,  0xB47,  0xB3E,   0xDD9,   0xDCF,   0xDCA,   0x1100,  0x1161, 0x11A8,
    0xAC00, 0xAC01, 0x1E69, 0x1EC7, 0x1F00,  0x2126,  0x212B,  0x2260,  0x304B,  0x3099, 0x4E2D,
    0xFA0E, 0xFB01, 0xFB1D, 0xFB2A, 0x1D15E, 0x1109A, 0x110BA, 0x2F800, 0x1F600, 0x200D, 0x20E3};

}  // namespace

TEST_CASE("ill-formed UTF-8 is replaced by maximal subparts") {
  // Unicode standard, tables 3-8 to 3-11.
  CHECK(to_valid_utf8("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41") == replacements(8) + "A");
  CHECK(to_valid_utf8("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41") == replacements(8) + "A");
  CHECK(to_valid_utf8("\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42") ==
        replacements(5) + "A" + replacements(2) + "B");
  CHECK(to_valid_utf8("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41") == replacements(4) + "A");
  CHECK(count_invalid_utf8("ok \xF0\x9F\x98\x80 \xFF") == 1);
  CHECK(count_invalid_utf8("plain text that is longer than eight bytes") == 0);

  std::string out = "untouched";
  TextEdits edits;
  CHECK(replace_invalid_utf8("gr\xC3\xBC\xC3\x9F", out, &edits) == 0);
  CHECK(out == "untouched");
  CHECK(edits.empty());
}

TEST_CASE("positions in repaired text lead back to the input") {
  std::string out;
  TextEdits edits;
  REQUIRE(replace_invalid_utf8("ab\xFF\x63\xE1\x80\x64", out, &edits) == 2);
  REQUIRE(out == "ab" + replacements(1) + "c" + replacements(1) + "d");
  using Range = std::pair<size_t, size_t>;
  CHECK(edits.to_input(0, 2) == Range{0, 2});
  CHECK(edits.to_input(2, 5) == Range{2, 3});
  CHECK(edits.to_input(2, 3) == Range{2, 3});  // part of the replacement: all of what it replaces
  CHECK(edits.to_input(4, 5) == Range{2, 3});
  CHECK(edits.to_input(5, 6) == Range{3, 4});
  CHECK(edits.to_input(1, 7) == Range{1, 6});
  CHECK(edits.to_input(6, 9) == Range{4, 6});
  CHECK(edits.to_input(9, 10) == Range{6, 7});
}

TEST_CASE("every code point survives encoding and decoding") {
  for (uint32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    std::string text;
    append_utf8(c, text);
    const CodePoint decoded = decode_utf8(text, 0);
    if (decoded.value != c || !decoded.valid || decoded.num_bytes != text.size()) {
      FAIL("code point " << c);
    }
  }
}

TEST_CASE("NFC of single characters and of random sequences") {
  CHECK(nfc("cafe\xCC\x81") == "caf\xC3\xA9");
  CHECK(nfc("\xE2\x84\xAB") == "\xC3\x85");                  // Angstrom sign
  CHECK(nfc("\xE0\xA5\x98") == "\xE0\xA4\x95\xE0\xA4\xBC");  // excluded from composition
  CHECK(nfc("\xE1\x84\x80\xE1\x85\xA1\xE1\x86\xA8") == "\xEA\xB0\x81");  // Hangul
  for (uint32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    std::string text = "x";
    append_utf8(c, text);
    if (nfc(text) != nfc_reference(text)) FAIL("code point " << c);
  }
  Random random(7);
  for (int round = 0; round < 5000; ++round) {
    std::string text;
    for (uint64_t left = random.below(12); left > 0; --left) {
      append_utf8(kTrickyCharacters[random.below(kTrickyCharacters.size())], text);
    }
    INFO(text);
    const std::string normal = nfc(text);
    REQUIRE(normal == nfc_reference(text));
    REQUIRE(nfc(normal) == normal);
  }
}

TEST_CASE("a megabyte of combining marks is normalized") {
  // The library's own decomposition needs quadratic time for alternating classes.
  std::string text = "a";
  for (int i = 0; i < 250000; ++i) text += "\xCC\x81\xCC\xA3";  // acute (230), dot below (220)
  const std::string normal = nfc(text);
  CHECK(normal.substr(0, 3) == "\xE1\xBA\xA1");  // a with dot below
  CHECK(normal.size() == 3 + 2 * 499999);
}

TEST_CASE("positions in normalized text lead back to the input") {
  std::string out;
  TextEdits edits;
  REQUIRE(normalize_nfc("ae\xCC\x81z", out, &edits));
  REQUIRE(out == "a\xC3\xA9z");
  using Range = std::pair<size_t, size_t>;
  CHECK(edits.to_input(0, 1) == Range{0, 1});
  CHECK(edits.to_input(1, 3) == Range{1, 4});
  CHECK(edits.to_input(2, 3) == Range{1, 4});
  CHECK(edits.to_input(3, 4) == Range{4, 5});
}

TEST_CASE("a stream of bytes gives the text of the whole, however it is cut") {
  const std::string bytes =
      "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\xF0\x9F\x98\x41\xFF\xE1\x80\x42\xED\xA0\x80\xF0\x9F";
  const std::string whole = to_valid_utf8(bytes);
  Random random(3);
  for (int round = 0; round < 500; ++round) {
    Utf8Stream stream;
    std::string text;
    for (size_t position = 0; position < bytes.size();) {
      const size_t count = 1 + random.below(3);
      const std::string part = stream.push(std::string_view(bytes).substr(position, count));
      CHECK(count_invalid_utf8(part) == 0);
      text += part;
      CHECK(whole.starts_with(text));
      position += count;
    }
    text += stream.finish();
    REQUIRE(text == whole);
  }
  Utf8Stream stream;  // nothing complete is held back
  CHECK(stream.push("a\xC3") == "a");
  CHECK(stream.push("\xA9\xE2") == "\xC3\xA9");
  CHECK(stream.finish() == replacements(1));
}

TEST_CASE("white space is the Unicode property") {
  size_t count = 0;
  for (uint32_t c = 0; c <= 0x10FFFF; ++c) count += char_class(c) == CharClass::kSpace ? 1 : 0;
  CHECK(count == 25);
  CHECK(char_class(0x85) == CharClass::kSpace);
  CHECK(char_class(0x180E) == CharClass::kOther);  // Mongolian vowel separator
  CHECK(char_class(0x301) == CharClass::kOther);   // marks are not letters
  CHECK(is_word_character(0x301));
  CHECK(is_word_character('_'));
  CHECK_FALSE(is_word_character('-'));
}

}  // namespace oscar
