// rows.jsonl: one measurement a line (evaluation.md section 1). Sums and counts are stored, so
// files concatenate and merge.
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

std::string to_json_line(const ResultRow& row);
ResultRow parse_result_row(const std::string& line, const std::string& where);
std::vector<ResultRow> read_rows(const std::string& path);
void write_rows(const std::vector<ResultRow>& rows,
                const std::string& path);  // temporary name, then rename

}  // namespace oscar
