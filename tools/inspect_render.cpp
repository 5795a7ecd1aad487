// Text form of an inspect document: aligned scalars, then one table for each array of objects.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/inspect.h"

namespace oscar {
namespace {

using Json = nlohmann::ordered_json;
using Cells = std::vector<std::pair<std::string, std::string>>;  // column, text

std::string binary_size(double bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  for (; bytes >= 1024.0 && unit + 1 < std::size(kUnits); ++unit) bytes /= 1024.0;
  return fmt::format("{:.1f} {}", bytes, kUnits[unit]);
}

std::string text_of(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number_float()) return fmt::format("{:.6g}", value.get<double>());
  if (!value.is_array()) return value.dump();
  std::string text;
  for (const Json& item : value) text += (text.empty() ? "" : ", ") + text_of(item);
  return "[" + text + "]";
}

bool is_table(const Json& value) {
  return value.is_array() && !value.empty() && value[0].is_object();
}

// Nested objects become dotted columns; lists of objects and lists longer than a shape are left to
// the JSON form.
void flatten(const Json& object, const std::string& prefix, Cells& cells) {
  for (const auto& [name, value] : object.items()) {
    if (value.is_object()) {
      flatten(value, prefix + name + ".", cells);
    } else if (!value.is_array()) {
      cells.emplace_back(prefix + name, text_of(value));
    } else if (value.size() <= 4 && !is_table(value) && !name.ends_with("_per_head")) {
      cells.emplace_back(prefix + name, text_of(value));
    }
  }
}

struct Row {
  std::string first_layer, last_layer;  // empty: the table has no layers
  Cells cells;
};

// Neighbouring layers that say the same share a row.
std::vector<Row> collapse(const Json& table) {
  std::vector<Row> rows;
  for (const Json& object : table) {
    Row row;
    for (const auto& [name, value] : object.items()) {
      if (name == "layer") row.first_layer = row.last_layer = text_of(value);
    }
    Json rest = object;
    rest.erase("layer");
    flatten(rest, "", row.cells);
    if (!rows.empty() && !row.first_layer.empty() && rows.back().cells == row.cells) {
      rows.back().last_layer = row.last_layer;
    } else {
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

bool is_number(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789.-+e") == std::string::npos;
}

std::string render_table(const Json& table) {
  const std::vector<Row> rows = collapse(table);
  std::vector<std::string> columns;
  if (!rows[0].first_layer.empty()) columns.push_back("layer");
  for (const Row& row : rows) {
    for (const auto& [name, text] : row.cells) {
      if (std::find(columns.begin(), columns.end(), name) == columns.end()) columns.push_back(name);
    }
  }
  std::vector<std::vector<std::string>> grid = {columns};
  for (const Row& row : rows) {
    std::vector<std::string>& line = grid.emplace_back(columns.size());
    for (size_t c = 0; c < columns.size(); ++c) {
      if (columns[c] == "layer") {
        line[c] = row.first_layer == row.last_layer ? row.first_layer
                                                    : row.first_layer + "-" + row.last_layer;
      }
      for (const auto& [name, text] : row.cells) {
        if (name == columns[c]) line[c] = text;
      }
    }
  }
  std::vector<size_t> widths(columns.size());
  for (const auto& line : grid) {
    for (size_t c = 0; c < line.size(); ++c) widths[c] = std::max(widths[c], line[c].size());
  }
  std::string text;
  for (const auto& line : grid) {
    std::string one = " ";
    for (size_t c = 0; c < line.size(); ++c) {
      // Numbers, and the heads above them, stand to the right.
      const bool right = is_number(grid.size() > 1 ? grid[1][c] : "");
      one += right ? fmt::format(" {:>{}}", line[c], widths[c])
                   : fmt::format(" {:<{}}", line[c], widths[c]);
    }
    one.erase(one.find_last_not_of(' ') + 1);
    text += one + "\n";
  }
  return text;
}

void render_object(const Json& object, const std::string& indent, std::string& text) {
  size_t width = 0;
  for (const auto& [name, value] : object.items()) {
    if (!is_table(value) && !value.is_object()) width = std::max(width, name.size());
  }
  for (const auto& [name, value] : object.items()) {
    if (is_table(value) || value.is_object()) continue;
    std::string line = text_of(value);
    if (name.ends_with("bytes") && value.is_number()) {
      line += fmt::format(" ({})", binary_size(value.get<double>()));
    }
    text += fmt::format("{}{:<{}}  {}\n", indent, name, width, line);
  }
  for (const auto& [name, value] : object.items()) {
    if (is_table(value)) {
      text += fmt::format("{}{} ({})\n{}", indent, name, value.size(), render_table(value));
    } else if (value.is_object() && !value.empty()) {
      text += fmt::format("{}{}\n", indent, name);
      render_object(value, indent + "  ", text);
    }
  }
}

}  // namespace

std::string render_document(const std::string& json) {
  std::string text;
  render_object(Json::parse(json), "", text);
  return text;
}

}  // namespace oscar
