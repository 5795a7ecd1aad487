#include "report/simulate_report.h"

#include <algorithm>
#include <map>
#include <optional>

namespace oscar {
namespace {

std::string number(const ResultRow& row, const std::string& name, double factor = 1,
                   int digits = 3) {
  const auto found = row.numbers.find(name);
  return found == row.numbers.end() ? "n/a" : format_number(factor * found->second, digits);
}

std::string label(const ResultRow& row, const std::string& name) {
  const auto found = row.labels.find(name);
  return found == row.labels.end() ? "" : found->second;
}

}  // namespace

Table simulate_summary_table(const std::vector<ResultRow>& rows) {
  Table table({{"arm", false},
               {"windows", false},
               {"bits"},
               {"K error %"},
               {"V error %"},
               {"logit rms"},
               {"attended"},
               {"output error %"},
               {"by K %"},
               {"by V %"}});
  for (const ResultRow& row : rows) {
    if (row.suite != "simulate" || row.cell != "all") continue;
    const std::optional<double> error = row.n < 2 ? std::nullopt : std::optional(100 * row.se);
    table.add_row({row.arm, label(row, "windows"), number(row, "bpe_nominal"),
                   number(row, "k_relative_history", 100), number(row, "v_relative_history", 100),
                   number(row, "logit_rms_history"), number(row, "logit_rms_attended_history"),
                   format_with_error(100 * row.value, error), number(row, "output_error_k", 100),
                   number(row, "output_error_v", 100)});
  }
  return table;
}

Table simulate_table(const std::vector<ResultRow>& rows, size_t limit) {
  std::vector<std::string> arms;
  std::map<std::string, std::map<std::string, const ResultRow*>> by_cell;
  for (const ResultRow& row : rows) {
    if (row.suite != "simulate" || row.cell == "all") continue;
    if (std::find(arms.begin(), arms.end(), row.arm) == arms.end()) arms.push_back(row.arm);
    by_cell[row.cell][row.arm] = &row;
  }
  std::vector<Column> columns{{"output error %", false}};
  for (const std::string& arm : arms) columns.push_back({arm});
  columns.push_back({"logit rms"});
  columns.push_back({"by K %"});
  columns.push_back({"by V %"});
  columns.push_back({"V sink | recent | history %", false});
  Table table(columns);
  if (arms.empty()) return table;
  const std::string& judged = arms.back();
  std::vector<std::pair<double, std::string>> order;
  for (const auto& [cell, by_arm] : by_cell) {
    const auto found = by_arm.find(judged);
    order.emplace_back(found == by_arm.end() ? 0 : -found->second->value, cell);
  }
  std::sort(order.begin(), order.end());
  for (const auto& [negated, cell] : order) {
    if (limit > 0 && table.num_rows() == limit) break;
    std::vector<std::string> line{cell};
    for (const std::string& arm : arms) {
      const auto found = by_cell[cell].find(arm);
      line.push_back(found == by_cell[cell].end() ? "n/a"
                                                  : format_number(100 * found->second->value, 3));
    }
    const auto found = by_cell[cell].find(judged);
    if (found == by_cell[cell].end()) {
      line.insert(line.end(), {"n/a", "n/a", "n/a", "n/a"});
    } else {
      const ResultRow& row = *found->second;
      line.push_back(number(row, "logit_rms_history"));
      line.push_back(number(row, "output_error_k", 100));
      line.push_back(number(row, "output_error_v", 100));
      line.push_back(number(row, "output_error_v_sink", 100, 2) + " | " +
                     number(row, "output_error_v_recent", 100, 2) + " | " +
                     number(row, "output_error_v_history", 100, 2));
    }
    table.add_row(std::move(line));
  }
  return table;
}

}  // namespace oscar
