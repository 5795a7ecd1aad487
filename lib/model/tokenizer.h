// Byte-level BPE tokenizer read from a GGUF file or a tokenizer.json (formats.md 12).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace oscar {

class Tokenizer {
 public:
  // path: .gguf file, tokenizer.json, or a folder that holds one. Throws Error naming file and
  // entry.
  static std::shared_ptr<const Tokenizer> load(const std::string& path);
  virtual ~Tokenizer() = default;

  // Ids of the text, without BOS/EOS. parse_special: special added tokens inside the text become
  // their ids. Invalid UTF-8 is replaced (U+FFFD).
  virtual std::vector<int32_t> encode(std::string_view text, bool parse_special) const = 0;
  // Bytes of the tokens, concatenated (may end inside a UTF-8 sequence). skip_special: special
  // tokens give nothing.
  virtual std::string decode(const std::vector<int32_t>& ids, bool skip_special = false) const = 0;
  // Character offsets: for each id of encode(text), the byte range [begin, end) of the *input* text
  // it covers.
  virtual std::vector<std::pair<size_t, size_t>> offsets(std::string_view text, bool parse_special,
                                                         std::vector<int32_t>* ids) const = 0;
  virtual size_t vocab_size() const = 0;
  virtual int64_t bos_id() const = 0;  // -1: none
  virtual bool add_bos() const = 0;
  virtual std::vector<int64_t> stop_ids() const = 0;  // eos, eot and the template's end markers
  virtual std::string pre_tokenizer() const = 0;      // "smollm", "qwen2", ...
  virtual std::string sha256() const = 0;             // of vocabulary, merges and added tokens
  virtual std::string chat_template() const = 0;      // Jinja text of the file, may be empty
};

struct ChatMessage {
  std::string role;  // system, user, assistant
  std::string content;
};

// Renders a conversation with the recognized template (formats.md 13). template_name empty =
// recognize from tokenizer.chat_template(); else chatml, smollm2, qwen2.5, qwen3. Throws Error
// naming --chat-template when the template is not recognized.
std::string render_chat(const Tokenizer& tokenizer, const std::vector<ChatMessage>& messages,
                        bool add_generation_prompt, const std::string& template_name = "");

}  // namespace oscar
