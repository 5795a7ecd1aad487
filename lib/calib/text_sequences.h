// Calibration text to token sequences of the wanted lengths.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "io/moments_file.h"
#include "model/config.h"
#include "model/tokenizer.h"

namespace oscar {

struct TextOptions {
  size_t num_tokens = 20480;             // in all, divided evenly over the texts and lengths
  std::vector<size_t> lengths = {2048};  // of the sequences; several are pooled
  size_t skip_tokens = 0;                // at the start of every text, for shards of one text
};

struct TextSequences {
  std::vector<std::vector<int32_t>> sequences;
  std::vector<MomentsSequence> origins;  // of every sequence: text, first token, tokens
  std::string text_sha256;  // of the file; of several, joined by commas (so that each is found)
  std::vector<std::string> warnings;
  size_t num_tokens() const;
};

// Each text is tokenized once without special tokens (evaluation.md 2) and cut into windows that do
// not overlap; an incomplete last window is dropped. A text shorter than the shortest length gives
// one sequence of its whole. Lengths alternate so that every part of the result holds all of them
// in proportion. Throws Error naming the file: unreadable, empty, no tokens.
// Throws Error when a sequence would be longer than the model's context. `model` names it.
void check_context(const std::vector<size_t>& lengths, const ModelConfig& config,
                   const std::string& model);

TextSequences load_text_sequences(const std::vector<std::string>& paths, const Tokenizer& tokenizer,
                                  const TextOptions& options);

}  // namespace oscar
