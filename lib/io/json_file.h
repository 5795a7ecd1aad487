// Strictly parsed JSON as a plain tree: duplicate keys, excessive depth and trailing text are
// refused, and wrong types are reported with file and key.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace oscar {

struct JsonValue {
  enum class Kind : uint8_t { kNull, kBool, kInteger, kNumber, kString, kArray, kObject };
  Kind kind = Kind::kNull;
  bool boolean = false;
  int64_t integer = 0;                                     // kInteger
  double number = 0.0;                                     // kInteger and kNumber
  std::string text;                                        // kString
  std::vector<JsonValue> items;                            // kArray
  std::vector<std::pair<std::string, JsonValue>> members;  // kObject, in file order

  bool is_null() const { return kind == Kind::kNull; }
  bool is_object() const { return kind == Kind::kObject; }
  bool is_array() const { return kind == Kind::kArray; }
  bool is_string() const { return kind == Kind::kString; }
  bool is_integer() const { return kind == Kind::kInteger; }
  bool is_number() const { return kind == Kind::kInteger || kind == Kind::kNumber; }
  bool is_bool() const { return kind == Kind::kBool; }
  // Null when absent or when this is no object.
  const JsonValue* find(std::string_view key) const;
};

const char* to_string(JsonValue::Kind kind);

inline constexpr size_t kMaxJsonDepth = 64;
// Throws Error when arrays and objects nest deeper than kMaxJsonDepth: to be called before a text
// goes to another JSON library, whose trees are walked recursively.
void check_json_depth(std::string_view text, const std::string& where);

// where: file name (and place) for messages. Throws Error with the byte offset for anything that is
// not one strict JSON value, integers outside int64, nesting deeper than 64.
JsonValue parse_json(std::string_view text, const std::string& where);
// Throws Error as parse_json, and when the file cannot be read or is larger than max_bytes.
JsonValue read_json_file(const std::string& path, size_t max_bytes = size_t{64} << 20);

// An object with the name of its file: typed members whose absence or wrong type is an Error naming
// file and key. null counts as absent.
class JsonObject {
 public:
  // value must be an object (else Error) and outlive this.
  JsonObject(const JsonValue& value, std::string where);
  const std::string& where() const { return where_; }
  const JsonValue* find(std::string_view key) const;  // null: absent or null
  bool has(std::string_view key) const { return find(key) != nullptr; }
  int64_t integer(std::string_view key) const;
  int64_t integer(std::string_view key, int64_t otherwise) const;
  double number(std::string_view key) const;
  double number(std::string_view key, double otherwise) const;
  bool boolean(std::string_view key, bool otherwise) const;
  std::string string(std::string_view key) const;
  std::string string(std::string_view key, const std::string& otherwise) const;

 private:
  const JsonValue& require(std::string_view key) const;
  [[noreturn]] void wrong_type(std::string_view key, const JsonValue& value,
                               const char* expected) const;
  const JsonValue* value_;
  std::string where_;
};

}  // namespace oscar
