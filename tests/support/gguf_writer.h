// Writes GGUF files for tests: any keys, any tensor bytes, any lie about them.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace oscar_test {

using Bytes = std::vector<uint8_t>;

inline void append(Bytes& out, const void* source, size_t count) {
  if (count == 0) return;
  const size_t old_size = out.size();
  out.resize(old_size + count);
  std::memcpy(out.data() + old_size, source, count);
}
template <class T>
void append_value(Bytes& out, T value) {
  append(out, &value, sizeof value);
}
inline void append_string(Bytes& out, std::string_view text) {
  append_value<uint64_t>(out, text.size());
  append(out, text.data(), text.size());
}

// A new file each time: some file systems flush to the disk when an existing one is overwritten.
inline void write_file(const std::string& path, const Bytes& bytes) {
  std::remove(path.c_str());
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
}
inline void write_file(const std::string& path, std::string_view text) {
  std::remove(path.c_str());
  std::ofstream(path, std::ios::binary) << text;
}

class GgufWriter {
 public:
  uint32_t version = 3;
  size_t alignment =
      32;  // of the data section; the key is written only by u32("general.alignment")

  // Any value: type id, then the bytes as they stand in the file.
  void raw(std::string_view key, uint32_t type, const Bytes& value) {
    append_string(pairs_, key);
    append_value(pairs_, type);
    append(pairs_, value.data(), value.size());
    ++num_pairs_;
  }
  void string(std::string_view key, std::string_view text) {
    Bytes value;
    append_string(value, text);
    raw(key, 8, value);
  }
  void u16(std::string_view key, uint16_t number) { scalar(key, 2, number); }
  void u32(std::string_view key, uint32_t number) { scalar(key, 4, number); }
  void i32(std::string_view key, int32_t number) { scalar(key, 5, number); }
  void f32(std::string_view key, float number) { scalar(key, 6, number); }
  void boolean(std::string_view key, bool flag) {
    scalar(key, 7, static_cast<uint8_t>(flag ? 1 : 0));
  }
  void u64(std::string_view key, uint64_t number) { scalar(key, 10, number); }
  void strings(std::string_view key, const std::vector<std::string>& texts) {
    Bytes value;
    append_value<uint32_t>(value, 8);
    append_value<uint64_t>(value, texts.size());
    for (const std::string& text : texts) append_string(value, text);
    raw(key, 9, value);
  }
  void i32s(std::string_view key, const std::vector<int32_t>& numbers) {
    Bytes value;
    append_value<uint32_t>(value, 5);
    append_value<uint64_t>(value, numbers.size());
    append(value, numbers.data(), numbers.size() * sizeof(int32_t));
    raw(key, 9, value);
  }

  // ne: fastest extent first.
  void tensor(std::string_view name, const std::vector<uint64_t>& ne, uint32_t type,
              const Bytes& bytes) {
    data_.resize((data_.size() + alignment - 1) / alignment * alignment);
    tensor_at(name, ne, type, data_.size());
    append(data_, bytes.data(), bytes.size());
  }
  void tensor_f32(std::string_view name, const std::vector<uint64_t>& ne,
                  const std::vector<float>& values) {
    Bytes bytes;
    append(bytes, values.data(), values.size() * sizeof(float));
    tensor(name, ne, 0, bytes);
  }
  // Only the description, with any offset.
  void tensor_at(std::string_view name, const std::vector<uint64_t>& ne, uint32_t type,
                 uint64_t offset) {
    append_string(infos_, name);
    append_value(infos_, static_cast<uint32_t>(ne.size()));
    for (const uint64_t extent : ne) append_value(infos_, extent);
    append_value(infos_, type);
    append_value(infos_, offset);
    ++num_tensors_;
  }

  Bytes bytes() const {
    Bytes out;
    append(out, "GGUF", 4);
    append_value(out, version);
    append_value(out, num_tensors_);
    append_value(out, num_pairs_);
    append(out, pairs_.data(), pairs_.size());
    append(out, infos_.data(), infos_.size());
    out.resize((out.size() + alignment - 1) / alignment * alignment);
    append(out, data_.data(), data_.size());
    return out;
  }
  void write(const std::string& path) const { write_file(path, bytes()); }

 private:
  template <class T>
  void scalar(std::string_view key, uint32_t type, T number) {
    Bytes value;
    append_value(value, number);
    raw(key, type, value);
  }

  uint64_t num_tensors_ = 0, num_pairs_ = 0;
  Bytes pairs_, infos_, data_;
};

}  // namespace oscar_test
