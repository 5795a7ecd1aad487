// What the long-context tasks share: words of the user's text, prompts with a common prefix, and
// where a fact lies in the cache (evaluation.md 4.1).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model/kv_arm.h"
#include "model/tokenizer.h"

namespace oscar {

// The `count` most frequent lower-case words (a-z only, 4 to 9 letters, as written: names, which
// are capitalized, stay out), by frequency, then alphabetically. Fewer when the text has fewer.
std::vector<std::string> frequent_words(std::string_view text, size_t count);

// The widest windows of the arms: a fact outside of them is quantized in every arm.
WindowSpec widest_windows(const std::vector<std::shared_ptr<const KvArm>>& arms);

enum class PromptStyle {
  kCompletion,  // the text goes on: base and chat models
  kChat         // the model's chat template around a question
};

// The message as the user's turn of the model's chat template (template_name as in ChatOptions;
// reasoning is not asked for), up to where the answer begins.
std::string chat_prompt(const Tokenizer& tokenizer, const std::string& message,
                        const std::string& template_name);

// One prompt with its answers. Tokens are counted from the start of the prompt, BOS included.
struct TaskQuestion {
  std::vector<int32_t> tail;                        // after the shared prefix, not empty
  std::vector<std::vector<int32_t>> continuations;  // [0] = the right one
  size_t fact_begin = 0, fact_end = 0;              // tokens that overlap the fact
  size_t prompt_tokens = 0;
};

// Questions about one context; the prefix is run once for all of them.
struct TaskContext {
  std::vector<int32_t> prefix;
  std::vector<TaskQuestion> questions;
};

// A prompt as text.
struct PromptText {
  std::string text;                        // as the model sees it (rendered chat or plain)
  size_t fact_begin = 0, fact_end = 0;     // bytes of the text
  std::vector<std::string> continuations;  // [0] = the right one
};

// Tokenizes the prompts and splits off their longest common prefix (each keeps at least one token).
TaskContext make_context(const Tokenizer& tokenizer, const std::vector<PromptText>& prompts);

// Token range of text bytes [begin, end) in the ids of encode_prompt(text), with the number of ids.
struct TokenSpan {
  size_t begin = 0, end = 0, prompt_tokens = 0;
};
TokenSpan token_span(const Tokenizer& tokenizer, std::string_view text, size_t begin, size_t end);
// The same for many ranges, ascending and not overlapping.
std::vector<TokenSpan> token_spans(const Tokenizer& tokenizer, std::string_view text,
                                   const std::vector<std::pair<size_t, size_t>>& ranges);

// True when every token of the fact is quantized at the end of the prompt in every arm; 8 tokens =
// granularity of the serving flush.
inline constexpr size_t kFlushTokens = 8;
bool in_quantized(const WindowSpec& widest, size_t fact_begin, size_t fact_end,
                  size_t prompt_tokens);

// Result of a task: per-item values by metric, items in the same order for every arm.
struct ArmTaskScores {
  std::string arm;
  std::vector<std::pair<std::string, std::vector<double>>> metrics;  // name, [item]
  double tokens_int2_written = 0;  // per layer, summed over the contexts' prefixes
  double tokens_int2_read = 0;     // per layer, summed over all queries
  double tokens_high_precision = 0;
  const std::vector<double>& values(const std::string& metric) const;  // throws Error when absent
  std::vector<double>& values(const std::string& metric);              // made when absent
};
struct TaskScores {
  std::string task;             // "kv-lookup", "recall"
  std::vector<size_t> context;  // [item]: items of one context are one cluster for intervals
  std::vector<ArmTaskScores> arms;
  double mean_prompt_tokens = 0;
};

}  // namespace oscar
