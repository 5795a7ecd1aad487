#include "report/table.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/error.h"

namespace oscar {
namespace {

std::string padded(const std::string& text, size_t width, bool right) {
  const std::string fill(width - std::min(width, display_width(text)), ' ');
  return right ? fill + text : text + fill;
}

std::string escape_markdown(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '|') escaped += '\\';
    escaped += c == '\n' ? ' ' : c;
  }
  return escaped;
}

std::string printed(const char* format, int precision, double value) {
  char buffer[400];
  const int length = std::snprintf(buffer, sizeof buffer, format, precision, value);
  return std::string(buffer, static_cast<size_t>(std::clamp(length, 0, 399)));
}

}  // namespace

void Table::add_row(std::vector<std::string> cells) {
  OSCAR_CHECK(cells.size() == columns_.size(), "table: ", cells.size(),
              " cells in a row, expected ", columns_.size());
  rows_.push_back(std::move(cells));
}

void Table::drop_empty_columns() {
  for (size_t column = columns_.size(); column-- > 0;) {
    const bool empty = std::all_of(rows_.begin(), rows_.end(), [&](const auto& row) {
      return row[column].empty() || row[column] == "n/a";
    });
    if (!empty) continue;
    columns_.erase(columns_.begin() + static_cast<ptrdiff_t>(column));
    for (auto& row : rows_) row.erase(row.begin() + static_cast<ptrdiff_t>(column));
  }
}

std::string Table::text() const {
  std::vector<size_t> widths;
  for (size_t column = 0; column < columns_.size(); ++column) {
    size_t width = display_width(columns_[column].header);
    for (const auto& row : rows_) width = std::max(width, display_width(row[column]));
    widths.push_back(width);
  }
  const auto line = [&](const auto& cell_of) {
    std::string result;
    for (size_t column = 0; column < columns_.size(); ++column) {
      result += (column == 0 ? "" : "  ") +
                padded(cell_of(column), widths[column], columns_[column].right_aligned);
    }
    result.erase(result.find_last_not_of(' ') + 1);
    return result + "\n";
  };
  std::string result = line([&](size_t column) { return columns_[column].header; });
  result += line([&](size_t column) { return std::string(widths[column], '-'); });
  for (const auto& row : rows_) result += line([&](size_t column) { return row[column]; });
  return result;
}

std::string Table::markdown() const {
  std::string result = "|", rule = "|";
  for (const Column& column : columns_) {
    result += cat(" ", escape_markdown(column.header), " |");
    rule += column.right_aligned ? " ---: |" : " --- |";
  }
  result += "\n" + rule + "\n";
  for (const auto& row : rows_) {
    result += "|";
    for (const std::string& cell : row) result += cat(" ", escape_markdown(cell), " |");
    result += "\n";
  }
  return result;
}

std::string Table::html() const {
  std::string result = "<table>\n<tr>";
  const auto tag = [&](size_t column) {
    return columns_[column].right_aligned ? std::string(" class=\"n\"") : std::string();
  };
  for (size_t column = 0; column < columns_.size(); ++column) {
    result += cat("<th", tag(column), ">", escape_html(columns_[column].header), "</th>");
  }
  result += "</tr>\n";
  for (const auto& row : rows_) {
    result += "<tr>";
    for (size_t column = 0; column < row.size(); ++column) {
      result += cat("<td", tag(column), ">", escape_html(row[column]), "</td>");
    }
    result += "</tr>\n";
  }
  return result + "</table>\n";
}

std::string format_fixed(double value, int decimals) {
  if (std::isnan(value)) return "n/a";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  std::string text = printed("%.*f", decimals, value);
  // A negative number that rounds to zero prints without its sign.
  if (text.find_first_not_of("-0.") == std::string::npos && text[0] == '-') text.erase(0, 1);
  return text;
}

std::string format_number(double value, int digits) {
  if (!std::isfinite(value)) return format_fixed(value, 0);
  if (value == 0) return "0";
  const double size = std::abs(value);
  if (size < 1e-4 || size >= 1e7) return printed("%.*e", std::max(0, digits - 1), value);
  const int magnitude = static_cast<int>(std::floor(std::log10(size)));
  std::string text = format_fixed(value, std::clamp(digits - 1 - magnitude, 0, 12));
  if (text.find('.') == std::string::npos) return text;
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text;
}

std::string format_with_error(std::optional<double> value, std::optional<double> error) {
  if (!value || std::isnan(*value)) return "n/a";
  if (!error || !std::isfinite(*error) || !std::isfinite(*value)) return format_number(*value);
  if (*error == 0) return format_number(*value) + " ± 0";
  const double largest = std::max(std::abs(*value), *error);
  const int magnitude = static_cast<int>(std::floor(std::log10(*error)));
  if (largest < 1e-4) return printed("%.*e", 1, *value) + " ± " + printed("%.*e", 0, *error);
  const int decimals = std::clamp(1 - magnitude, 0, 7);
  return format_fixed(*value, decimals) + " ± " + format_fixed(*error, decimals);
}

size_t display_width(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0U) != 0x80U;
  }));
}

std::string escape_html(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

}  // namespace oscar
