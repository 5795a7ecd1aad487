// Result rows of the own long-context tasks (kv-lookup, recall): metrics by arm with errors over
// contexts, paired differences, and whether the reference is strong enough to say anything.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/progress.h"
#include "eval/evaluate.h"
#include "eval/task_prompt.h"
#include "io/results.h"

namespace oscar {

struct TaskRowInfo {
  std::string cell;  // of the likelihood rows of the same run, so that they share a table
  std::string mode;
  size_t length = 0;                               // tokens of a prompt
  std::vector<std::shared_ptr<const KvArm>> arms;  // as in the scores, [0] = reference
  uint64_t bootstrap_seed = 0;
  std::map<std::string, std::string> labels;
};

// For every arm and metric a row (metric "kv_margin", "recall_top1_agreement", ...: the task's
// first word and the metric), and for test arms a row "..._difference" paired with the reference. A
// row of a cell whose reference is too weak (evaluation.md 1) has labels["informative"] = "no".
// Throws Error when arms or items do not match.
std::vector<ResultRow> task_rows(const TaskScores& scores, const TaskRowInfo& info);

struct RecallRequest {
  size_t length = 1024;  // tokens of a prompt with its answer
  size_t contexts = 4;   // lists, and texts with passages
  size_t questions = 8;  // keys asked of each list
  size_t passages = 2;   // of each text
  bool chat = false;     // questions through the model's chat template
  std::string chat_template;
  uint64_t seed = 42;
};

// Runs kv-lookup and recall on the session's first text under all of its arms.
std::vector<ResultRow> evaluate_recall(EvalSession& session, const RecallRequest& request,
                                       const Progress& progress);

}  // namespace oscar
