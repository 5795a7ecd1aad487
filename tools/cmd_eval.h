// Options and steps that eval and compare share: which model, texts and arms, how rows are stored
// and shown.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "eval/evaluate.h"

namespace oscar {

struct EvalOptions {
  std::string model, bundle;
  std::vector<std::string> texts, arms, sets{"ppl", "kl"};
  std::string reference = "bf16", rows = "auto", mode = "exact", compute = "fp32", meta = "fp16";
  std::string baseline;            // kl differences between test arms are against it
  bool baseline_optional = false;  // a default: no error when its arm is not in the run
  std::string out, markdown, html;
  size_t length = 2048, windows = 8, sink = 64, recent = 256, prefill = 0;
  int group = 0, threads = 0;
  size_t recall_length = 1024, recall_contexts = 4;
  bool recall_chat = false;
  std::string chat_template;
  uint64_t seed = kBootstrapSeed;
  double max_kl = 0;  // 0 = no threshold
  bool bos = false, no_null = false, allow_overlap = false, json = false, quiet = false;
  bool skip_impossible_arms = false;
};

void add_eval_options(CLI::App& app, EvalOptions& options);

// Runs the evaluation, stores rows (--out, --markdown, --html), prints the table or (--json) the
// rows. Exit code 2 when an arm is over --max-kl.
void run_eval(const EvalOptions& options);

// For result labels: the command line of this process, and CPU, SIMD level and thread count.
std::string command_line();
std::string device_name();

}  // namespace oscar
