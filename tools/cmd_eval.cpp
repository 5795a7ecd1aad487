#include "tools/cmd_eval.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "base/cpu.h"
#include "base/error.h"
#include "base/parallel.h"
#include "eval/partial_file.h"
#include "eval/task_rows.h"
#include "io/atomic_file.h"
#include "io/results.h"
#include "report/arms_report.h"
#include "report/html_report.h"
#include "tools/commands.h"
#include "tools/console.h"
#include "tools/output_check.h"
#include "tools/version.h"

namespace oscar {
namespace {

const std::vector<std::string> kSets{"ppl", "kl", "recall"};

bool wants(const EvalOptions& options, const std::string& set) {
  return std::find(options.sets.begin(), options.sets.end(), set) != options.sets.end();
}

EvalRequest request_of(const EvalOptions& options) {
  EvalRequest request;
  request.model_path = options.model;
  request.text_paths = options.texts;
  request.reference = options.reference;
  request.arms = options.arms;
  request.skip_impossible_arms = options.skip_impossible_arms;
  request.bundle_path = options.bundle;
  request.allow_overlap = options.allow_overlap;
  request.perplexity = wants(options, "ppl");
  request.divergence = wants(options, "kl");
  request.whole_texts = wants(options, "recall");
  request.length = options.length;
  request.max_windows = options.windows;
  request.rows = options.rows;
  request.with_bos = options.bos;
  request.null_run = !options.no_null;
  request.prefill = options.prefill;
  request.after_prefill = options.mode == "after-prefill";
  request.arm_options.windows = {
      options.sink, options.recent,
      options.mode == "serving" ? WindowMode::kServing : WindowMode::kExact};
  request.arm_options.group = options.group;
  request.compute = options.compute == "bf16" ? Compute::kBf16 : Compute::kFp32;
  request.seed = options.seed;
  request.baseline = options.baseline;
  request.baseline_optional = options.baseline_optional;
  if (!options.out.empty()) request.partial_path = options.out + ".partial.jsonl";
  request.labels = {
      {"tool", tool_version()}, {"device", device_name()}, {"command", command_line()}};
  return request;
}

void apply_threshold(const std::vector<ResultRow>& rows, double max_kl) {
  if (max_kl <= 0) return;
  for (const ResultRow& row : rows) {
    if (row.metric != "kl" || is_bucket(row.cell) || row.value <= max_kl) continue;
    fmt::print(stderr, "oscar: {}: KL {} is over --max-kl {}\n", row.arm, format_number(row.value),
               format_number(max_kl));
    set_exit_code(kExitUnderThreshold);
  }
}

}  // namespace

std::string command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  while (!text.empty() && text.back() == '\0') text.pop_back();
  std::replace(text.begin(), text.end(), '\0', ' ');
  // The folder of the executable says nothing.
  const size_t end = std::min(text.find(' '), text.size());
  const size_t slash = text.rfind('/', end);
  return slash == std::string::npos || slash > end ? text : text.substr(slash + 1);
}

std::string device_name() {
  std::ifstream file("/proc/cpuinfo");
  std::string line, model = "unknown CPU";
  while (std::getline(file, line)) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) {
      model = line.substr(colon + 2);
      break;
    }
  }
  return fmt::format("{}, {} threads, {}", model, num_threads(), simd_name());
}

