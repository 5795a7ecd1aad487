// Options of `oscar generate`, so that tests can run it without a command line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "model/weight_matmul.h"

namespace oscar {

struct GenerateCommand {
  std::string model, prompt, prompt_file, system, arm = "bf16", bundle;
  std::string mode = "exact", compute = "fp32";
  std::string chat_template;
  size_t max_tokens = 256, top_k = 40, sink = 64, recent = 256;
  double temperature = 0.0, top_p = 0.95;
  uint64_t seed = 0;
  int group = 0, threads = 0;
  bool chat = false, raw = false, json = false, quiet = false;
};

// Streams the text to stdout (or one JSON object with --json) and rates and cache sizes to stderr.
void run_generate(const GenerateCommand& options);

// Value of a --compute option: fp32 or bf16. Throws Error for anything else.
Compute parse_compute(const std::string& name);

}  // namespace oscar
