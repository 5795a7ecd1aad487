// Tables of arms against metrics, made from result rows: what compare prints and what the HTML
// report shows.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "io/results.h"
#include "report/table.h"

namespace oscar {

// Rows of one cell (one text and length), arms in the order of their first row.
struct CellRows {
  std::string cell;
  std::vector<std::string> arms;
  std::vector<ResultRow> rows;
  // The row of an arm and metric; null when there is none. Differences between test arms are found
  // by `paired_with` (empty = any).
  const ResultRow* find(const std::string& arm, const std::string& metric,
                        const std::string& paired_with = "") const;
};

// Splits rows of the suites ppl, kl and the recall family by cell; bucket cells ("name@a-b") stay
// apart, under their own name.
std::vector<CellRows> split_cells(const std::vector<ResultRow>& rows);
bool is_bucket(const std::string& cell);

// Throws Error when rows of one cell disagree in model, data, tokenizer or mode: they must not
// stand in one table.
void check_mergeable(const CellRows& cell);

Table arms_table(const CellRows& cell);        // bits, perplexity, divergence, agreement, recall
Table difference_table(const CellRows& cell);  // kl_difference rows; no rows when there are none
Table bucket_table(const std::vector<CellRows>& cells, const std::string& cell);

// Everything above with headings, as terminal text or as a Markdown document.
std::string text_report(const std::vector<ResultRow>& rows);
std::string markdown_report(const std::vector<ResultRow>& rows,
                            const std::vector<std::string>& notes);

}  // namespace oscar
