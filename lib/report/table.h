// Tables of text cells, rendered aligned for a terminal, as Markdown, or as HTML; numbers with
// their errors.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace oscar {

struct Column {
  std::string header;
  bool right_aligned = true;
};

class Table {
 public:
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  // Throws Error when the number of cells differs from the number of columns.
  void add_row(std::vector<std::string> cells);
  // Removes the columns whose cells are all empty or "n/a".
  void drop_empty_columns();
  size_t num_rows() const { return rows_.size(); }

  std::string text() const;      // aligned, two spaces between columns, a rule under the header
  std::string markdown() const;  // pipe table; "|" in cells is escaped
  std::string html() const;      // <table>...</table>; cells are escaped

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

// "12.3", at most `digits` significant digits, without exponent between 1e-4 and 1e7. Not finite:
// "inf", "-inf", "n/a".
std::string format_number(double value, int digits = 4);
// With `decimals` digits after the point.
std::string format_fixed(double value, int decimals);
// "0.0063 ± 0.0002": the error has two significant digits and the value as many decimals. Without
// an error the value alone; without a value "n/a".
std::string format_with_error(std::optional<double> value, std::optional<double> error);

// Characters a terminal shows for UTF-8 text (code points).
size_t display_width(const std::string& text);
std::string escape_html(const std::string& text);

}  // namespace oscar
