#include "model/unicode_text.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace oscar {
namespace {

constexpr uint32_t kFirstCombiningMark = 0x300;  // below it nothing composes with its predecessor

uint8_t byte_at(std::string_view text, size_t position) {
  return static_cast<uint8_t>(text[position]);
}

// First position >= begin whose byte is not ASCII.
size_t skip_ascii(std::string_view text, size_t begin) {
  size_t position = begin;
  for (; position + 8 <= text.size(); position += 8) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + position, 8);
    if ((word & 0x8080808080808080ULL) != 0) break;
  }
  while (position < text.size() && byte_at(text, position) < 0x80) ++position;
  return position;
}

// Length of the UTF-8 sequence that may start with `lead`, and the range of its second byte
// (Unicode table 3-7); 0 for bytes that start nothing.
struct LeadByte {
  uint8_t length = 0, second_min = 0x80, second_max = 0xBF;
};
LeadByte lead_byte(uint8_t lead) {
  if (lead < 0x80) return {1};
  if (lead >= 0xC2 && lead <= 0xDF) return {2};
  if (lead == 0xE0) return {3, 0xA0, 0xBF};
  if (lead == 0xED) return {3, 0x80, 0x9F};  // no surrogates
  if (lead >= 0xE1 && lead <= 0xEF) return {3};
  if (lead == 0xF0) return {4, 0x90, 0xBF};
  if (lead == 0xF4) return {4, 0x80, 0x8F};  // at most U+10FFFF
  if (lead >= 0xF1 && lead <= 0xF3) return {4};
  return {};
}

utf8proc_category_t category(uint32_t code_point) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(code_point));
}

bool is_white_space(uint32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

CharClass compute_class(uint32_t code_point) {
  if (is_white_space(code_point)) return CharClass::kSpace;
  switch (category(code_point)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
      return CharClass::kLetter;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
      return CharClass::kNumber;
    default:
      return CharClass::kOther;
  }
}

bool is_mark(uint32_t code_point) {
  const utf8proc_category_t kind = category(code_point);
  return kind == UTF8PROC_CATEGORY_MN || kind == UTF8PROC_CATEGORY_MC ||
         kind == UTF8PROC_CATEGORY_ME;
}

// No normalization reaches across the start of such a character: it is neither a mark nor a Hangul
// vowel or trailing consonant (the only characters that compose with a predecessor).
bool starts_segment(uint32_t code_point) {
  if (code_point < kFirstCombiningMark) return true;
  if (code_point >= 0x1160 && code_point <= 0x11FF) return false;
  return !is_mark(code_point);
}

// Canonical decomposition of one segment, marks sorted by combining class, then composed.
class SegmentNormalizer {
 public:
  // Appends the normal form of the valid UTF-8 segment.
  void append(std::string_view segment, std::string& out) {
    code_points_.clear();
    for (size_t position = 0; position < segment.size();) {
      const CodePoint c = decode_utf8(segment, position);
      std::array<utf8proc_int32_t, 32> parts{};
      int boundary_class = UTF8PROC_BOUNDCLASS_START;
      const utf8proc_ssize_t count = utf8proc_decompose_char(
          static_cast<utf8proc_int32_t>(c.value), parts.data(),
          static_cast<utf8proc_ssize_t>(parts.size()), kOptions, &boundary_class);
      // A canonical decomposition has at most four code points; anything else is left as it is.
      if (count > 0 && count <= static_cast<utf8proc_ssize_t>(parts.size())) {
        code_points_.insert(code_points_.end(), parts.begin(), parts.begin() + count);
      } else {
        code_points_.push_back(static_cast<utf8proc_int32_t>(c.value));
      }
      position += c.num_bytes;
    }
    sort_marks();
    const utf8proc_ssize_t length = utf8proc_normalize_utf32(
        code_points_.data(), static_cast<utf8proc_ssize_t>(code_points_.size()), kOptions);
    for (utf8proc_ssize_t i = 0; i < length; ++i) {
      append_utf8(static_cast<uint32_t>(code_points_[static_cast<size_t>(i)]), out);
    }
  }

 private:
  static constexpr auto kOptions =
      static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);

  static int combining_class(utf8proc_int32_t c) {
    return utf8proc_get_property(c)->combining_class;
  }
  // utf8proc_decompose sorts by exchange, quadratic on long runs of marks; hence by hand.
  void sort_marks() {
    for (auto begin = code_points_.begin(); begin != code_points_.end();) {
      if (combining_class(*begin) == 0) {
        ++begin;
        continue;
      }
      auto end = std::find_if(begin, code_points_.end(),
                              [](utf8proc_int32_t c) { return combining_class(c) == 0; });
      std::stable_sort(begin, end, [](utf8proc_int32_t a, utf8proc_int32_t b) {
        return combining_class(a) < combining_class(b);
      });
      begin = end;
    }
  }
  std::vector<utf8proc_int32_t> code_points_;
};

// A single character that no other follows into its segment and that decomposes to nothing else.
bool is_inert(uint32_t code_point) {
  return code_point < kFirstCombiningMark ||
         utf8proc_get_property(static_cast<utf8proc_int32_t>(code_point))->decomp_seqindex ==
             UINT16_MAX;
}

}  // namespace

CodePoint decode_utf8(std::string_view text, size_t position) {
  const uint8_t lead = byte_at(text, position);
  if (lead < 0x80) return {lead, 1, true};
  const LeadByte kind = lead_byte(lead);
  if (kind.length == 0) return {};
  uint32_t value = lead & (0xFFU >> (kind.length + 1));
  for (uint8_t i = 1; i < kind.length; ++i) {
    const uint8_t low = i == 1 ? kind.second_min : uint8_t{0x80};
    const uint8_t high = i == 1 ? kind.second_max : uint8_t{0xBF};
    if (position + i >= text.size()) return {kReplacementCharacter, i, false};
    const uint8_t next = byte_at(text, position + i);
    if (next < low || next > high) return {kReplacementCharacter, i, false};
    value = (value << 6) | (next & 0x3FU);
  }
  return {value, kind.length, true};
}

