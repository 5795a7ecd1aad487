// The task recall (evaluation.md 4.4): a passage placed in the quantized region is to be repeated
// word for word; and what runs a task under several arms.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/progress.h"
#include "eval/continuation_scorer.h"
#include "eval/task_prompt.h"

namespace oscar {

struct TaskArm {
  std::string name;
  std::shared_ptr<ContinuationScorer> scorer;
};

// One scorer an arm; the transformer must outlive them.
std::vector<TaskArm> task_arms(Transformer& transformer,
                               const std::vector<std::shared_ptr<const KvArm>>& arms);

struct RecallOptions {
  size_t length = 1024;  // tokens of a prompt and its answer at most; filler text fills it
  size_t contexts = 8;
  size_t passages = 1;  // of each context, asked one after another; they share its prefill
  size_t passage_words = 48;
  bool random_words = true;  // a list of frequent words; false: a paragraph of the text
  PromptStyle style = PromptStyle::kCompletion;
  std::string chat_template;  // --chat-template, for kChat
  uint64_t seed = 0;
  WindowSpec widest;  // windows that the passages must lie outside of (widest_windows)
};

struct RecallContext {
  std::string prompt;                 // text of the first question's prompt
  std::vector<std::string> passages;  // [question]
  TaskContext prompts;                // one continuation: the passage
};

// Context number `context_idx`, seeded by options.seed and the number alone; filler and passages
// come from the text. The place is uniform among those where every passage is quantized. Throws
// Error naming the shortest usable length when there is none, or the text is too short.
RecallContext make_recall(const Tokenizer& tokenizer, std::string_view text,
                          const std::vector<std::string>& words, const RecallOptions& options,
                          size_t context_idx);

// Appends one value per passage to the arm's metrics: top1_agreement and mean_log_prob (nats) over
// the passage's tokens but the first, teacher-forced; exact_prefix_tokens, exact_prefix_share and
// exact_match (0 or 1) of the greedy answer. A greedy answer follows the passage exactly as far as
// the teacher-forced most likely tokens do, so that it needs no run of its own.
void score_recall(const RecallContext& context, ContinuationScorer& scorer, ArmTaskScores& scores);

// All contexts under all arms.
TaskScores run_recall(const std::vector<TaskArm>& arms, const Tokenizer& tokenizer,
                      std::string_view text, const RecallOptions& options,
                      const Progress& progress);

// What both tasks share: contexts made one after another, each scored under every arm.
struct TaskRunner {
  std::string task;
  size_t contexts = 0;
  std::function<TaskContext(size_t context_idx)> make;  // called once per context
  std::function<void(size_t context_idx, ContinuationScorer&, ArmTaskScores&)> score;
};
TaskScores run_task(const TaskRunner& runner, const std::vector<TaskArm>& arms,
                    const Progress& progress);

// Words that the tasks take from a text, at most; fewer than kMinTaskWords are an Error.
inline constexpr size_t kTaskWords = 512;
inline constexpr size_t kMinTaskWords = 64;
std::vector<std::string> task_words(std::string_view text);

}  // namespace oscar
