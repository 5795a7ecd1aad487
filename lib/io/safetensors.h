// safetensors files and sharded folders, memory-mapped: tensors by name, everything checked while
// opening (formats.md 9).
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/tensor.h"
#include "io/mapped_file.h"
#include "io/weight_types.h"

namespace oscar {

struct SafeTensor {
  std::string name;
  std::string dtype;               // F64 F32 F16 BF16 I64 I32 I16 I8 U8 BOOL
  Shape shape;                     // [] = one element
  const uint8_t* bytes = nullptr;  // in the mapping, no alignment promised
  size_t byte_count = 0;
  size_t file = 0;  // index into SafeTensors::files()
};

class SafeTensors {
 public:
  // One file. Throws Error naming file and tensor: truncated, header size, offsets, a shape that
  // does not give the size, holes, overlaps, trailing bytes, duplicate names, unknown dtype.
  static std::shared_ptr<const SafeTensors> open_file(const std::string& path);
  // A folder: model.safetensors.index.json says which file holds a tensor (other copies and files
  // are ignored; a listed file or tensor that is missing is an error), else model.safetensors.
  static std::shared_ptr<const SafeTensors> open_folder(const std::string& folder);

  const std::string& path() const { return path_; }  // as given
  // Mapped files, in order of name.
  const std::vector<std::shared_ptr<const MappedFile>>& files() const { return files_; }
  bool has_index() const { return has_index_; }
  const std::vector<SafeTensor>& tensors() const { return tensors_; }  // by file, then by offset
  const SafeTensor* find(std::string_view name) const;                 // null: absent
  // __metadata__ of all files, in file order.
  const std::vector<std::pair<std::string, std::string>>& metadata() const { return metadata_; }

 private:
  friend class SafeTensorsParser;
  std::string path_;
  bool has_index_ = false;
  std::vector<std::shared_ptr<const MappedFile>> files_;
  std::vector<SafeTensor> tensors_;
  std::vector<std::pair<std::string, std::string>> metadata_;
  std::unordered_map<std::string_view, size_t> index_;
};

inline constexpr const char* kSafeTensorsIndexName = "model.safetensors.index.json";

// The stored type of a weight; throws Error naming file, tensor and dtype for anything but F32,
// F16, BF16.
WeightType weight_type(const SafeTensors& file, const SafeTensor& tensor);

}  // namespace oscar
