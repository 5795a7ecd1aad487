// Turns the records of a likelihood run into result rows: perplexity, divergence and agreement with
// their errors, over all scored rows and by position bucket.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "eval/arm_summary.h"
#include "eval/likelihood.h"
#include "io/results.h"

namespace oscar {

struct LikelihoodRun {
  std::string cell;  // name of texts and length
  std::vector<size_t> targets;
  size_t window_length = 0;
  std::vector<std::shared_ptr<const KvArm>> arms;  // [0] = reference
  bool null_run = false;              // the records' last arm is the reference once more
  std::vector<WindowRecord> records;  // in window order
  std::string mode;
  uint64_t bootstrap_seed = 0;
  bool perplexity = true, divergence = true;  // which of the sets "ppl" and "kl" to report
  std::map<std::string, std::string> labels;  // for every row: hashes, tool, device, command
};

// Name of the noise-floor arm in rows and tables.
inline constexpr const char* kNullArm = "null";

// Rows in the order arm, metric, bucket. The row "kl" of all positions carries the label
// "kl_by_window": means of the windows, in order, for paired ratios between any two arms. Throws
// Error when there is no record or no row.
std::vector<ResultRow> likelihood_rows(const LikelihoodRun& run);

// Differences of mean divergence between test arms on the same windows: rows "kl_difference" of
// every quantized arm against `baseline` (value = arm - baseline, errors over windows). Empty when
// the baseline is not among the arms.
std::vector<ResultRow> paired_divergence_rows(const LikelihoodRun& run,
                                              const std::string& baseline);

}  // namespace oscar
