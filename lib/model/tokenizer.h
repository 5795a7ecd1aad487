// Byte-level BPE tokenizer read from a GGUF file or a tokenizer.json (formats.md 12).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace oscar {

class Tokenizer {
 public:
  // path: .gguf file, tokenizer.json, or a folder that holds one. Throws Error naming file and
  // entry.
  static std::shared_ptr<const Tokenizer> load(const std::string& path);
  virtual ~Tokenizer() = default;

  // Ids of the text, without BOS/EOS. parse_special: special added tokens inside the text become
  // their ids. Invalid UTF-8 is replaced (U+FFFD); count_invalid_utf8 (model/unicode_text.h) says
  // how often.
  virtual std::vector<int32_t> encode(std::string_view text, bool parse_special) const = 0;
  // Bytes of the tokens, concatenated (may end inside a UTF-8 sequence; Utf8Stream and
  // to_valid_utf8 make text of them). skip_special: special tokens give nothing. Ids that have no
  // token (padding of a model's vocabulary) give nothing; throws Error on negative ids.
  virtual std::string decode(const std::vector<int32_t>& ids, bool skip_special = false) const = 0;
  // Character offsets: for each id of encode(text), the byte range [begin, end) of the *input* text
  // it covers. Where normalization or UTF-8 repair changed the text, the whole changed character
  // sequence counts. ids may be null.
  virtual std::vector<std::pair<size_t, size_t>> offsets(std::string_view text, bool parse_special,
                                                         std::vector<int32_t>* ids) const = 0;
  virtual size_t vocab_size() const = 0;
  virtual size_t num_merges() const = 0;
  virtual int64_t bos_id() const = 0;  // -1: none
  virtual bool add_bos() const = 0;
  virtual std::vector<int64_t> stop_ids() const = 0;  // eos, eot and the template's end markers
  virtual std::string pre_tokenizer() const = 0;      // "smollm", "qwen2", ...
  // Of everything that decides ids: vocabulary, merges, added tokens, pre-tokenizer, normalizer.
  virtual std::string sha256() const = 0;
  virtual std::string chat_template() const = 0;  // Jinja text of the file, may be empty
};

// Ids of a prompt (a rendered chat or plain text) with exactly one BOS where the model defines one:
// none is added when the text brings its own.
std::vector<int32_t> encode_prompt(const Tokenizer& tokenizer, std::string_view text,
                                   bool parse_special = true);

struct ChatMessage {
  std::string role;  // system, user, assistant
  std::string content;
};

struct ChatOptions {
  // Empty = recognize from tokenizer.chat_template(); else one of chat_template_names().
  std::string template_name;
  bool add_generation_prompt = true;
  bool thinking = true;              // Qwen3, GLM-4.6: false asks for an answer without reasoning
  std::string date = "26 Jul 2024";  // Llama 3.1 and 3.2 write it into the system turn
};

// Renders a conversation (formats.md 13). Throws Error naming --chat-template when the template is
// not recognized, and on unknown roles or an empty conversation.
std::string render_chat(const Tokenizer& tokenizer, const std::vector<ChatMessage>& messages,
                        const ChatOptions& options);
std::string render_chat(const Tokenizer& tokenizer, const std::vector<ChatMessage>& messages,
                        bool add_generation_prompt, const std::string& template_name = "");

// chatml, smollm2, qwen2.5, qwen3, qwen3-thinking, llama3, llama3.1, glm4, glm4.6
std::vector<std::string> chat_template_names();

}  // namespace oscar
