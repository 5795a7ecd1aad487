// Texts cut into windows of equal length, and which rows of a window are scored (evaluation.md
// 2.1).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "model/tokenizer.h"

namespace oscar {

struct EvalText {
  std::string path;
  std::string sha256;  // of the file
  std::string text;
  std::vector<int32_t> tokens;  // of the whole text, without special tokens
};

// Reads and tokenizes each file. Throws Error naming a file that is missing, empty, or gives no
// token.
std::vector<EvalText> load_texts(const std::vector<std::string>& paths, const Tokenizer& tokenizer);

struct TextWindow {
  size_t text = 0;         // index of the text
  size_t first_token = 0;  // of the window, inside the text
};

struct TextWindows {
  size_t length = 0;
  std::vector<TextWindow> windows;
  size_t tokens_dropped = 0;  // tail tokens of texts that do not fill a window (all windows taken)
};

// The first `max_windows` (0 = all) complete, non-overlapping windows of each text. Throws Error
// naming the text that is shorter than one window.
TextWindows cut_windows(const std::vector<EvalText>& texts, size_t length, size_t max_windows);

// Which predictions are scored. The row t predicts the token at position t + 1, its target.
struct RowSelection {
  size_t first_target = 0;  // targets at positions >= this ("from:P"); 0 = as many as there are
  size_t tail = 0;          // only the last so many rows ("tail:N"); 0 = off
  size_t stride = 1;        // every stride-th of what is left, counted from its first ("stride:k")
  bool automatic = false;   // first_target = max(length / 2, sink + recent + 64)
};

// "auto", "all", "from:P", "tail:N", "stride:k", or several joined by commas. Throws Error naming
// what it does not understand.
RowSelection parse_row_selection(const std::string& text);

// Target positions in 0 .. length - 1, ascending. Position 0 takes part only with_bos (a
// beginning-of-sequence token stands before the window). high_precision_tokens = sink + recent of
// the widest arm, for `automatic`. Throws Error when no row is left.
std::vector<size_t> scored_targets(const RowSelection& selection, size_t length, bool with_bos,
                                   size_t high_precision_tokens);

// Width of the position buckets that are always printed: 512 up to 8192 tokens, else 4096.
size_t position_bucket(size_t length);

}  // namespace oscar
