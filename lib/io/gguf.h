// GGUF v2 and v3 files (single or split), memory-mapped: metadata by key and tensors by name
// (formats.md 10). Everything is bounds-checked while opening; views point into the mapping.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/tensor.h"
#include "io/mapped_file.h"
#include "io/weight_types.h"

namespace oscar {

// Numbers are those of the file.
enum class GgufType : uint32_t {
  kU8 = 0,
  kI8 = 1,
  kU16 = 2,
  kI16 = 3,
  kU32 = 4,
  kI32 = 5,
  kF32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kU64 = 10,
  kI64 = 11,
  kF64 = 12,
};
const char* to_string(GgufType type);

// One key-value pair; the value stays in the mapping.
struct GgufValue {
  std::string_view key;
  GgufType type = GgufType::kU8;          // kArray for arrays
  GgufType element_type = GgufType::kU8;  // of arrays; else equal to type
  size_t count = 1;                       // elements of an array, else 1
  const uint8_t* bytes = nullptr;         // first element; a string is u64 length + bytes
};

struct GgufTensor {
  std::string_view name;
  std::vector<size_t> ne;  // 1..4 extents, fastest first: HF [out, in] is [in, out]
  uint32_t type_id = 0;
  size_t file = 0;                 // which part of a split file
  const uint8_t* bytes = nullptr;  // in the mapping
  size_t byte_count = 0;

  Shape shape() const { return {ne.rbegin(), ne.rend()}; }  // slowest first, as Hugging Face says
};

class GgufFile {
 public:
  // path: a .gguf file; any part of a split one opens all of them. Throws Error naming file and key
  // or tensor: not a GGUF file, big-endian, unknown version or type, truncated, sizes past the end,
  // duplicate names, missing parts.
  static std::shared_ptr<const GgufFile> open(const std::string& path);

  const std::string& path() const { return path_; }
  uint32_t version() const { return version_; }
  uint32_t alignment() const { return alignment_; }
  const std::vector<std::shared_ptr<const MappedFile>>& files() const { return files_; }

  const std::vector<GgufValue>& metadata() const { return values_; }  // file order
  const GgufValue* find(std::string_view key) const;                  // null: absent
  bool has(std::string_view key) const { return find(key) != nullptr; }
  const std::vector<GgufTensor>& tensors() const { return tensors_; }  // file order
  const GgufTensor* find_tensor(std::string_view name) const;          // null: absent

  // Typed access. The versions without a default throw Error naming file and key when it is
  // absent; all throw when the stored type cannot be read as asked. integer(): any integer type
  // that fits int64; number(): any integer or float type.
  std::string_view string(std::string_view key) const;
  std::string_view string(std::string_view key, std::string_view otherwise) const;
  int64_t integer(std::string_view key) const;
  int64_t integer(std::string_view key, int64_t otherwise) const;
  double number(std::string_view key) const;
  double number(std::string_view key, double otherwise) const;
  bool boolean(std::string_view key, bool otherwise) const;
  std::vector<std::string_view> strings(std::string_view key) const;  // array of strings
  std::vector<int64_t> integers(std::string_view key) const;          // array of integers
  std::vector<double> numbers(std::string_view key) const;            // array of integers or floats

 private:
  friend class GgufParser;
  const GgufValue& require(std::string_view key) const;
  int64_t integer_of(const GgufValue& value, size_t index) const;
  double number_of(const GgufValue& value, size_t index) const;
  [[noreturn]] void wrong_type(const GgufValue& value, const char* expected) const;

  std::string path_;
  uint32_t version_ = 0, alignment_ = 32;
  std::vector<std::shared_ptr<const MappedFile>> files_;
  std::vector<GgufValue> values_;
  std::vector<GgufTensor> tensors_;
  std::unordered_map<std::string_view, size_t> value_index_, tensor_index_;
};

// "Q4_K", or the number when no such type is known.
std::string gguf_type_name(uint32_t type_id);
// The stored type of a tensor; throws Error naming file, tensor and type when this program cannot
// expand it.
WeightType weight_type(const GgufFile& file, const GgufTensor& tensor);

// Text of a value for people: strings quoted and shortened, arrays as "[151936 strings: "!", ...]".
std::string describe(const GgufValue& value, size_t max_length = 60);

}  // namespace oscar
