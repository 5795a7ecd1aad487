#include "io/safetensors.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "base/error.h"
#include "io/json_file.h"
#include "io/printable.h"

namespace oscar {
namespace {

constexpr size_t kMaxHeaderBytes = size_t{100} << 20;

// Bytes of one element, 0 for a dtype that is not read.
size_t item_bytes(std::string_view dtype) {
  if (dtype == "F64" || dtype == "I64") return 8;
  if (dtype == "F32" || dtype == "I32") return 4;
  if (dtype == "F16" || dtype == "BF16" || dtype == "I16") return 2;
  if (dtype == "I8" || dtype == "U8" || dtype == "BOOL") return 1;
  return 0;
}

size_t size_field(const JsonValue& value, const std::string& what) {
  OSCAR_CHECK(value.is_integer() && value.integer >= 0, what, ": expected an integer >= 0");
  return static_cast<size_t>(value.integer);
}

}  // namespace

class SafeTensorsParser {
 public:
  explicit SafeTensorsParser(SafeTensors& all) : all_(all) {}

  // Adds the tensors of one file that `wanted` names (null: all); returns how many.
  size_t add_file(const std::string& path, const std::set<std::string_view>* wanted) {
    const auto mapped = MappedFile::open(path);
    all_.files_.push_back(mapped);
    OSCAR_CHECK(mapped->size() >= 8, path,
                ": truncated: the header size needs 8 bytes, the file has ", mapped->size());
    uint64_t header_bytes = 0;
    std::memcpy(&header_bytes, mapped->data(), sizeof header_bytes);
    OSCAR_CHECK(header_bytes <= kMaxHeaderBytes, path, ": header of ", header_bytes,
                " bytes, expected at most ", kMaxHeaderBytes);
    OSCAR_CHECK(header_bytes <= mapped->size() - 8, path, ": truncated: header of ", header_bytes,
                " bytes, the file has ", mapped->size() - 8, " after the header size");
    const JsonValue header = parse_json(
        {reinterpret_cast<const char*>(mapped->data()) + 8, header_bytes}, path + ": header");
    OSCAR_CHECK(header.is_object(), path, ": header: expected a JSON object, got ",
                to_string(header.kind));
    const size_t data_bytes = mapped->size() - 8 - header_bytes;
    std::vector<Entry> entries;
    for (const auto& [name, value] : header.members) {
      if (name == "__metadata__") {
        add_metadata(path, value);
      } else {
        entries.push_back(read_entry(path, name, value, data_bytes));
      }
    }
    check_tiling(path, entries, data_bytes);
    size_t added = 0;
    for (Entry& entry : entries) {
      if (wanted != nullptr && !wanted->contains(entry.tensor.name)) continue;
      entry.tensor.bytes = mapped->data() + 8 + header_bytes + entry.begin;
      entry.tensor.file = all_.files_.size() - 1;
      all_.tensors_.push_back(std::move(entry.tensor));
      ++added;
    }
    return added;
  }

  void build_index() {
    for (size_t i = 0; i < all_.tensors_.size(); ++i) all_.index_[all_.tensors_[i].name] = i;
  }

 private:
  struct Entry {
    SafeTensor tensor;
    size_t begin = 0, end = 0;
  };

  void add_metadata(const std::string& path, const JsonValue& value) {
    OSCAR_CHECK(value.is_object(), path, ": __metadata__: expected an object of strings, got ",
                to_string(value.kind));
    for (const auto& [key, text] : value.members) {
      OSCAR_CHECK(text.is_string(), path, ": __metadata__: ", key, ": expected a string, got ",
                  to_string(text.kind));
      all_.metadata_.emplace_back(key, text.text);
    }
  }

  static Entry read_entry(const std::string& path, const std::string& name, const JsonValue& value,
                          size_t data_bytes) {
    const std::string what = cat(path, ": tensor ", printable(name));
    OSCAR_CHECK(!has_control_characters(name), what, ": the name contains control characters");
    const JsonObject object(value, what);
    Entry entry;
    entry.tensor.name = name;
    entry.tensor.dtype = object.string("dtype");
    const size_t item = item_bytes(entry.tensor.dtype);
    OSCAR_CHECK(item != 0, what, ": dtype ", entry.tensor.dtype,
                ", expected one of F64 F32 F16 BF16 I64 I32 I16 I8 U8 BOOL");
    const JsonValue* shape = object.find("shape");
    OSCAR_CHECK(shape != nullptr && shape->is_array(), what, ": shape: expected an array");
    for (const JsonValue& extent : shape->items) {
      entry.tensor.shape.push_back(size_field(extent, what + ": shape"));
    }
    const JsonValue* offsets = object.find("data_offsets");
    OSCAR_CHECK(offsets != nullptr && offsets->is_array() && offsets->items.size() == 2, what,
                ": data_offsets: expected [begin, end]");
    entry.begin = size_field(offsets->items[0], what + ": data_offsets");
    entry.end = size_field(offsets->items[1], what + ": data_offsets");
    OSCAR_CHECK(entry.begin <= entry.end, what, ": data_offsets: begin ", entry.begin,
                " is after end ", entry.end);
    OSCAR_CHECK(entry.end <= data_bytes, what, ": data_offsets end at ", entry.end,
                ", the file has ", data_bytes, " bytes of data");
    size_t expected = 0;
    OSCAR_CHECK(!__builtin_mul_overflow(num_elements(entry.tensor.shape, what), item, &expected),
                what, ": shape ", to_string(entry.tensor.shape), " overflows");
    entry.tensor.byte_count = entry.end - entry.begin;
    OSCAR_CHECK(entry.tensor.byte_count == expected, what, ": shape ",
                to_string(entry.tensor.shape), " of ", entry.tensor.dtype, " needs ", expected,
                " bytes, data_offsets give ", entry.tensor.byte_count);
    return entry;
  }