void add_eval_options(CLI::App& app, EvalOptions& options) {
  app.add_option("--model", options.model, "GGUF file or Hugging Face folder")->required();
  app.add_option("--text", options.texts, "text file to score (may be given several times)")
      ->required();
  app.add_option("--bundle", options.bundle, "calibration bundle for the oscar arms");
  app.add_option("--reference", options.reference, "arm that all others are compared with")
      ->check(CLI::IsMember({"bf16", "fp32"}))
      ->capture_default_str();
  app.add_option("--set", options.sets, "what to measure, joined by commas: ppl, kl, recall")
      ->delimiter(',')
      ->check(CLI::IsMember(kSets))
      ->capture_default_str();
  app.add_option("--length", options.length, "tokens of a window")
      ->check(CLI::Range(2, 1 << 24))
      ->capture_default_str();
  app.add_option("--windows", options.windows, "windows of each text, from its start (0 = all)")
      ->check(count_range())
      ->capture_default_str();
  app.add_option("--rows", options.rows,
                 "scored predictions: auto (targets from max(length/2, sink+recent+64)), all, "
                 "from:P, tail:N, stride:K, or several joined by commas")
      ->capture_default_str();
  app.add_option("--sink", options.sink, "first tokens kept in high precision")
      ->check(count_range())
      ->capture_default_str();
  app.add_option("--recent", options.recent, "last tokens kept in high precision")
      ->check(count_range())
      ->capture_default_str();
  app.add_option(
         "--mode", options.mode,
         "windows per query (exact), in flush blocks (serving), or one BF16 prefill that all "
         "arms share and quantize once (after-prefill, cheaper)")
      ->check(CLI::IsMember({"exact", "serving", "after-prefill"}))
      ->capture_default_str();
  app.add_option("--prefill", options.prefill,
                 "serving: tokens of the prefill chunk, the rest is decoded (0 = sink + recent); "
                 "after-prefill: tokens of the shared prefill (0 = up to the first scored row)");
  app.add_option("--group", options.group, "elements of a quantization group (0 = head_dim)");
  app.add_option("--compute", options.compute, "precision of matrix products")
      ->check(CLI::IsMember({"fp32", "bf16"}))
      ->capture_default_str();
  app.add_option("--recall-length", options.recall_length, "recall: tokens of a prompt")
      ->capture_default_str();
  app.add_option("--recall-contexts", options.recall_contexts,
                 "recall: lists (8 keys are asked of each) and texts (2 passages in each)")
      ->capture_default_str();
  app.add_flag("--recall-chat", options.recall_chat, "recall: ask through the chat template");
  app.add_option("--chat-template", options.chat_template,
                 "chatml, smollm2, qwen2.5 or qwen3 (default: recognized from the model)");
  app.add_option("--seed", options.seed, "seed of the bootstrap")->capture_default_str();
  add_threads_option(app, options.threads);
  app.add_option("--out", options.out,
                 "rows file (.jsonl); finished windows are kept beside it until the run is "
                 "complete, and the same command continues an interrupted run");
  app.add_option("--markdown", options.markdown, "table as a Markdown file");
  app.add_option("--html", options.html, "report as one HTML file");
  app.add_option("--baseline", options.baseline,
                 "print paired KL differences of all arms against this one");
  app.add_option("--max-kl", options.max_kl, "exit code 2 when the KL of an arm is larger")
      ->check(CLI::Range(1e-9, 1e3));
  app.add_flag("--bos", options.bos, "one beginning-of-sequence token before each window");
  app.add_flag("--no-null", options.no_null, "leave out the noise-floor run");
  app.add_flag("--allow-overlap", options.allow_overlap,
               "score a text that the bundle was calibrated on (labelled)");
  app.add_flag("--json", options.json, "print the rows instead of the table");
  app.add_flag("--quiet", options.quiet, "no progress on stderr");
}

void run_eval(const EvalOptions& options) {
  set_num_threads(options.threads);
  std::vector<std::string> inputs = options.texts;
  inputs.insert(inputs.end(), {options.model, options.bundle});
  for (const std::string& arm : options.arms) {
    if (arm.find('@') != std::string::npos) inputs.push_back(arm.substr(arm.find('@') + 1));
  }
  for (const std::string& path : {options.out, options.markdown, options.html}) {
    check_output(path, inputs);
  }
  const Progress progress = console_progress(options.quiet);
  const EvalRequest request = request_of(options);
  EvalSession session = open_session(request);
  show_warnings(session.weights->config.warnings, options.quiet);
  std::vector<ResultRow> rows;
  try {
    if (request.perplexity || request.divergence) rows = evaluate_likelihood(session, progress);
    if (wants(options, "recall")) {
      RecallRequest recall;
      recall.length = options.recall_length;
      recall.contexts = options.recall_contexts;
      recall.chat = options.recall_chat;
      recall.chat_template = options.chat_template;
      for (ResultRow& row : evaluate_recall(session, recall, progress)) {
        rows.push_back(std::move(row));
      }
    }
  } catch (const Interrupted&) {
    if (session.partial) {
      fmt::print(stderr, "\noscar: finished windows are kept in {}; the same command continues\n",
                 request.partial_path);
    }
    throw;
  }
  if (!options.out.empty()) write_rows(rows, options.out);
  if (!options.markdown.empty())
    write_file_atomically(options.markdown, markdown_report(rows, session.notes));
  if (!options.html.empty())
    write_file_atomically(options.html, html_report(rows, "oscar: cache arms compared"));
  if (session.partial) session.partial->remove();
  if (options.json) {
    for (const ResultRow& row : rows) fmt::print("{}\n", to_json_line(row));
  } else {
    fmt::print("{}", text_report(rows));
    for (const std::string& note : session.notes) fmt::print("note: {}\n", note);
  }
  apply_threshold(rows, options.max_kl);
}

void add_eval(CLI::App& app) {
  auto options = std::make_shared<EvalOptions>();
  CLI::App* command = app.add_subcommand(
      "eval", "perplexity and divergence of cache arms against the BF16 cache, in lock-step");
  add_eval_options(*command, *options);
  command
      ->add_option("--arm", options->arms,
                   "arms joined by commas: NAME[:SUFFIX...][@BUNDLE.h5], for example "
                   "naive,hadamard,oscar-best:no-gain")
      ->delimiter(',')
      ->required();
  command->footer(
      "Example:\n  oscar eval --model model.gguf --text persuasion.txt --bundle best.h5 --arm "
      "hadamard,oscar-best \\\n    --length 2048 --windows 8 --out eval.jsonl");
  command->callback([options] { run_eval(*options); });
}

}  // namespace oscar
