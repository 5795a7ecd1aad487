#include "eval/task_rows.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "base/statistics.h"
#include "eval/arm_summary.h"
#include "eval/kv_lookup.h"
#include "eval/recall_tasks.h"

namespace oscar {
namespace {

// Which metric shows that the reference can do the task, and what it scores by chance.
struct Gate {
  const char* metric;
  double chance;
};

Gate gate_of(const std::string& task, const std::string& metric) {
  if (task == "kv-lookup") {
    // The right value against 16 others; accuracy by chance is one of hundreds of lines.
    if (metric == "accuracy") return {"accuracy", 0};
    return {"margin_positive", 1.0 / (1.0 + static_cast<double>(kLookupDistractors))};
  }
  return {"top1_agreement", 0};
}

struct ByContext {
  std::vector<double> sums, counts;
  Sums all;
};

ByContext by_context(const std::vector<double>& values, const std::vector<size_t>& context) {
  const size_t contexts =
      context.empty() ? 0 : *std::max_element(context.begin(), context.end()) + 1;
  ByContext grouped;
  grouped.sums.assign(contexts, 0.0);
  grouped.counts.assign(contexts, 0.0);
  for (size_t i = 0; i < values.size(); ++i) {
    grouped.sums[context[i]] += values[i];
    grouped.counts[context[i]] += 1;
    grouped.all.add(values[i]);
  }
  return grouped;
}

void fill(const ByContext& grouped, uint64_t seed, ResultRow& row) {
  row.n = grouped.all.n;
  row.sum = grouped.all.sum;
  row.sum_sq = grouped.all.sum_sq;
  row.value = *grouped.all.mean();
  const auto error = clustered_mean_error(grouped.sums, grouped.counts, grouped.all);
  row.se = error.value_or(0);
  row.labels["se_method"] = !error ? "none" : grouped.sums.size() > 1 ? "contexts" : "items";
  if (grouped.sums.size() < kMinIntervalClusters) return;
  const auto interval = bootstrap_ratio(grouped.sums, grouped.counts, {.seed = seed});
  if (!interval) return;
  row.ci_lo = interval->lo;
  row.ci_hi = interval->hi;
  row.ci_method = cat("bootstrap over ", grouped.sums.size(), " contexts");
}

// The reference must do the task at least half of the time and be above chance by two errors.
bool is_informative(const TaskScores& scores, const std::string& metric) {
  const Gate gate = gate_of(scores.task, metric);
  const ByContext grouped = by_context(scores.arms[0].values(gate.metric), scores.context);
  if (grouped.all.n < 1) return false;
  const double mean = *grouped.all.mean();
  const double se = clustered_mean_error(grouped.sums, grouped.counts, grouped.all).value_or(0);
  return mean >= 0.5 && mean > gate.chance + 2 * se;
}

void check_scores(const TaskScores& scores, const TaskRowInfo& info) {
  OSCAR_CHECK(scores.arms.size() == info.arms.size() && !scores.arms.empty(), scores.task, ": ",
              scores.arms.size(), " arms were scored, expected ", info.arms.size());
  OSCAR_CHECK(!scores.context.empty(), scores.task, ": no item was scored");
  for (const ArmTaskScores& arm : scores.arms) {
    for (const auto& [metric, values] : arm.metrics) {
      OSCAR_CHECK(values.size() == scores.context.size(), scores.task, ": arm ", arm.arm, " has ",
                  values.size(), " values of ", metric, ", expected ", scores.context.size());
    }
  }
}

}  // namespace

std::vector<ResultRow> task_rows(const TaskScores& scores, const TaskRowInfo& info) {
  check_scores(scores, info);
  const std::string prefix = scores.task.substr(0, scores.task.find('-')) + "_";
  std::vector<ResultRow> rows;
  for (size_t a = 0; a < scores.arms.size(); ++a) {
    const ArmTaskScores& arm = scores.arms[a];
    const ArmSummary summary = summarize(*info.arms[a]);
    for (const auto& [metric, values] : arm.metrics) {
      ResultRow row;
      row.suite = "recall";
      row.cell = info.cell;
      row.metric = prefix + metric;
      row.arm = info.arms[a]->name;
      row.mode = info.mode;
      row.labels = info.labels;
      row.labels["task"] = cat(scores.task, ", ", info.length, " tokens");
      row.labels["windows"] = summary.quantized ? to_string(summary.windows) : "";
      row.labels["codec"] = summary.codec;
      row.labels["informative"] = is_informative(scores, metric) ? "yes" : "no";
      row.numbers["bpe_nominal"] = summary.bits_nominal;
      row.numbers["task_tokens_int2_written"] = arm.tokens_int2_written;
      row.numbers["task_tokens_int2_read"] = arm.tokens_int2_read;
      row.numbers["mean_prompt_tokens"] = scores.mean_prompt_tokens;
      if (summary.quantized && arm.tokens_int2_read == 0) row.labels["status"] = "not quantized";
      if (a > 0) row.paired_with = info.arms[0]->name;
      fill(by_context(values, scores.context), info.bootstrap_seed, row);
      rows.push_back(row);
      if (a == 0) continue;
      const std::vector<double>& reference = scores.arms[0].values(metric);
      std::vector<double> differences(values.size());
      for (size_t i = 0; i < values.size(); ++i) differences[i] = values[i] - reference[i];
      row.metric += "_difference";
      row.ci_method.clear();
      row.ci_lo = row.ci_hi = 0;
      fill(by_context(differences, scores.context), info.bootstrap_seed, row);
      rows.push_back(row);
    }
  }
  return rows;
}

std::vector<ResultRow> evaluate_recall(EvalSession& session, const RecallRequest& request,
                                       const Progress& progress) {
  const std::vector<TaskArm> arms = task_arms(*session.transformer, session.arms);
  const std::string& text = session.texts.front().text;
  const PromptStyle style = request.chat ? PromptStyle::kChat : PromptStyle::kCompletion;
  KvLookupOptions lookup;
  lookup.length = request.length;
  lookup.contexts = request.contexts;
  lookup.questions = request.questions;
  lookup.style = style;
  lookup.chat_template = request.chat_template;
  lookup.seed = request.seed;
  lookup.widest = widest_windows(session.arms);
  RecallOptions recall;
  recall.length = request.length;
  recall.contexts = request.contexts;
  recall.passages = request.passages;
  recall.style = style;
  recall.chat_template = request.chat_template;
  recall.seed = request.seed;
  recall.widest = lookup.widest;
  TaskRowInfo info;
  info.cell = cell_name(session, request.length);
  info.mode = mode_name(session.request.arm_options.windows.mode);
  info.length = request.length;
  info.arms = session.arms;
  info.bootstrap_seed = session.request.seed;
  info.labels = session.labels;
  info.labels["task_seed"] = std::to_string(request.seed);
  std::vector<ResultRow> rows =
      task_rows(run_kv_lookup(arms, *session.tokenizer, text, lookup, progress), info);
  for (ResultRow& row :
       task_rows(run_recall(arms, *session.tokenizer, text, recall, progress), info)) {
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace oscar
