// Options of `oscar tokenize`, so that tests can run it without a command line.
#pragma once

#include <string>

namespace oscar {

struct TokenizeOptions {
  std::string model = {};  // GGUF file, tokenizer.json or folder
  std::string text = {};   // the text itself
  std::string file = {};   // or a file that holds it
  std::string chat_template = {};
  bool chat = false;        // the text is a user's message: render the chat template first
  bool no_special = false;  // special tokens inside the text are plain text
  bool ids = false, count = false, json = false;
};

struct TokenizeOutput {
  std::string text;     // for stdout: a table of tokens, or with ids/count/json only these
  std::string warning;  // for stderr, may be empty
};
// Throws Error on options that exclude each other.
TokenizeOutput run_tokenize(const TokenizeOptions& options);

}  // namespace oscar
