#include "report/arms_report.h"

#include <algorithm>
#include <map>

#include "base/error.h"

namespace oscar {
namespace {

std::string text_of(const ResultRow* row) {
  if (row == nullptr || row->n < 1) return "n/a";
  return format_with_error(row->value, row->n < 2 ? std::nullopt : std::optional(row->se));
}

std::string number_of(const ResultRow* row, const std::string& name, int decimals) {
  if (row == nullptr) return "n/a";
  const auto found = row->numbers.find(name);
  return found == row->numbers.end() ? "n/a" : format_fixed(found->second, decimals);
}

std::string label_of(const ResultRow* row, const std::string& name) {
  if (row == nullptr) return "";
  const auto found = row->labels.find(name);
  return found == row->labels.end() ? "" : found->second;
}

// Any row of the arm: the labels and numbers about the arm itself are in all of them.
const ResultRow* any_row(const CellRows& cell, const std::string& arm) {
  for (const ResultRow& row : cell.rows) {
    if (row.arm == arm && row.suite != "recall" && row.metric != "kl_difference") return &row;
  }
  for (const ResultRow& row : cell.rows) {
    if (row.arm == arm) return &row;
  }
  return nullptr;
}

// Metrics of the recall family that stand in the table, in its order.
const std::vector<std::pair<std::string, std::string>> kRecallMetrics = {
    {"kv_margin", "kv margin"},
    {"kv_margin_positive", "kv > 0"},
    {"kv_accuracy", "kv right"},
    {"recall_top1_agreement", "copy top-1"},
    {"recall_mean_log_prob", "copy ln p"},
};

// "kv right, copy top-1": the recall columns in which the reference is too weak to compare with.
std::string weak_columns(const CellRows& cell) {
  std::string names;
  for (const auto& [metric, header] : kRecallMetrics) {
    const bool weak = std::any_of(cell.rows.begin(), cell.rows.end(), [&](const ResultRow& row) {
      const auto found = row.labels.find("informative");
      return row.metric == metric && found != row.labels.end() && found->second == "no";
    });
    if (weak) names += (names.empty() ? "" : ", ") + header;
  }
  return names;
}

std::string read_per_query(const ResultRow* row) {
  if (row == nullptr) return "n/a";
  const auto read = row->numbers.find("tokens_int2_read");
  const auto windows = row->numbers.find("num_windows");
  const auto tokens = row->numbers.find("bpe_tokens");
  if (read == row->numbers.end() || windows == row->numbers.end() || tokens == row->numbers.end() ||
      windows->second == 0) {
    return "n/a";
  }
  // Of all keys that causal attention reads in a window.
  const double all = windows->second * tokens->second * (tokens->second + 1) / 2;
  return all == 0 ? "n/a" : format_fixed(100 * read->second / all, 1);
}

std::string percent_with_error(const ResultRow* row) {
  if (row == nullptr || row->n < 1) return "n/a";
  return format_with_error(100 * row->value,
                           row->n < 2 ? std::nullopt : std::optional(100 * row->se));
}

std::string heading(const CellRows& cell) {
  const ResultRow& row = cell.rows.front();
  std::string text = cell.cell;
  if (!row.mode.empty()) text += cat(", ", row.mode, " windows");
  const std::string rows = label_of(&row, "rows"), model = label_of(&row, "model");
  if (!rows.empty()) text += cat(", rows ", rows);
  if (!model.empty()) text += cat(", ", model);
  const std::string weights = label_of(&row, "weights"), compute = label_of(&row, "compute");
  if (!weights.empty()) text += cat(" (", weights, " weights, ", compute, " compute)");
  return text;
}

// With a single window there is no error over windows.
bool has_row_errors(const CellRows& cell) {
  return std::any_of(cell.rows.begin(), cell.rows.end(), [](const ResultRow& row) {
    const auto found = row.labels.find("se_method");
    return found != row.labels.end() && found->second == "rows";
  });
}
constexpr const char* kRowErrors =
    "one window: errors are over its rows, which are correlated (a lower bound)";

constexpr const char* kLegend =
    "Errors are standard errors over windows (contexts for kv and copy), never below those over "
    "rows. bits: INT2 rows | the cache of one window | at "
    "131072 "
    "tokens, K and V, metadata included. read %: share of key reads that were quantized. "
    "Δ ln PPL and KL (nats per token) are paired with the reference arm; null: the reference again "
    "in other batches (noise floor). kv: value of a key among hundreds of lines, margin in nats "
    "over "
    "16 wrong values; copy: a passage repeated, teacher-forced.";

}  // namespace

const ResultRow* CellRows::find(const std::string& arm, const std::string& metric,
                                const std::string& paired_with) const {
  for (const ResultRow& row : rows) {
    if (row.arm == arm && row.metric == metric &&
        (paired_with.empty() || row.paired_with == paired_with)) {
      return &row;
    }
  }
  return nullptr;
}

bool is_bucket(const std::string& cell) { return cell.find('@') != std::string::npos; }

std::vector<CellRows> split_cells(const std::vector<ResultRow>& rows) {
  std::vector<CellRows> cells;
  for (const ResultRow& row : rows) {
    if (row.suite == "simulate") continue;
    auto found = std::find_if(cells.begin(), cells.end(),
                              [&](const CellRows& cell) { return cell.cell == row.cell; });
    if (found == cells.end()) {
      cells.push_back({row.cell, {}, {}});
      found = cells.end() - 1;
    }
    if (std::find(found->arms.begin(), found->arms.end(), row.arm) == found->arms.end()) {
      found->arms.push_back(row.arm);
    }
    found->rows.push_back(row);
  }
  return cells;
}

void check_mergeable(const CellRows& cell) {
  std::map<std::string, std::string> seen;
  for (const ResultRow& row : cell.rows) {
    std::map<std::string, std::string> identity{{"mode", row.mode}};
    for (const char* name :
         {"model_sha256", "tokenizer_sha256", "data_sha256", "compute", "rows"}) {
      const auto found = row.labels.find(name);
      if (found != row.labels.end()) identity[name] = found->second;
    }
    for (const auto& [name, value] : identity) {
      const auto [entry, fresh] = seen.emplace(name, value);
      OSCAR_CHECK(fresh || entry->second == value, "cell ", cell.cell, ": rows with different ",
                  name, " (", entry->second, " and ", value, ") must not be merged");
    }
  }
}

Table arms_table(const CellRows& cell) {
  std::vector<Column> columns{{"arm", false}, {"windows", false}, {"bits"},   {"bits used"},
                              {"bits 128K"},  {"read %"},         {"PPL"},    {"Δ ln PPL"},
                              {"KL"},         {"KL 99 %"},        {"top-1 %"}};
  for (const auto& [metric, header] : kRecallMetrics) columns.push_back({header});
  columns.push_back({"note", false});
  Table table(columns);
  for (const std::string& arm : cell.arms) {
    const ResultRow* about = any_row(cell, arm);
    std::vector<std::string> cells{
        arm, label_of(about, "windows"), number_of(about, "bpe_nominal", 3),
        number_of(about, "bpe_used", 3), number_of(about, "bpe_131072", 3)};
    const bool quantized = label_of(about, "windows") != "";
    cells.push_back(quantized ? read_per_query(about) : "");
    cells.push_back(text_of(cell.find(arm, "ppl")));
    cells.push_back(text_of(cell.find(arm, "ln_ppl_ratio")));
    const ResultRow* kl = cell.find(arm, "kl");
    cells.push_back(text_of(kl));
    const bool has_p99 = kl != nullptr && kl->numbers.contains("p99");
    cells.push_back(has_p99 ? format_number(kl->numbers.at("p99"), 3) : "n/a");
    cells.push_back(percent_with_error(cell.find(arm, "top1")));
    for (const auto& [metric, header] : kRecallMetrics) {
      cells.push_back(text_of(cell.find(arm, metric)));
    }
    std::string note = label_of(about, "status");
    if (kl != nullptr && kl->numbers.contains("infinite")) {
      note += (note.empty() ? "" : "; ") + format_number(kl->numbers.at("infinite")) +
              " rows with infinite KL left out";
    }
    const std::string overlap = label_of(about, "overlap");
    if (!overlap.empty() && quantized) note += (note.empty() ? "" : "; ") + overlap;
    cells.push_back(note);
    table.add_row(std::move(cells));
  }
  table.drop_empty_columns();
  return table;
}

Table difference_table(const CellRows& cell) {
  Table table({{"arm", false}, {"minus", false}, {"KL difference"}, {"95 % interval"}, {"z"}});
  for (const ResultRow& row : cell.rows) {
    if (row.metric != "kl_difference") continue;
    const std::string interval =
        row.ci_method.empty() ? "n/a"
                              : format_number(row.ci_lo, 3) + " .. " + format_number(row.ci_hi, 3);
    table.add_row({row.arm, row.paired_with, text_of(&row), interval,
                   row.se > 0 ? format_fixed(row.value / row.se, 1) : "n/a"});
  }
  return table;
}

Table bucket_table(const std::vector<CellRows>& cells, const std::string& cell) {
  std::vector<Column> columns{{"KL by position", false}};
  std::vector<const CellRows*> buckets;
  std::vector<std::string> arms;
  for (const CellRows& candidate : cells) {
    if (!candidate.cell.starts_with(cell + "@")) continue;
    buckets.push_back(&candidate);
    columns.push_back({candidate.cell.substr(cell.size() + 1)});
    for (const std::string& arm : candidate.arms) {
      if (candidate.find(arm, "kl") != nullptr &&
          std::find(arms.begin(), arms.end(), arm) == arms.end()) {
        arms.push_back(arm);
      }
    }
  }
  Table table(columns);
  for (const std::string& arm : arms) {
    std::vector<std::string> line{arm};
    for (const CellRows* bucket : buckets) line.push_back(text_of(bucket->find(arm, "kl")));
    table.add_row(std::move(line));
  }
  return table;
}

std::string text_report(const std::vector<ResultRow>& rows) {
  const std::vector<CellRows> cells = split_cells(rows);
  std::string text;
  for (const CellRows& cell : cells) {
    if (is_bucket(cell.cell)) continue;
    check_mergeable(cell);
    text += heading(cell) + "\n" + arms_table(cell).text();
    const std::string weak = weak_columns(cell);
    if (!weak.empty()) text += cat("reference too weak: ", weak, "\n");
    if (has_row_errors(cell)) text += cat(kRowErrors, "\n");
    const Table differences = difference_table(cell);
    if (differences.num_rows() > 0) text += cat("\n", differences.text());
    const Table buckets = bucket_table(cells, cell.cell);
    if (buckets.num_rows() > 0) text += cat("\n", buckets.text());
    text += "\n";
  }
  return text;
}

std::string markdown_report(const std::vector<ResultRow>& rows,
                            const std::vector<std::string>& notes) {
  const std::vector<CellRows> cells = split_cells(rows);
  std::string text;
  for (const CellRows& cell : cells) {
    if (is_bucket(cell.cell)) continue;
    check_mergeable(cell);
    text += cat("## ", heading(cell), "\n\n", arms_table(cell).markdown(), "\n");
    const std::string weak = weak_columns(cell);
    if (!weak.empty()) text += cat("Reference too weak: ", weak, ".\n\n");
    if (has_row_errors(cell)) text += cat("Note: ", kRowErrors, ".\n\n");
    const Table differences = difference_table(cell);
    if (differences.num_rows() > 0) text += differences.markdown() + "\n";
    const Table buckets = bucket_table(cells, cell.cell);
    if (buckets.num_rows() > 0) text += buckets.markdown() + "\n";
  }
  text += std::string(kLegend) + "\n";
  if (!notes.empty()) text += "\nNotes:\n\n";
  for (const std::string& note : notes) text += cat("- ", note, "\n");
  return text;
}

}  // namespace oscar
