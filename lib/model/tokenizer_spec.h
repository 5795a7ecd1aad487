// What a tokenizer file says, in one form for GGUF and tokenizer.json; filled by the two readers.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "model/pre_tokenizer.h"

namespace oscar {

enum class TokenKind : uint8_t {
  kNormal,       // text in the byte alphabet, reached through merges
  kControl,      // special added token, raw text
  kUserDefined,  // added token that is always matched, raw text
  kUnused,       // a hole or padding: never matched, decodes to nothing
  kByte          // "<0x41>": decodes to one byte, never matched
};

struct AddedToken {
  int32_t id = 0;
  std::string content;  // raw text
  bool special = true;
  bool lstrip = false, rstrip = false;  // the match swallows white space before / after it
  bool single_word = false;             // no match next to a word character
  bool normalized = false;              // matched in the normalized text
};

struct TokenizerSpec {
  std::string file;  // for messages
  std::vector<std::string> tokens;
  std::vector<TokenKind> kinds;  // as many as tokens
  std::vector<std::pair<std::string, std::string>> merges;
  std::vector<AddedToken> added;
  PreTokenizer pre_tokenizer = PreTokenizer::kGpt2;
  std::string pre_tokenizer_name;
  bool nfc = false;
  bool ignore_merges = false;
  int64_t bos_id = -1;
  bool add_bos = false;
  std::vector<int64_t> eos_ids;
  std::string chat_template;  // Jinja text, may be empty
};

// GGUF metadata of a .gguf file, or tokenizer.json with the configuration files beside it. Both
// throw Error naming the file and the entry or key.
TokenizerSpec read_gguf_tokenizer(const std::string& path);
TokenizerSpec read_json_tokenizer(const std::string& path);

// The pre-tokenizer of a `tokenizer.ggml.pre` name. Throws Error naming `file` when it is unknown.
PreTokenizer pre_tokenizer_of(const std::string& name, const std::string& file);

}  // namespace oscar
