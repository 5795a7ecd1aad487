// The task kv-lookup (evaluation.md 4.2): a long list of "key: value" lines, then a key; accuracy
// of the greedy answer and the margin of the right value over those of other lines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/progress.h"
#include "eval/recall_tasks.h"
#include "eval/task_prompt.h"

namespace oscar {

inline constexpr size_t kLookupDistractors = 16;  // the two neighbouring lines and 14 others

struct KvLookupOptions {
  size_t length = 1024;  // tokens of a prompt and its answer at most; lines fill it
  size_t contexts = 4;   // lists
  size_t questions = 8;  // keys asked of each list (fewer where fewer lines are quantized); they
                         // share its prefill
  PromptStyle style = PromptStyle::kCompletion;
  std::string chat_template;  // --chat-template, for kChat
  uint64_t seed = 0;
  WindowSpec widest;  // windows that the asked lines must lie outside of (widest_windows)
};

struct KvLine {
  std::string key;  // two words
  std::string value;
};

struct KvLookupContext {
  std::string prompt;         // text of the first question's prompt
  std::vector<KvLine> lines;  // of the list
  std::vector<size_t> asked;  // [question] line
  TaskContext prompts;        // continuations: the value, then those of the distractors
};

// List number `context_idx`, seeded by options.seed and the number alone. Values have three digits,
// more where the list needs more than the 900 numbers of three digits. words: frequent_words.
// Throws Error naming the shortest usable length when no line can lie in the quantized region, and
// when the words are too few.
KvLookupContext make_kv_lookup(const Tokenizer& tokenizer, const std::vector<std::string>& words,
                               const KvLookupOptions& options, size_t context_idx);

// Appends one value per question to the arm's metrics: accuracy (0 or 1), margin (nats),
// margin_positive (0 or 1), gold_log_prob (nats).
void score_kv_lookup(const KvLookupContext& context, const Tokenizer& tokenizer,
                     ContinuationScorer& scorer, ArmTaskScores& scores);

// All lists under all arms; the words come from the text (names of files are the caller's).
TaskScores run_kv_lookup(const std::vector<TaskArm>& arms, const Tokenizer& tokenizer,
                         std::string_view text, const KvLookupOptions& options,
                         const Progress& progress);

// The first run of digits in the text, empty when there is none.
std::string first_integer(std::string_view text);

}  // namespace oscar
