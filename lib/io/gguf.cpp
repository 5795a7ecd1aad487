#include "io/gguf.h"

#include <bit>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "io/gguf_types.h"

namespace oscar {
namespace {

template <class T>
T load(const uint8_t* source) {
  T value;
  std::memcpy(&value, source, sizeof value);
  return value;
}

// A string value: u64 length, then its bytes (checked on opening).
std::string_view string_at(const uint8_t* source) {
  return {reinterpret_cast<const char*>(source + 8), load<uint64_t>(source)};
}

}  // namespace

const char* to_string(GgufType type) {
  constexpr const char* kNames[] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                    "bool", "string", "array", "u64", "i64", "f64"};
  return static_cast<uint32_t>(type) < std::size(kNames) ? kNames[static_cast<uint32_t>(type)]
                                                         : "unknown";
}

std::string gguf_type_name(uint32_t type_id) {
  const GgufTensorType* type = find_gguf_tensor_type(type_id);
  return type == nullptr ? cat("type ", type_id) : type->name;
}

WeightType weight_type(const GgufFile& file, const GgufTensor& tensor) {
  switch (tensor.type_id) {
    case 0:
    case 1:
    case 2:
    case 3:
    case 6:
    case 7:
    case 8:
    case 12:
    case 13:
    case 14:
    case 30:
      return static_cast<WeightType>(tensor.type_id);
    default:
      fail(file.path(), ": tensor ", tensor.name, " has type ", gguf_type_name(tensor.type_id),
           "; expected one of F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K Q5_K Q6_K");
  }
}

const GgufValue* GgufFile::find(std::string_view key) const {
  const auto found = value_index_.find(key);
  return found == value_index_.end() ? nullptr : &values_[found->second];
}

const GgufTensor* GgufFile::find_tensor(std::string_view name) const {
  const auto found = tensor_index_.find(name);
  return found == tensor_index_.end() ? nullptr : &tensors_[found->second];
}

const GgufValue& GgufFile::require(std::string_view key) const {
  const GgufValue* value = find(key);
  OSCAR_CHECK(value != nullptr, path_, ": key ", key, " is missing");
  return *value;
}

void GgufFile::wrong_type(const GgufValue& value, const char* expected) const {
  const bool array = value.type == GgufType::kArray;
  fail(path_, ": key ", value.key, ": expected ", expected, ", got ", to_string(value.type),
       array ? " of " : "", array ? to_string(value.element_type) : "");
}

int64_t GgufFile::integer_of(const GgufValue& value, size_t index) const {
  switch (value.element_type) {
    case GgufType::kU8:
      return value.bytes[index];
    case GgufType::kI8:
      return std::bit_cast<int8_t>(value.bytes[index]);
    case GgufType::kU16:
      return load<uint16_t>(value.bytes + 2 * index);
    case GgufType::kI16:
      return load<int16_t>(value.bytes + 2 * index);
    case GgufType::kU32:
      return load<uint32_t>(value.bytes + 4 * index);
    case GgufType::kI32:
      return load<int32_t>(value.bytes + 4 * index);
    case GgufType::kI64:
      return load<int64_t>(value.bytes + 8 * index);
    case GgufType::kU64: {
      const auto number = load<uint64_t>(value.bytes + 8 * index);
      OSCAR_CHECK(number <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()), path_,
                  ": key ", value.key, ": ", number, " does not fit 63 bits");
      return static_cast<int64_t>(number);
    }
    default:
      wrong_type(value, "an integer");
  }
}

double GgufFile::number_of(const GgufValue& value, size_t index) const {
  if (value.element_type == GgufType::kF32) return load<float>(value.bytes + 4 * index);
  if (value.element_type == GgufType::kF64) return load<double>(value.bytes + 8 * index);
  if (value.element_type == GgufType::kBool || value.element_type == GgufType::kString) {
    wrong_type(value, "a number");
  }
  return static_cast<double>(integer_of(value, index));
}

