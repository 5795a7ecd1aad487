// rows.jsonl: one measurement a line (evaluation.md section 1). Sums and counts are stored, so
// files concatenate and merge.
//
// A line is a JSON object: suite, cell, metric, arm, mode, n, sum, sum_sq, value, se; ci_lo, ci_hi,
// ci_method when there is an interval; paired_with when there is a partner; then every entry of
// `numbers` and `labels` under its own name, where a dot makes an object: numbers["windows.sink"]
// is "windows": {"sink": 64}, labels["hashes.model"] is "hashes": {"model": "..."}. Numbers that
// are not finite are the texts "inf", "-inf", "nan". true and false are read as 1 and 0.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace oscar {

struct ResultRow {
  std::string suite;   // ppl, kl, recall, simulate, kernels, ...
  std::string cell;    // for example "austen-2048"
  std::string metric;  // for example "kl_mean"
  std::string arm;
  std::string mode;  // exact, serving, after-prefill
  double n = 0, sum = 0, sum_sq = 0, value = 0, se = 0;
  double ci_lo = 0, ci_hi = 0;
  std::string ci_method;  // empty: no interval
  std::string paired_with;
  std::map<std::string, double>
      numbers;  // further numbers by name (bpe, tokens_int2_read, time_us, ...)
  std::map<std::string, std::string>
      labels;  // further texts by name (hashes, tool, device, command, ...)
};

// One line without its end. Throws Error when an entry of numbers or labels has the name of a field
// above, an empty name, or a name that is also the start of another one ("a" and "a.b").
std::string to_json_line(const ResultRow& row);
// where: file and line for messages. Throws Error for anything that is not a row.
ResultRow parse_result_row(const std::string& line, const std::string& where);
// Empty lines are skipped; a file without any row is an Error.
std::vector<ResultRow> read_rows(const std::string& path);
void write_rows(const std::vector<ResultRow>& rows,
                const std::string& path);  // temporary name, then rename

// Joins rows of the same suite, cell, metric, arm, mode and partner, in order of first appearance:
// n, sum, sum_sq and counts (numbers whose name, after its last dot, starts with tokens_, time_,
// sum_, count_ or n_, or is truncated, looped, no_answer, ungradable) add up; value and se are
// recomputed, the interval is dropped. labels["estimator"] says how value follows from the sums:
// "mean" (default: sum / n, se from sum_sq with n - 1) or "exp_mean" (exp of it, se times value).
// Throws Error naming the row and what differs: any other number, any label but command, device,
// time and host, or a value that does not follow from its sums (percentiles, maxima).
std::vector<ResultRow> merge_rows(const std::vector<ResultRow>& rows);

}  // namespace oscar
