#include "io/results.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/error.h"
#include "io/atomic_file.h"
#include "io/json_file.h"
#include "io/mapped_file.h"

namespace oscar {
namespace {

using Json = nlohmann::ordered_json;

struct TextField {
  const char* name;
  std::string ResultRow::*member;
  bool required;
};
constexpr TextField kTexts[] = {
    {"suite", &ResultRow::suite, true},
    {"cell", &ResultRow::cell, true},
    {"metric", &ResultRow::metric, true},
    {"arm", &ResultRow::arm, true},
    {"mode", &ResultRow::mode, true},
    {"ci_method", &ResultRow::ci_method, false},
    {"paired_with", &ResultRow::paired_with, false},
};
struct NumberField {
  const char* name;
  double ResultRow::*member;
  bool interval;  // present only with an interval
};
constexpr NumberField kNumbers[] = {
    {"n", &ResultRow::n, false},           {"sum", &ResultRow::sum, false},
    {"sum_sq", &ResultRow::sum_sq, false}, {"value", &ResultRow::value, false},
    {"se", &ResultRow::se, false},         {"ci_lo", &ResultRow::ci_lo, true},
    {"ci_hi", &ResultRow::ci_hi, true},
};

bool is_field(std::string_view name) {
  const auto named = [&](const auto& field) { return name == field.name; };
  return std::any_of(std::begin(kTexts), std::end(kTexts), named) ||
         std::any_of(std::begin(kNumbers), std::end(kNumbers), named);
}

Json number_json(double number) {
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number > 0 ? "inf" : "-inf";
  // Counts read better without ".0".
  if (number == std::floor(number) && std::abs(number) < 0x1p53) {
    return static_cast<int64_t>(number);
  }
  return number;
}
bool not_finite(const std::string& text, double& number) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (text == "nan") number = std::numeric_limits<double>::quiet_NaN();
  if (text == "inf") number = kInfinity;
  if (text == "-inf") number = -kInfinity;
  return text == "nan" || text == "inf" || text == "-inf";
}

// Puts a value under a dotted name.
void put(Json& root, const std::string& name, Json value) {
  Json* at = &root;
  size_t begin = 0;
  while (true) {
    const size_t dot = name.find('.', begin);
    const std::string part = name.substr(begin, dot - begin);
    OSCAR_CHECK(!part.empty(), "result row: \"", name, "\" is not a usable name");
    const bool last = dot == std::string::npos;
    OSCAR_CHECK(!(begin == 0 && is_field(part)), "result row: the name ", name,
                " is a field of its own");
    Json& child = (*at)[part];
    OSCAR_CHECK(last ? child.is_null() : child.is_null() || child.is_object(),
                "result row: the name ", name, " clashes with another one");
    if (last) {
      child = std::move(value);
      return;
    }
    if (child.is_null()) child = Json::object();
    at = &child;
    begin = dot + 1;
  }
}

void read_extra(const std::string& name, const JsonValue& value, const std::string& where,
                ResultRow& row) {
  using Kind = JsonValue::Kind;
  double number = 0.0;
  if (value.is_object()) {
    for (const auto& [key, item] : value.members) read_extra(name + "." + key, item, where, row);
  } else if (value.is_number()) {
    row.numbers[name] = value.number;
  } else if (value.kind == Kind::kBool) {
    row.numbers[name] = value.boolean ? 1.0 : 0.0;
  } else if (value.is_string() && not_finite(value.text, number)) {
    row.numbers[name] = number;
  } else if (value.is_string()) {
    row.labels[name] = value.text;
  } else {
    fail(where, ": field ", name, ": expected a number or a text, got ", to_string(value.kind));
  }
}

bool adds_up(std::string_view name) {
  name.remove_prefix(name.rfind('.') + 1);
  constexpr std::array<std::string_view, 5> kPrefixes = {"tokens_", "time_", "sum_", "count_",
                                                         "n_"};
  constexpr std::array<std::string_view, 4> kNames = {"truncated", "looped", "no_answer",
                                                      "ungradable"};
  return std::any_of(kPrefixes.begin(), kPrefixes.end(),
                     [&](std::string_view prefix) { return name.starts_with(prefix); }) ||
         std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}
bool may_differ(std::string_view label) {
  return label == "command" || label == "device" || label == "time" || label == "host";
}

std::string identity(const ResultRow& row) {
  return cat(row.suite, " / ", row.cell, " / ", row.metric, " / ", row.arm, " / ", row.mode,
             row.paired_with.empty() ? "" : " / paired with ", row.paired_with);
}

struct Estimate {
  double value, se;
};
Estimate estimate(const ResultRow& row, const std::string& what) {
  const auto found = row.labels.find("estimator");
  const std::string rule = found == row.labels.end() ? "mean" : found->second;
  OSCAR_CHECK(rule == "mean" || rule == "exp_mean", what, ": estimator ", rule,
              " cannot be merged; expected mean or exp_mean");
  OSCAR_CHECK(row.n > 0, what, ": n = ", row.n, ", nothing to merge");
  const double mean = row.sum / row.n;
  // Rounding can leave a tiny negative variance.
  const double variance = std::max(0.0, row.sum_sq / row.n - mean * mean);
  const double se = row.n > 1 ? std::sqrt(variance / (row.n - 1)) : 0.0;
  if (rule == "mean") return {mean, se};
  return {std::exp(mean), std::exp(mean) * se};
}

void check_follows(const ResultRow& row, const std::string& what) {
  const double expected = estimate(row, what).value;
  OSCAR_CHECK(std::abs(row.value - expected) <= 1e-9 * std::abs(expected) + 1e-300 ||
                  (std::isinf(expected) && row.value == expected),
              what, ": the value ", row.value, " does not follow from sum / n (", expected,
              "), so rows of it cannot be merged");
}

// Every label of `row` that matters stands in `other` with the same text.
void check_labels(const ResultRow& row, const ResultRow& other, const std::string& what) {
  for (const auto& [name, text] : row.labels) {
    if (may_differ(name)) continue;
    const auto found = other.labels.find(name);
    OSCAR_CHECK(found != other.labels.end(), what, ": ", name, " is not in every row");
    OSCAR_CHECK(found->second == text, what, ": ", name, " differs: ", found->second, " and ",
                text);
  }
}

void add(ResultRow& to, const ResultRow& from, const std::string& what) {
  to.n += from.n;
  to.sum += from.sum;
  to.sum_sq += from.sum_sq;
  OSCAR_CHECK(to.numbers.size() == from.numbers.size(), what, ": the rows have different numbers");
  for (auto& [name, number] : to.numbers) {
    const auto other = from.numbers.find(name);
    OSCAR_CHECK(other != from.numbers.end(), what, ": the number ", name, " is not in every row");
    if (adds_up(name)) {
      number += other->second;
    } else {
      OSCAR_CHECK(number == other->second || (std::isnan(number) && std::isnan(other->second)),
                  what, ": ", name, " differs: ", number, " and ", other->second);
    }
  }
  check_labels(from, to, what);
  check_labels(to, from, what);
}

}  // namespace