void append_utf8(uint32_t code_point, std::string& out) {
  const auto put = [&out](uint32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (code_point < 0x80) {
    put(code_point);
  } else if (code_point < 0x800) {
    put(0xC0 | (code_point >> 6));
    put(0x80 | (code_point & 0x3F));
  } else if (code_point < 0x10000) {
    put(0xE0 | (code_point >> 12));
    put(0x80 | ((code_point >> 6) & 0x3F));
    put(0x80 | (code_point & 0x3F));
  } else {
    put(0xF0 | (code_point >> 18));
    put(0x80 | ((code_point >> 12) & 0x3F));
    put(0x80 | ((code_point >> 6) & 0x3F));
    put(0x80 | (code_point & 0x3F));
  }
}

CharClass char_class(uint32_t code_point) {
  static const std::array<CharClass, 0x300> low = [] {
    std::array<CharClass, 0x300> table{};
    for (uint32_t c = 0; c < table.size(); ++c) table[c] = compute_class(c);
    return table;
  }();
  return code_point < low.size() ? low[code_point] : compute_class(code_point);
}

bool is_word_character(uint32_t code_point) {
  const CharClass kind = char_class(code_point);
  return kind == CharClass::kLetter || kind == CharClass::kNumber || is_mark(code_point) ||
         category(code_point) == UTF8PROC_CATEGORY_PC;
}

size_t TextEdits::map(size_t position, bool is_end) const {
  // Last edit that begins before the position (for a begin: at or before it).
  const auto after = std::partition_point(edits_.begin(), edits_.end(), [&](const Edit& edit) {
    return is_end ? edit.out_begin < position : edit.out_begin <= position;
  });
  if (after == edits_.begin()) return position;
  const Edit& edit = *std::prev(after);
  const bool inside = is_end ? position <= edit.out_end : position < edit.out_end;
  if (inside) return is_end ? edit.in_end : edit.in_begin;
  return position - edit.out_end + edit.in_end;
}

std::pair<size_t, size_t> TextEdits::to_input(size_t begin, size_t end) const {
  if (edits_.empty()) return {begin, end};
  const size_t in_begin = map(begin, false);
  return {in_begin, std::max(in_begin, map(end, true))};
}

size_t replace_invalid_utf8(std::string_view text, std::string& out, TextEdits* edits) {
  size_t replaced = 0, copied = 0;
  for (size_t position = skip_ascii(text, 0); position < text.size();
       position = skip_ascii(text, position)) {
    const CodePoint c = decode_utf8(text, position);
    if (!c.valid) {
      if (replaced == 0) out.clear();
      ++replaced;
      out.append(text.substr(copied, position - copied));
      const size_t out_begin = out.size();
      append_utf8(kReplacementCharacter, out);
      if (edits != nullptr) edits->add(out_begin, out.size(), position, position + c.num_bytes);
      copied = position + c.num_bytes;
    }
    position += c.num_bytes;
  }
  if (replaced > 0) out.append(text.substr(copied));
  return replaced;
}

std::string to_valid_utf8(std::string_view text) {
  std::string out;
  return replace_invalid_utf8(text, out, nullptr) == 0 ? std::string(text) : out;
}

size_t count_invalid_utf8(std::string_view text) {
  std::string unused;
  return replace_invalid_utf8(text, unused, nullptr);
}

bool normalize_nfc(std::string_view text, std::string& out, TextEdits* edits) {
  SegmentNormalizer normalizer;
  std::string normal;
  bool changed = false;
  size_t copied = 0;
  for (size_t position = 0; position < text.size();) {
    const CodePoint first = decode_utf8(text, position);
    size_t end = position + first.num_bytes;
    size_t length = 1;
    for (; end < text.size(); ++length) {
      const CodePoint next = decode_utf8(text, end);
      if (starts_segment(next.value)) break;
      end += next.num_bytes;
    }
    if (length > 1 || !is_inert(first.value)) {
      normal.clear();
      const std::string_view segment = text.substr(position, end - position);
      normalizer.append(segment, normal);
      if (normal != segment) {
        if (!changed) out.clear();
        changed = true;
        out.append(text.substr(copied, position - copied));
        const size_t out_begin = out.size();
        out.append(normal);
        if (edits != nullptr) edits->add(out_begin, out.size(), position, end);
        copied = end;
      }
    }
    position = end;
  }
  if (changed) out.append(text.substr(copied));
  return changed;
}

std::string Utf8Stream::push(std::string_view bytes) {
  pending_.append(bytes);
  // Only a well-formed beginning of a sequence at the very end can still grow.
  size_t complete = pending_.size();
  for (size_t back = 1; back <= std::min<size_t>(3, pending_.size()); ++back) {
    const size_t start = pending_.size() - back;
    const uint8_t lead = byte_at(pending_, start);
    if ((lead & 0xC0) == 0x80) continue;
    const CodePoint c = decode_utf8(pending_, start);
    if (!c.valid && c.num_bytes == back && lead_byte(lead).length > back) complete = start;
    break;
  }
  std::string text = to_valid_utf8(std::string_view(pending_).substr(0, complete));
  pending_.erase(0, complete);
  return text;
}

std::string Utf8Stream::finish() {
  std::string text = to_valid_utf8(pending_);
  pending_.clear();
  return text;
}

}  // namespace oscar
