// Opening a GGUF file: every count, length and offset is checked against the bytes that are there
// before it is used.
#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>

#include "base/error.h"
#include "io/gguf.h"
#include "io/gguf_types.h"
#include "io/printable.h"

namespace oscar {
namespace {

constexpr uint32_t kMagic = 0x46554747;  // "GGUF"
constexpr size_t kMinPairBytes = 8 + 4 + 1;
constexpr size_t kMinTensorBytes = 8 + 4 + 8 + 4 + 8;
constexpr size_t kMaxTensorName = 64;  // bytes, the terminator of the C library included
constexpr size_t kMaxKey = 65535;
constexpr size_t kMaxParts = 65535;

// Bytes of one value of a fixed-size type, 0 for strings, arrays and unknown types.
size_t scalar_bytes(GgufType type) {
  switch (type) {
    case GgufType::kU8:
    case GgufType::kI8:
    case GgufType::kBool:
      return 1;
    case GgufType::kU16:
    case GgufType::kI16:
      return 2;
    case GgufType::kU32:
    case GgufType::kI32:
    case GgufType::kF32:
      return 4;
    case GgufType::kU64:
    case GgufType::kI64:
    case GgufType::kF64:
      return 8;
    default:
      return 0;
  }
}

// Reads forward through one mapped file; every read is checked.
class Cursor {
 public:
  explicit Cursor(const MappedFile& file) : file_(file) {}
  size_t offset() const { return offset_; }
  size_t left() const { return file_.size() - offset_; }
  const uint8_t* here() const { return file_.data() + offset_; }

  const uint8_t* take(size_t count, const std::string& what) {
    OSCAR_CHECK(count <= left(), file_.path(), ": truncated: ", what, " needs ", count,
                " bytes at offset ", offset_, ", the file has ", left(), " left");
    const uint8_t* start = here();
    offset_ += count;
    return start;
  }
  template <class T>
  T read(const std::string& what) {
    T value;
    std::memcpy(&value, take(sizeof value, what), sizeof value);
    return value;
  }
  std::string_view string(const std::string& what) {
    const auto length = read<uint64_t>(what + " length");
    const uint8_t* start = take(length, what);
    return {reinterpret_cast<const char*>(start), length};
  }

 private:
  const MappedFile& file_;
  size_t offset_ = 0;
};

}  // namespace

// Fills a GgufFile part by part.
class GgufParser {
 public:
  explicit GgufParser(GgufFile& file) : file_(file) {}

  // Adds the tensors of one file, and its metadata when it is the first part; other parts repeat
  // only the split keys.
  void add_part(const std::string& path, bool first) {
    auto mapped = MappedFile::open(path);
    file_.files_.push_back(mapped);
    Cursor cursor(*mapped);
    const Counts counts = read_header(cursor, path, first);
    std::vector<GgufValue> values;
    values.reserve(counts.pairs);
    std::unordered_map<std::string_view, size_t> index;
    for (size_t i = 0; i < counts.pairs; ++i) {
      values.push_back(read_value(cursor, path));
      OSCAR_CHECK(index.emplace(values.back().key, i).second, path, ": duplicate key ",
                  printable(values.back().key));
    }
    if (first) {
      file_.values_ = std::move(values);
      file_.value_index_ = std::move(index);
    } else {
      check_split_number(path, values, index);
    }
    read_tensors(cursor, path, counts.tensors, first ? alignment(path) : file_.alignment_);
  }

 private:
  struct Counts {
    size_t tensors = 0, pairs = 0;
  };

  Counts read_header(Cursor& cursor, const std::string& path, bool first) {
    OSCAR_CHECK(cursor.left() >= 4 && cursor.read<uint32_t>("magic") == kMagic, path,
                ": not a GGUF file (expected the magic \"GGUF\")");
    const auto version = cursor.read<uint32_t>("version");
    const uint32_t swapped = __builtin_bswap32(version);
    OSCAR_CHECK(!(version > 0xffff && swapped <= 0xffff), path,
                ": a big-endian GGUF file (version ", swapped,
                " byte-swapped); only little-endian files are read");
    OSCAR_CHECK(version == 2 || version == 3, path, ": GGUF version ", version,
                ", expected 2 or 3");
    OSCAR_CHECK(first || version == file_.version_, path, ": GGUF version ", version,
                ", the first part has ", file_.version_);
    file_.version_ = version;
    Counts counts;
    counts.tensors = cursor.read<uint64_t>("tensor count");
    counts.pairs = cursor.read<uint64_t>("key count");
    OSCAR_CHECK(counts.tensors <= cursor.left() / kMinTensorBytes, path,
                ": truncated: ", counts.tensors, " tensors cannot stand in the ", cursor.left(),
                " bytes left");
    OSCAR_CHECK(counts.pairs <= cursor.left() / kMinPairBytes, path, ": truncated: ", counts.pairs,
                " keys cannot stand in the ", cursor.left(), " bytes left");
    return counts;
  }