std::string to_json_line(const ResultRow& row) {
  Json json = Json::object();
  for (const TextField& field : kTexts) {
    if (field.required) json[field.name] = row.*field.member;
  }
  for (const NumberField& field : kNumbers) {
    if (!field.interval || !row.ci_method.empty()) {
      json[field.name] = number_json(row.*field.member);
    }
  }
  if (!row.ci_method.empty()) json["ci_method"] = row.ci_method;
  if (!row.paired_with.empty()) json["paired_with"] = row.paired_with;
  for (const auto& [name, number] : row.numbers) put(json, name, number_json(number));
  for (const auto& [name, text] : row.labels) {
    double ignored = 0.0;
    OSCAR_CHECK(!not_finite(text, ignored), "result row: the label ", name, " reads \"", text,
                "\", which stands for a number");
    put(json, name, text);
  }
  // Invalid UTF-8 (file names) is replaced, not an exception.
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

ResultRow parse_result_row(const std::string& line, const std::string& where) {
  const JsonValue document = parse_json(line, where);
  const JsonObject json(document, where);
  ResultRow row;
  for (const TextField& field : kTexts) {
    row.*field.member = field.required ? json.string(field.name) : json.string(field.name, "");
  }
  for (const NumberField& field : kNumbers) {
    const JsonValue* value = json.find(field.name);
    if (value != nullptr && value->is_string() && not_finite(value->text, row.*field.member))
      continue;
    const bool optional = field.interval && row.ci_method.empty();
    row.*field.member = optional ? json.number(field.name, 0.0) : json.number(field.name);
  }
  for (const auto& [name, value] : document.members) {
    if (!is_field(name) && !value.is_null()) read_extra(name, value, where, row);
  }
  return row;
}

std::vector<ResultRow> read_rows(const std::string& path) {
  const auto file = MappedFile::open(path);
  std::string_view text(reinterpret_cast<const char*>(file->data()), file->size());
  std::vector<ResultRow> rows;
  for (size_t line = 1; !text.empty(); ++line) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view one = text.substr(0, end);
    if (one.find_first_not_of(" \t\r") != std::string_view::npos) {
      rows.push_back(parse_result_row(std::string(one), cat(path, ":", line)));
    }
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  OSCAR_CHECK(!rows.empty(), path, ": no result rows");
  return rows;
}

void write_rows(const std::vector<ResultRow>& rows, const std::string& path) {
  std::string text;
  for (const ResultRow& row : rows) text += to_json_line(row) + "\n";
  write_file_atomically(path, text);
}

std::vector<ResultRow> merge_rows(const std::vector<ResultRow>& rows) {
  std::vector<ResultRow> merged;
  std::vector<size_t> parts;  // rows behind each merged one
  std::map<std::string, size_t> index;
  for (const ResultRow& row : rows) {
    const std::string what = identity(row);
    const auto [found, is_new] = index.emplace(what, merged.size());
    if (is_new) {
      merged.push_back(row);
      parts.push_back(1);
      continue;
    }
    ResultRow& target = merged[found->second];
    if (parts[found->second] == 1) check_follows(target, what);
    check_follows(row, what);
    add(target, row, what);
    ++parts[found->second];
    const Estimate joint = estimate(target, what);
    target.value = joint.value;
    target.se = joint.se;
    target.ci_method.clear();
    target.ci_lo = target.ci_hi = 0.0;
  }
  return merged;
}

}  // namespace oscar
