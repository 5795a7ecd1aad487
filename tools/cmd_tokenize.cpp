#include "tools/cmd_tokenize.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "model/tokenizer.h"
#include "model/unicode_text.h"
#include "tools/commands.h"
#include "tools/console.h"

namespace oscar {
namespace {

std::string read_text(const TokenizeOptions& options) {
  OSCAR_CHECK(options.text.empty() != options.file.empty(),
              "tokenize: expected either TEXT or --text FILE");
  if (!options.text.empty()) return options.text;
  std::ifstream file(options.file, std::ios::binary);
  OSCAR_CHECK(file.good(), options.file, ": cannot be read");
  std::string text(std::istreambuf_iterator<char>(file), {});
  OSCAR_CHECK(!file.bad(), options.file, ": cannot be read");
  return text;
}

// The bytes with line breaks and other control characters made visible.
std::string visible(const std::string& bytes) {
  std::string text;
  for (const char c : to_valid_utf8(bytes)) {
    if (c == '\n') {
      text += "\\n";
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
      text += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    } else {
      text += c;
    }
  }
  return text;
}

std::string table(const Tokenizer& tokenizer, const std::string& text, bool special) {
  std::vector<int32_t> ids;
  const auto spans = tokenizer.offsets(text, special, &ids);
  std::string lines = fmt::format("{:>8}  {:>15}  token\n", "id", "bytes");
  for (size_t i = 0; i < ids.size(); ++i) {
    lines += fmt::format("{:>8}  {:>15}  \"{}\"\n", ids[i],
                         fmt::format("{}..{}", spans[i].first, spans[i].second),
                         visible(tokenizer.decode({ids[i]})));
  }
  return lines;
}

std::string counts(const Tokenizer& tokenizer, const std::string& text, bool special) {
  const auto start = std::chrono::steady_clock::now();
  const size_t count = tokenizer.encode(text, special).size();
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  const auto bytes = static_cast<double>(text.size());
  return fmt::format(
      "{} tokens, {} bytes, {:.3g} bytes a token, {:.3g} MB/s\n"
      "pre-tokenizer {}, vocabulary {}, merges {}, sha256 {}\n",
      count, text.size(), bytes / static_cast<double>(std::max<size_t>(count, 1)),
      bytes / 1e6 / elapsed.count(), tokenizer.pre_tokenizer(), tokenizer.vocab_size(),
      tokenizer.num_merges(), tokenizer.sha256());
}

}  // namespace

TokenizeOutput run_tokenize(const TokenizeOptions& options) {
  const int forms = static_cast<int>(options.ids) + static_cast<int>(options.count) +
                    static_cast<int>(options.json);
  OSCAR_CHECK(forms <= 1, "tokenize: --ids, --count and --json exclude each other");
  std::string text = read_text(options);
  const auto tokenizer = Tokenizer::load(options.model);
  TokenizeOutput output;
  const size_t invalid = count_invalid_utf8(text);
  if (invalid > 0) {
    output.warning = fmt::format("{} invalid UTF-8 sequences are read as U+FFFD", invalid);
  }
  if (options.chat || !options.chat_template.empty()) {
    text = render_chat(*tokenizer, {{"user", text}}, true, options.chat_template);
  }
  const bool special = !options.no_special;
  if (options.ids) {
    output.text = fmt::format("{}\n", fmt::join(tokenizer->encode(text, special), " "));
  } else if (options.count) {
    output.text = counts(*tokenizer, text, special);
  } else if (options.json) {
    const nlohmann::json object = {{"text", to_valid_utf8(text)},
                                   {"ids", tokenizer->encode(text, special)},
                                   {"tokenizer_sha256", tokenizer->sha256()}};
    output.text = object.dump() + "\n";
  } else {
    output.text = table(*tokenizer, text, special);
  }
  return output;
}

void add_tokenize(CLI::App& app) {
  auto options = std::make_shared<TokenizeOptions>();
  CLI::App* command = app.add_subcommand("tokenize", "show the tokens of a text");
  command->add_option("--model", options->model, "GGUF file, tokenizer.json or its folder")
      ->required();
  command->add_option("--text", options->file, "file that holds the text");
  command->add_option("TEXT", options->text, "the text itself");
  command->add_flag("--chat", options->chat,
                    "the text is a user's message: render the chat template first");
  command->add_option(
      "--chat-template", options->chat_template,
      fmt::format("chat template by name: {}", fmt::join(chat_template_names(), ", ")));
  command->add_flag("--no-special", options->no_special,
                    "special tokens inside the text are plain text");
  command->add_flag("--ids", options->ids, "only the ids, on one line");
  command->add_flag("--count", options->count, "only the counts, the rate and the vocabulary");
  command->add_flag("--json", options->json, "one JSON object");
  command->footer("Example: oscar tokenize --model model.gguf \"Hello, world!\"");
  command->callback([options] {
    const TokenizeOutput output = run_tokenize(*options);
    if (!output.warning.empty()) fmt::print(stderr, "warning: {}\n", output.warning);
    fmt::print("{}", output.text);
  });
}

}  // namespace oscar