  static GgufValue read_value(Cursor& cursor, const std::string& path) {
    GgufValue value;
    value.key = cursor.string("key");
    const std::string what = "key " + printable(value.key);
    OSCAR_CHECK(!value.key.empty() && value.key.size() <= kMaxKey, path, ": ", what,
                ": expected 1..", kMaxKey, " bytes, got ", value.key.size());
    OSCAR_CHECK(!has_control_characters(value.key), path, ": ", what,
                ": the key contains control characters");
    value.type = static_cast<GgufType>(cursor.read<uint32_t>(what + " type"));
    value.element_type = value.type;
    uint64_t count = 1;
    if (value.type == GgufType::kArray) {
      value.element_type = static_cast<GgufType>(cursor.read<uint32_t>(what + " element type"));
      OSCAR_CHECK(value.element_type != GgufType::kArray, path, ": ", what,
                  ": nested arrays are not supported");
      count = cursor.read<uint64_t>(what + " array length");
    }
    value.count = count;
    value.bytes = cursor.here();
    if (value.element_type == GgufType::kString) {
      OSCAR_CHECK(count <= cursor.left() / 8, path, ": truncated: ", what, " says ", count,
                  " strings, the file has ", cursor.left(), " bytes left");
      for (uint64_t i = 0; i < count; ++i) cursor.string(what);
      return value;
    }
    const size_t bytes = scalar_bytes(value.element_type);
    OSCAR_CHECK(bytes != 0, path, ": ", what, " has the unknown type ",
                static_cast<uint32_t>(value.element_type));
    OSCAR_CHECK(count <= cursor.left() / bytes, path, ": truncated: ", what, " says ", count,
                " elements of ", bytes, " bytes, the file has ", cursor.left(), " bytes left");
    cursor.take(count * bytes, what);
    return value;
  }

  uint32_t alignment(const std::string& path) {
    const GgufValue* value = file_.find("general.alignment");
    if (value == nullptr) return 32;
    OSCAR_CHECK(value->type == GgufType::kU32, path, ": key general.alignment: expected u32, got ",
                to_string(value->type));
    uint32_t alignment = 0;
    std::memcpy(&alignment, value->bytes, sizeof alignment);
    OSCAR_CHECK(std::has_single_bit(alignment), path,
                ": key general.alignment: expected a power of two, got ", alignment);
    file_.alignment_ = alignment;
    return alignment;
  }

  void check_split_number(const std::string& path, const std::vector<GgufValue>& values,
                          const std::unordered_map<std::string_view, size_t>& index) {
    const auto found = index.find("split.no");
    OSCAR_CHECK(found != index.end(), path, ": key split.no is missing");
    const int64_t number = file_.integer_of(values[found->second], 0);
    const auto expected = static_cast<int64_t>(file_.files_.size() - 1);
    OSCAR_CHECK(number == expected, path, ": key split.no: expected ", expected, ", got ", number);
  }

  void read_tensors(Cursor& cursor, const std::string& path, size_t count, size_t alignment) {
    const size_t first = file_.tensors_.size();
    const MappedFile& mapped = *file_.files_.back();
    std::vector<uint64_t> offsets;
    for (size_t i = 0; i < count; ++i) {
      GgufTensor tensor;
      tensor.name = cursor.string("tensor name");
      const std::string what = "tensor " + printable(tensor.name);
      OSCAR_CHECK(!tensor.name.empty() && tensor.name.size() < kMaxTensorName, path, ": ", what,
                  ": expected a name of 1..", kMaxTensorName - 1, " bytes, got ",
                  tensor.name.size());
      OSCAR_CHECK(!has_control_characters(tensor.name), path, ": ", what,
                  ": the name contains control characters");
      read_shape(cursor, path, what, tensor);
      offsets.push_back(cursor.read<uint64_t>(what + " offset"));
      tensor.file = file_.files_.size() - 1;
      file_.tensors_.push_back(std::move(tensor));
    }
    if (count == 0) return;
    const size_t data_start = (cursor.offset() + alignment - 1) / alignment * alignment;
    OSCAR_CHECK(data_start <= mapped.size(), path, ": truncated: tensor data starts at ",
                data_start, ", the file has ", mapped.size(), " bytes");
    const size_t data_bytes = mapped.size() - data_start;
    for (size_t i = 0; i < count; ++i) {
      GgufTensor& tensor = file_.tensors_[first + i];
      const std::string what = "tensor " + printable(tensor.name);
      OSCAR_CHECK(offsets[i] % alignment == 0, path, ": ", what, ": offset ", offsets[i],
                  " is not a multiple of the alignment ", alignment);
      OSCAR_CHECK(offsets[i] <= data_bytes && tensor.byte_count <= data_bytes - offsets[i], path,
                  ": ", what, " needs ", tensor.byte_count, " bytes at data offset ", offsets[i],
                  ", the data section has ", data_bytes);
      tensor.bytes = mapped.data() + data_start + offsets[i];
      OSCAR_CHECK(file_.tensor_index_.emplace(tensor.name, first + i).second, path,
                  ": duplicate tensor name ", printable(tensor.name));
    }
    check_overlap(path, first);
  }

