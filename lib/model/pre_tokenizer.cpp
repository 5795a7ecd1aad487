#include "model/pre_tokenizer.h"

#include "base/error.h"
#include "model/unicode_text.h"

namespace oscar {
namespace {

struct Char {
  uint32_t value = 0;
  CharClass kind = CharClass::kOther;
  size_t end = 0;  // position behind it
};

bool is_line_break(uint32_t c) { return c == '\r' || c == '\n'; }

// The alternatives of the patterns, tried at one position; every function returns the end of its
// match, or the position itself when it does not match.
class Scanner {
 public:
  explicit Scanner(std::string_view text) : text_(text) {}

  size_t size() const { return text_.size(); }
  bool at_end(size_t position) const { return position >= text_.size(); }
  Char at(size_t position) const {
    const auto byte = static_cast<uint8_t>(text_[position]);
    if (byte < 0x80) return {byte, char_class(byte), position + 1};
    const CodePoint c = decode_utf8(text_, position);
    return {c.value, char_class(c.value), position + c.num_bytes};
  }
  bool is(size_t position, CharClass kind) const {
    return !at_end(position) && at(position).kind == kind;
  }
  size_t run(size_t position, CharClass kind) const {
    while (!at_end(position)) {
      const Char c = at(position);
      if (c.kind != kind) break;
      position = c.end;
    }
    return position;
  }

  // 's|'t|'re|'ve|'m|'ll|'d at an apostrophe; ignore_case as (?i:...), where U+017F (long s) also
  // folds to s.
  size_t contraction(size_t position, bool ignore_case) const {
    if (position + 1 >= text_.size() || text_[position] != '\'') return position;
    const Char first = at(position + 1);
    const uint32_t a = fold(first.value, ignore_case);
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return first.end;
    if (at_end(first.end)) return position;
    const Char second = at(first.end);
    const uint32_t b = fold(second.value, ignore_case);
    const bool pair = (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l');
    return pair ? second.end : position;
  }

  // \s+(?!\S)|\s+ with `run_end` the end of the whitespace run at position: the run without its
  // last character when text follows, unless that would be empty.
  size_t spaces(size_t position, size_t run_end) const {
    if (at_end(run_end)) return run_end;
    size_t last = run_end - 1;  // start of the last character of the run
    while (last > position && (static_cast<uint8_t>(text_[last]) & 0xC0) == 0x80) --last;
    return last > position ? last : run_end;
  }

  // End of the last line break in [position, run_end); position when there is none.
  size_t last_line_break(size_t position, size_t run_end) const {
    for (size_t end = run_end; end > position; --end) {
      if (is_line_break(static_cast<uint8_t>(text_[end - 1]))) return end;
    }
    return position;
  }

 private:
  static uint32_t fold(uint32_t c, bool ignore_case) {
    if (!ignore_case) return c;
    if (c >= 'A' && c <= 'Z') return c - 'A' + 'a';
    return c == 0x17F ? uint32_t{'s'} : c;
  }
  std::string_view text_;
};

// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
size_t gpt2_piece(const Scanner& text, size_t begin) {
  const size_t contraction = text.contraction(begin, false);
  if (contraction != begin) return contraction;
  const Char first = text.at(begin);
  if (first.kind != CharClass::kSpace) return text.run(first.end, first.kind);
  if (first.value == ' ' && !text.at_end(first.end)) {
    const CharClass next = text.at(first.end).kind;
    if (next != CharClass::kSpace) return text.run(first.end, next);
  }
  return text.spaces(begin, text.run(begin, CharClass::kSpace));
}

// (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,max}| ?[^\s\p{L}\p{N}]+[\r\n]*|
// \s*[\r\n]+|\s+(?!\S)|\s+
size_t qwen2_piece(const Scanner& text, size_t begin, int max_digits) {
  const size_t contraction = text.contraction(begin, true);
  if (contraction != begin) return contraction;
  const Char first = text.at(begin);
  if (first.kind == CharClass::kLetter) return text.run(first.end, CharClass::kLetter);
  if (first.kind == CharClass::kNumber) {
    size_t end = first.end;
    for (int i = 1; i < max_digits && text.is(end, CharClass::kNumber); ++i) end = text.at(end).end;
    return end;
  }
  if (!is_line_break(first.value) && text.is(first.end, CharClass::kLetter)) {
    return text.run(first.end, CharClass::kLetter);
  }
  if (first.kind == CharClass::kOther ||
      (first.value == ' ' && text.is(first.end, CharClass::kOther))) {
    size_t end = text.run(first.end, CharClass::kOther);
    while (!text.at_end(end) && is_line_break(text.at(end).value)) ++end;
    return end;
  }
  const size_t run_end = text.run(begin, CharClass::kSpace);
  const size_t line_break = text.last_line_break(begin, run_end);
  return line_break != begin ? line_break : text.spaces(begin, run_end);
}

void gpt2_pieces(std::string_view text, size_t shift, std::vector<size_t>& piece_ends) {
  const Scanner scanner(text);
  for (size_t position = 0; position < text.size();) {
    position = gpt2_piece(scanner, position);
    piece_ends.push_back(shift + position);
  }
}

void smollm_pieces(std::string_view text, std::vector<size_t>& piece_ends) {
  const Scanner scanner(text);
  size_t begin = 0;  // of the text since the last number
  for (size_t position = 0; position < text.size();) {
    const Char c = scanner.at(position);
    if (c.kind == CharClass::kNumber) {
      gpt2_pieces(text.substr(begin, position - begin), begin, piece_ends);
      piece_ends.push_back(c.end);
      begin = c.end;
    }
    position = c.end;
  }
  gpt2_pieces(text.substr(begin), begin, piece_ends);
}

}  // namespace

const char* pre_tokenizer_pattern(PreTokenizer kind) {
  switch (kind) {
    case PreTokenizer::kGpt2:
    case PreTokenizer::kSmollm:
      return R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
    case PreTokenizer::kQwen2:
      return R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
    case PreTokenizer::kLlamaBpe:
      return R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  }
  fail("unknown pre-tokenizer");
}

void pre_tokenize(PreTokenizer kind, std::string_view text, std::vector<size_t>& piece_ends) {
  if (kind == PreTokenizer::kGpt2) return gpt2_pieces(text, 0, piece_ends);
  if (kind == PreTokenizer::kSmollm) return smollm_pieces(text, piece_ends);
  const int max_digits = kind == PreTokenizer::kQwen2 ? 1 : 3;
  const Scanner scanner(text);
  for (size_t position = 0; position < text.size();) {
    position = qwen2_piece(scanner, position, max_digits);
    piece_ends.push_back(position);
  }
}

}  // namespace oscar
