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

void print_table(const Tokenizer& tokenizer, const std::string& text, bool special) {
  std::vector<int32_t> ids;
  const auto spans = tokenizer.offsets(text, special, &ids);
  fmt::print("{:>8}  {:>15}  token\n", "id", "bytes");
  for (size_t i = 0; i < ids.size(); ++i) {
    fmt::print("{:>8}  {:>15}  \"{}\"\n", ids[i],
               fmt::format("{}..{}", spans[i].first, spans[i].second),
               visible(tokenizer.decode({ids[i]})));
  }
}

}  // namespace

void run_tokenize(const TokenizeOptions& options) {
  OSCAR_CHECK(static_cast<int>(options.ids) + static_cast<int>(options.count) +
                      static_cast<int>(options.json) <=
                  1,
              "tokenize: --ids, --count and --json exclude each other");
  std::string text = read_text(options);
  const auto tokenizer = Tokenizer::load(options.model);
  const size_t invalid = count_invalid_utf8(text);
  if (invalid > 0) {
    fmt::print(stderr, "warning: {} invalid UTF-8 sequences are read as U+FFFD\n", invalid);
  }
  if (options.chat || !options.chat_template.empty()) {
    text = render_chat(*tokenizer, {{"user", text}}, true, options.chat_template);
  }
  const bool special = !options.no_special;
  if (!options.ids && !options.count && !options.json) {
    print_table(*tokenizer, text, special);
    return;
  }
  const auto start = std::chrono::steady_clock::now();
  const std::vector<int32_t> ids = tokenizer->encode(text, special);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  if (options.ids) {
    fmt::print("{}\n", fmt::join(ids, " "));
  } else if (options.count) {
    const double megabytes = static_cast<double>(text.size()) / 1e6;
    fmt::print(
        "{} tokens, {} bytes, {:.3g} bytes a token, {:.3g} MB/s\n", ids.size(), text.size(),
        static_cast<double>(text.size()) / static_cast<double>(std::max<size_t>(ids.size(), 1)),
        megabytes / elapsed.count());
    fmt::print("pre-tokenizer {}, vocabulary {}, merges {}, sha256 {}\n",
               tokenizer->pre_tokenizer(), tokenizer->vocab_size(), tokenizer->num_merges(),
               tokenizer->sha256());
  } else {
    fmt::print("{}\n", nlohmann::json{{"text", to_valid_utf8(text)},
                                      {"ids", ids},
                                      {"tokenizer_sha256", tokenizer->sha256()}}
                           .dump());
  }
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
  command->callback([options] { run_tokenize(*options); });
}

}  // namespace oscar
