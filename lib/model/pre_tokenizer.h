// Cuts text into the pieces inside which byte-level BPE merges (formats.md 12): hand-written
// scanners equivalent to the published regular expressions.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace oscar {

enum class PreTokenizer { kGpt2, kSmollm, kQwen2, kLlamaBpe };

// The regular expression that defines a pre-tokenizer (PCRE2 syntax with UTF and UCP). kSmollm
// applies it inside the pieces left after cutting out every \p{N} alone.
const char* pre_tokenizer_pattern(PreTokenizer kind);

// Appends the end of every piece of the valid UTF-8 text (byte positions, ascending, the last one
// is text.size()); the pieces tile the text. Linear time.
void pre_tokenize(PreTokenizer kind, std::string_view text, std::vector<size_t>& piece_ends);

}  // namespace oscar