  // Sorts by offset; the ranges must cover the data exactly.
  static void check_tiling(const std::string& path, std::vector<Entry>& entries,
                           size_t data_bytes) {
    std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
      return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
    });
    size_t covered = 0;
    for (const Entry& entry : entries) {
      OSCAR_CHECK(entry.begin >= covered, path, ": tensor \"", entry.tensor.name, "\" begins at ",
                  entry.begin, " and overlaps the tensor that ends at ", covered);
      OSCAR_CHECK(entry.begin == covered, path, ": hole in the data from ", covered, " to ",
                  entry.begin, " (before tensor \"", entry.tensor.name, "\")");
      covered = entry.end;
    }
    OSCAR_CHECK(covered == data_bytes, path, ": ", data_bytes - covered,
                " trailing bytes after the last tensor");
  }

  SafeTensors& all_;
};

std::shared_ptr<const SafeTensors> SafeTensors::open_file(const std::string& path) {
  auto all = std::make_shared<SafeTensors>();
  all->path_ = path;
  SafeTensorsParser parser(*all);
  parser.add_file(path, nullptr);
  parser.build_index();
  return all;
}

std::shared_ptr<const SafeTensors> SafeTensors::open_folder(const std::string& folder) {
  const std::filesystem::path root(folder);
  OSCAR_CHECK(std::filesystem::is_directory(root), folder, ": expected a folder");
  const std::string index_path = (root / kSafeTensorsIndexName).string();
  if (!std::filesystem::exists(index_path)) {
    const std::string single = (root / "model.safetensors").string();
    OSCAR_CHECK(std::filesystem::exists(single), folder, ": neither model.safetensors nor ",
                kSafeTensorsIndexName, " is there");
    return open_file(single);
  }

  const JsonValue index = read_json_file(index_path, kMaxHeaderBytes);
  const JsonValue* map = index.find("weight_map");
  OSCAR_CHECK(map != nullptr && map->is_object(), index_path,
              ": weight_map: expected an object of file names");
  std::map<std::string, std::set<std::string_view>> names_by_file;
  for (const auto& [name, file] : map->members) {
    OSCAR_CHECK(file.is_string(), index_path, ": weight_map: ", printable(name),
                ": expected a file name");
    const std::string& text = file.text;
    OSCAR_CHECK(!text.empty() && text.find_first_of("/\\") == std::string::npos &&
                    text.find("..") == std::string::npos && !has_control_characters(text),
                index_path, ": weight_map: ", printable(name), ": ", printable(text),
                " is not a plain file name of this folder");
    names_by_file[text].insert(name);
  }
  auto all = std::make_shared<SafeTensors>();
  all->path_ = folder;
  all->has_index_ = true;
  SafeTensorsParser parser(*all);
  for (const auto& [file, names] : names_by_file) {
    const std::string path = (root / file).string();
    OSCAR_CHECK(std::filesystem::exists(path), index_path, ": lists ", file,
                ", which is not in the folder");
    const size_t first = all->tensors_.size();
    if (parser.add_file(path, &names) == names.size()) continue;
    std::set<std::string_view> missing = names;
    for (size_t i = first; i < all->tensors_.size(); ++i) missing.erase(all->tensors_[i].name);
    fail(index_path, ": lists tensor ", printable(*missing.begin()), " in ", file,
         ", which does not hold it (", missing.size(), " missing)");
  }
  parser.build_index();
  return all;
}

const SafeTensor* SafeTensors::find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

WeightType weight_type(const SafeTensors& file, const SafeTensor& tensor) {
  if (tensor.dtype == "F32") return WeightType::kF32;
  if (tensor.dtype == "F16") return WeightType::kF16;
  if (tensor.dtype == "BF16") return WeightType::kBF16;
  fail(file.files()[tensor.file]->path(), ": tensor ", tensor.name, " has dtype ", tensor.dtype,
       "; expected F32, F16 or BF16");
}

}  // namespace oscar
