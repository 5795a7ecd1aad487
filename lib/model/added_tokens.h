// Finds added tokens in a text: one left-to-right scan, the longest match at each position
// (formats.md 12).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "model/tokenizer_spec.h"

namespace oscar {

class AddedTokens {
 public:
  // nfc: the contents of `normalized` tokens are normalized before matching. Throws Error naming
  // the file and the entry: empty content, id outside the vocabulary, repeated content.
  AddedTokens(const TokenizerSpec& spec, bool nfc);

  struct Match {
    size_t begin = 0,
           end = 0;  // bytes of the text, white space swallowed by lstrip/rstrip included
    int32_t id = 0;
  };
  // Matches in the valid UTF-8 text, ascending, not overlapping. special: special tokens match
  // too. normalized: only the tokens that match in normalized text, or only the others.
  std::vector<Match> find(std::string_view text, bool special, bool normalized) const;

  bool any_normalized() const { return any_normalized_; }
  const std::vector<AddedToken>& tokens() const { return tokens_; }
  // Id of the added token with this content, -1 = none.
  int64_t id_of(std::string_view content) const;
  bool is_special(int32_t id) const;

 private:
  bool accepts(const AddedToken& token, std::string_view text, size_t begin) const;

  std::vector<AddedToken> tokens_;
  std::array<std::vector<size_t>, 256> by_first_byte_;  // indices, longest content first
  std::vector<bool> special_;                           // by id
  bool any_normalized_ = false;
};

}  // namespace oscar