  static void read_shape(Cursor& cursor, const std::string& path, const std::string& what,
                         GgufTensor& tensor) {
    const auto dimensions = cursor.read<uint32_t>(what + " dimensions");
    OSCAR_CHECK(dimensions >= 1 && dimensions <= 4, path, ": ", what,
                ": expected 1..4 dimensions, got ", dimensions);
    uint64_t elements = 1;
    for (uint32_t d = 0; d < dimensions; ++d) {
      const auto extent = cursor.read<uint64_t>(what + " shape");
      OSCAR_CHECK(extent > 0, path, ": ", what, ": dimension ", d, " is zero");
      OSCAR_CHECK(!__builtin_mul_overflow(elements, extent, &elements), path, ": ", what,
                  ": the number of elements overflows");
      tensor.ne.push_back(extent);
    }
    tensor.type_id = cursor.read<uint32_t>(what + " type");
    const GgufTensorType* type = find_gguf_tensor_type(tensor.type_id);
    OSCAR_CHECK(type != nullptr, path, ": ", what, " has the unknown type ", tensor.type_id);
    OSCAR_CHECK(tensor.ne[0] % type->elements == 0, path, ": ", what, ": row length ", tensor.ne[0],
                " is not a multiple of the ", type->name, " block of ", type->elements);
    uint64_t bytes = 0;
    OSCAR_CHECK(!__builtin_mul_overflow(elements / type->elements, type->bytes, &bytes), path, ": ",
                what, ": its size in bytes overflows");
    tensor.byte_count = bytes;
  }

  void check_overlap(const std::string& path, size_t first) {
    std::vector<const GgufTensor*> order;
    for (size_t i = first; i < file_.tensors_.size(); ++i) order.push_back(&file_.tensors_[i]);
    std::sort(order.begin(), order.end(),
              [](const GgufTensor* a, const GgufTensor* b) { return a->bytes < b->bytes; });
    for (size_t i = 1; i < order.size(); ++i) {
      OSCAR_CHECK(order[i - 1]->bytes + order[i - 1]->byte_count <= order[i]->bytes, path,
                  ": tensors ", printable(order[i - 1]->name), " and ", printable(order[i]->name),
                  " overlap");
    }
  }

  GgufFile& file_;
};

namespace {

// The path of part `index` of `count`: split files end in -00001-of-00003.gguf, numbered from 1.
std::string part_path(const std::string& prefix, size_t index, size_t count) {
  const auto five = [](size_t number) {
    const std::string digits = std::to_string(number);
    return std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits;
  };
  return prefix + "-" + five(index + 1) + "-of-" + five(count) + ".gguf";
}

}  // namespace

std::shared_ptr<const GgufFile> GgufFile::open(const std::string& path) {
  auto file = std::make_shared<GgufFile>();
  file->path_ = path;
  GgufParser(*file).add_part(path, true);
  const int64_t count = file->integer("split.count", 1);
  if (count <= 1) return file;

  OSCAR_CHECK(static_cast<uint64_t>(count) <= kMaxParts, path,
              ": key split.count: expected at most ", kMaxParts, ", got ", count);
  const int64_t number = file->integer("split.no");
  OSCAR_CHECK(number >= 0 && number < count, path, ": key split.no: expected 0..", count - 1,
              ", got ", number);
  const auto parts = static_cast<size_t>(count);
  const std::string ending = part_path("", static_cast<size_t>(number), parts);
  OSCAR_CHECK(path.ends_with(ending), path, ": part ", number + 1, " of ", count,
              " of a split file, whose name must end in ", ending);
  const std::string prefix = path.substr(0, path.size() - ending.size());

  auto whole = std::make_shared<GgufFile>();
  whole->path_ = path;
  for (size_t part = 0; part < parts; ++part) {
    const std::string name = part_path(prefix, part, parts);
    OSCAR_CHECK(std::filesystem::exists(name), path, ": part ", part + 1, " of ", count,
                " is missing: ", name);
    GgufParser(*whole).add_part(name, part == 0);
    if (part == 0) {
      OSCAR_CHECK(whole->integer("split.count") == count && whole->integer("split.no") == 0, name,
                  ": split.count or split.no disagrees with ", path);
    }
  }
  const int64_t tensors =
      whole->integer("split.tensors.count", static_cast<int64_t>(whole->tensors_.size()));
  OSCAR_CHECK(tensors == static_cast<int64_t>(whole->tensors_.size()), path,
              ": key split.tensors.count: expected ", whole->tensors_.size(),
              " (the tensors of all parts), got ", tensors);
  return whole;
}

}  // namespace oscar
