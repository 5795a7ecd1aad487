// Text as the tokenizer sees it: UTF-8 repair, NFC, character classes, each with the way back to
// the bytes of the input.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace oscar {

inline constexpr uint32_t kReplacementCharacter = 0xFFFD;

struct CodePoint {
  uint32_t value = kReplacementCharacter;
  uint8_t num_bytes = 1;  // bytes it takes in the text, >= 1
  bool valid = false;     // false: num_bytes are one maximal ill-formed subpart (Unicode 3.9)
};

// The code point at the start of text[position..). position < text.size().
CodePoint decode_utf8(std::string_view text, size_t position);
void append_utf8(uint32_t code_point, std::string& out);

// What the pre-tokenizers distinguish: \p{L}, \p{N}, \s (White_Space) and the rest.
enum class CharClass : uint8_t { kLetter, kNumber, kSpace, kOther };
CharClass char_class(uint32_t code_point);
// Regex \w: letters, marks, decimal digits and other numbers, connector punctuation.
bool is_word_character(uint32_t code_point);

// Where a changed text came from: replaced ranges; everything between them is only shifted.
class TextEdits {
 public:
  // Ranges must be added in order; both may have any length.
  void add(size_t out_begin, size_t out_end, size_t in_begin, size_t in_end) {
    edits_.push_back({out_begin, out_end, in_begin, in_end});
  }
  bool empty() const { return edits_.empty(); }
  // Input range that the output range [begin, end) covers; a replaced range counts as a whole.
  std::pair<size_t, size_t> to_input(size_t begin, size_t end) const;

 private:
  struct Edit {
    size_t out_begin, out_end, in_begin, in_end;
  };
  size_t map(size_t position, bool is_end) const;
  std::vector<Edit> edits_;
};

// Valid UTF-8: every maximal ill-formed subpart becomes U+FFFD. Returns the number of replacements
// (0: `out` and `edits` are untouched, the text is used as it is). edits may be null.
size_t replace_invalid_utf8(std::string_view text, std::string& out, TextEdits* edits);
std::string to_valid_utf8(std::string_view text);
size_t count_invalid_utf8(std::string_view text);

// Normalization form C of valid UTF-8. Returns false (and leaves `out` and `edits` alone) when the
// text is in that form already. Linear but for the sorting of runs of combining marks. edits may
// be null.
bool normalize_nfc(std::string_view text, std::string& out, TextEdits* edits);

// Bytes arriving in pieces (streamed tokens) -> valid UTF-8 text; the concatenation of all results
// equals to_valid_utf8 of all bytes.
class Utf8Stream {
 public:
  // Text that no later byte can change.
  std::string push(std::string_view bytes);
  // The rest: an unfinished sequence becomes U+FFFD.
  std::string finish();

 private:
  std::string pending_;
};

}  // namespace oscar
