#include "model/added_tokens.h"

#include <algorithm>
#include <unordered_set>

#include "base/error.h"
#include "model/unicode_text.h"

namespace oscar {
namespace {

// Start of the last character before `end`.
size_t previous_character(std::string_view text, size_t end) {
  size_t begin = end - 1;
  while (begin > 0 && (static_cast<uint8_t>(text[begin]) & 0xC0) == 0x80) --begin;
  return begin;
}

bool is_space(std::string_view text, size_t position) {
  return char_class(decode_utf8(text, position).value) == CharClass::kSpace;
}

bool is_word(std::string_view text, size_t position) {
  return is_word_character(decode_utf8(text, position).value);
}

}  // namespace

AddedTokens::AddedTokens(const TokenizerSpec& spec, bool nfc)
    : tokens_(spec.added), special_(spec.tokens.size()) {
  std::unordered_set<std::string_view> seen;
  for (size_t i = 0; i < tokens_.size(); ++i) {
    AddedToken& token = tokens_[i];
    OSCAR_CHECK(!token.content.empty(), spec.file, ": added token ", i, " has no content");
    OSCAR_CHECK(token.id >= 0 && static_cast<size_t>(token.id) < special_.size(), spec.file,
                ": added token ", i, " (\"", token.content, "\") has id ", token.id,
                ", outside the vocabulary of ", special_.size());
    if (token.normalized && nfc) {
      std::string normal;
      if (normalize_nfc(token.content, normal, nullptr)) token.content = std::move(normal);
    }
    any_normalized_ = any_normalized_ || token.normalized;
    special_[static_cast<size_t>(token.id)] = token.special;
  }
  for (size_t i = 0; i < tokens_.size(); ++i) {
    const AddedToken& token = tokens_[i];
    OSCAR_CHECK(seen.insert(token.content).second, spec.file, ": added token ", i, " (\"",
                token.content, "\") appears twice");
    by_first_byte_[static_cast<uint8_t>(token.content[0])].push_back(i);
  }
  for (std::vector<size_t>& indices : by_first_byte_) {
    std::stable_sort(indices.begin(), indices.end(), [this](size_t a, size_t b) {
      return tokens_[a].content.size() > tokens_[b].content.size();
    });
  }
}

bool AddedTokens::accepts(const AddedToken& token, std::string_view text, size_t begin) const {
  if (text.compare(begin, token.content.size(), token.content) != 0) return false;
  if (!token.single_word) return true;
  const size_t end = begin + token.content.size();
  return (begin == 0 || !is_word(text, previous_character(text, begin))) &&
         (end == text.size() || !is_word(text, end));
}

std::vector<AddedTokens::Match> AddedTokens::find(std::string_view text, bool special,
                                                  bool normalized) const {
  std::vector<Match> matches;
  size_t previous_end = 0;
  for (size_t position = 0; position < text.size();) {
    const std::vector<size_t>& candidates = by_first_byte_[static_cast<uint8_t>(text[position])];
    const auto found = std::find_if(candidates.begin(), candidates.end(), [&](size_t index) {
      const AddedToken& token = tokens_[index];
      return token.normalized == normalized && (special || !token.special) &&
             accepts(token, text, position);
    });
    if (found == candidates.end()) {
      ++position;
      continue;
    }
    const AddedToken& token = tokens_[*found];
    Match match{position, position + token.content.size(), token.id};
    if (token.lstrip) {
      while (match.begin > previous_end) {
        const size_t before = previous_character(text, match.begin);
        if (!is_space(text, before)) break;
        match.begin = before;
      }
    }
    if (token.rstrip) {
      while (match.end < text.size() && is_space(text, match.end)) {
        match.end += decode_utf8(text, match.end).num_bytes;
      }
    }
    matches.push_back(match);
    position = previous_end = match.end;
  }
  return matches;
}

int64_t AddedTokens::id_of(std::string_view content) const {
  const auto found = std::find_if(tokens_.begin(), tokens_.end(), [&](const AddedToken& token) {
    return token.content == content;
  });
  return found == tokens_.end() ? -1 : found->id;
}

bool AddedTokens::is_special(int32_t id) const { return special_[static_cast<size_t>(id)]; }

}  // namespace oscar