std::string_view GgufFile::string(std::string_view key) const {
  const GgufValue& value = require(key);
  if (value.type != GgufType::kString) wrong_type(value, "string");
  return string_at(value.bytes);
}
std::string_view GgufFile::string(std::string_view key, std::string_view otherwise) const {
  return has(key) ? string(key) : otherwise;
}
int64_t GgufFile::integer(std::string_view key) const {
  const GgufValue& value = require(key);
  if (value.type == GgufType::kArray) wrong_type(value, "an integer");
  return integer_of(value, 0);
}
int64_t GgufFile::integer(std::string_view key, int64_t otherwise) const {
  return has(key) ? integer(key) : otherwise;
}
double GgufFile::number(std::string_view key) const {
  const GgufValue& value = require(key);
  if (value.type == GgufType::kArray) wrong_type(value, "a number");
  return number_of(value, 0);
}
double GgufFile::number(std::string_view key, double otherwise) const {
  return has(key) ? number(key) : otherwise;
}
bool GgufFile::boolean(std::string_view key, bool otherwise) const {
  const GgufValue* value = find(key);
  if (value == nullptr) return otherwise;
  if (value->type != GgufType::kBool) wrong_type(*value, "bool");
  return value->bytes[0] != 0;
}

std::vector<std::string_view> GgufFile::strings(std::string_view key) const {
  const GgufValue& value = require(key);
  if (value.type != GgufType::kArray || value.element_type != GgufType::kString) {
    wrong_type(value, "array of string");
  }
  std::vector<std::string_view> result;
  result.reserve(value.count);
  const uint8_t* position = value.bytes;
  for (size_t i = 0; i < value.count; ++i) {
    result.push_back(string_at(position));
    position += 8 + result.back().size();
  }
  return result;
}
std::vector<int64_t> GgufFile::integers(std::string_view key) const {
  const GgufValue& value = require(key);
  if (value.type != GgufType::kArray) wrong_type(value, "array of integers");
  std::vector<int64_t> result(value.count);
  for (size_t i = 0; i < value.count; ++i) result[i] = integer_of(value, i);
  return result;
}
std::vector<double> GgufFile::numbers(std::string_view key) const {
  const GgufValue& value = require(key);
  if (value.type != GgufType::kArray) wrong_type(value, "array of numbers");
  std::vector<double> result(value.count);
  for (size_t i = 0; i < value.count; ++i) result[i] = number_of(value, i);
  return result;
}

std::string describe(const GgufValue& value, size_t max_length) {
  const auto element = [&](const uint8_t*& position) {
    if (value.element_type == GgufType::kString) {
      const std::string_view text = string_at(position);
      position += 8 + text.size();
      std::string quoted = "\"";
      for (const char c : text.substr(0, max_length)) {
        const auto byte = static_cast<unsigned char>(c);
        quoted += c == '\n' ? "\\n" : byte < 0x20 || byte == 0x7f ? "?" : std::string(1, c);
      }
      return quoted + (text.size() > max_length ? "...\"" : "\"");
    }
    const uint8_t* start = position;
    switch (value.element_type) {
      case GgufType::kBool:
        position += 1;
        return std::string(start[0] != 0 ? "true" : "false");
      case GgufType::kU8:
        position += 1;
        return std::to_string(*start);
      case GgufType::kI8:
        position += 1;
        return std::to_string(std::bit_cast<int8_t>(*start));
      case GgufType::kU16:
        position += 2;
        return std::to_string(load<uint16_t>(start));
      case GgufType::kI16:
        position += 2;
        return std::to_string(load<int16_t>(start));
      case GgufType::kU32:
        position += 4;
        return std::to_string(load<uint32_t>(start));
      case GgufType::kI32:
        position += 4;
        return std::to_string(load<int32_t>(start));
      case GgufType::kF32:
        position += 4;
        return cat(load<float>(start));
      case GgufType::kU64:
        position += 8;
        return std::to_string(load<uint64_t>(start));
      case GgufType::kI64:
        position += 8;
        return std::to_string(load<int64_t>(start));
      default:
        position += 8;
        return cat(load<double>(start));
    }
  };
  const uint8_t* position = value.bytes;
  if (value.type != GgufType::kArray) return element(position);
  std::string text = cat("[", value.count, " x ", to_string(value.element_type));
  for (size_t i = 0; i < value.count && i < 3; ++i) {
    text += (i == 0 ? ": " : ", ") + element(position);
  }
  return text + (value.count > 3 ? ", ...]" : "]");
}

}  // namespace oscar
