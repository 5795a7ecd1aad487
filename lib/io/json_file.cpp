#include "io/json_file.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "base/error.h"
#include "io/mapped_file.h"

namespace oscar {
namespace {

// Builds the tree from parser events; returning false stops the parser, `problem` says why.
class TreeBuilder : public nlohmann::json_sax<nlohmann::json> {
 public:
  JsonValue root;
  std::string problem;

  bool null() override { return add({}); }
  bool boolean(bool flag) override {
    JsonValue value;
    value.kind = JsonValue::Kind::kBool;
    value.boolean = flag;
    return add(std::move(value));
  }
  bool number_integer(number_integer_t number) override { return add_integer(number); }
  bool number_unsigned(number_unsigned_t number) override {
    if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return stop(cat("the integer ", number, " does not fit 63 bits"));
    }
    return add_integer(static_cast<int64_t>(number));
  }
  bool number_float(number_float_t number, const string_t& literal) override {
    if (!std::isfinite(number))
      return stop("the number " + literal.substr(0, 40) + " is too large");
    JsonValue value;
    value.kind = JsonValue::Kind::kNumber;
    value.number = number;
    return add(std::move(value));
  }
  bool string(string_t& text) override {
    JsonValue value;
    value.kind = JsonValue::Kind::kString;
    value.text = std::move(text);
    return add(std::move(value));
  }
  bool binary(binary_t&) override { return stop("binary values are not JSON"); }
  bool start_object(size_t) override { return open(JsonValue::Kind::kObject); }
  bool start_array(size_t) override { return open(JsonValue::Kind::kArray); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    Level& level = levels_.back();
    if (!level.keys.insert(name).second)
      return stop("duplicate key \"" + name.substr(0, 80) + "\"");
    level.value.members.emplace_back(std::move(name), JsonValue{});
    return true;
  }
  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    // The library's text starts with its own identifier, "[json.exception....] ".
    const std::string text = error.what();
    const size_t end = text.find("] ");
    problem = cat("not valid JSON at byte ", position, ": ",
                  end == std::string::npos ? text : text.substr(end + 2));
    return false;
  }

 private:
  struct Level {
    JsonValue value;
    std::unordered_set<std::string> keys;
  };

  bool stop(std::string why) {
    problem = std::move(why);
    return false;
  }
  bool add_integer(int64_t number) {
    JsonValue value;
    value.kind = JsonValue::Kind::kInteger;
    value.integer = number;
    value.number = static_cast<double>(number);
    return add(std::move(value));
  }
  bool open(JsonValue::Kind kind) {
    if (levels_.size() == kMaxJsonDepth) return stop(cat("nested deeper than ", kMaxJsonDepth));
    levels_.emplace_back();
    levels_.back().value.kind = kind;
    return true;
  }
  bool close() {
    JsonValue value = std::move(levels_.back().value);
    levels_.pop_back();
    return add(std::move(value));
  }
  bool add(JsonValue value) {
    if (levels_.empty()) {
      root = std::move(value);
    } else if (levels_.back().value.is_array()) {
      levels_.back().value.items.push_back(std::move(value));
    } else {
      levels_.back().value.members.back().second = std::move(value);
    }
    return true;
  }

  std::vector<Level> levels_;
};

}  // namespace

const char* to_string(JsonValue::Kind kind) {
  constexpr const char* kNames[] = {"null",   "bool",  "integer", "number",
                                    "string", "array", "object"};
  return kNames[static_cast<size_t>(kind)];
}

const JsonValue* JsonValue::find(std::string_view key) const {
  for (const auto& [name, value] : members) {
    if (name == key) return &value;
  }
  return nullptr;
}

void check_json_depth(std::string_view text, const std::string& where) {
  size_t depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      in_string = c != '"';
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      OSCAR_CHECK(++depth <= kMaxJsonDepth, where, ": nested deeper than ", kMaxJsonDepth,
                  " at byte ", i);
    } else if ((c == ']' || c == '}') && depth > 0) {
      --depth;
    }
  }
}

JsonValue parse_json(std::string_view text, const std::string& where) {
  TreeBuilder builder;
  const bool ok = nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  OSCAR_CHECK(ok, where, ": ", builder.problem);
  return std::move(builder.root);
}

JsonValue read_json_file(const std::string& path, size_t max_bytes) {
  const auto file = MappedFile::open(path);
  OSCAR_CHECK(file->size() <= max_bytes, path, ": ", file->size(), " bytes, expected at most ",
              max_bytes);
  return parse_json({reinterpret_cast<const char*>(file->data()), file->size()}, path);
}

JsonObject::JsonObject(const JsonValue& value, std::string where)
    : value_(&value), where_(std::move(where)) {
  OSCAR_CHECK(value.is_object(), where_, ": expected a JSON object, got ", to_string(value.kind));
}

const JsonValue* JsonObject::find(std::string_view key) const {
  const JsonValue* value = value_->find(key);
  return value == nullptr || value->is_null() ? nullptr : value;
}

const JsonValue& JsonObject::require(std::string_view key) const {
  const JsonValue* value = find(key);
  OSCAR_CHECK(value != nullptr, where_, ": field ", key, " is missing");
  return *value;
}

void JsonObject::wrong_type(std::string_view key, const JsonValue& value,
                            const char* expected) const {
  fail(where_, ": field ", key, ": expected ", expected, ", got ", to_string(value.kind));
}

int64_t JsonObject::integer(std::string_view key) const {
  const JsonValue& value = require(key);
  if (!value.is_integer()) wrong_type(key, value, "an integer");
  return value.integer;
}
int64_t JsonObject::integer(std::string_view key, int64_t otherwise) const {
  return has(key) ? integer(key) : otherwise;
}
double JsonObject::number(std::string_view key) const {
  const JsonValue& value = require(key);
  if (!value.is_number()) wrong_type(key, value, "a number");
  return value.number;
}
double JsonObject::number(std::string_view key, double otherwise) const {
  return has(key) ? number(key) : otherwise;
}
bool JsonObject::boolean(std::string_view key, bool otherwise) const {
  const JsonValue* value = find(key);
  if (value == nullptr) return otherwise;
  if (!value->is_bool()) wrong_type(key, *value, "true or false");
  return value->boolean;
}
std::string JsonObject::string(std::string_view key) const {
  const JsonValue& value = require(key);
  if (!value.is_string()) wrong_type(key, value, "a string");
  return value.text;
}
std::string JsonObject::string(std::string_view key, const std::string& otherwise) const {
  return has(key) ? string(key) : otherwise;
}

}  // namespace oscar
