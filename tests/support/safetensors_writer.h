// Writes safetensors files for tests: honest ones from tensors, or any header over any data.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "support/gguf_writer.h"

namespace oscar_test {

// u64 header length, header, data.
inline Bytes safetensors_bytes(std::string_view header, const Bytes& data) {
  Bytes out;
  append_string(out, header);
  append(out, data.data(), data.size());
  return out;
}

class SafeTensorsWriter {
 public:
  void tensor(const std::string& name, const std::string& dtype, const std::vector<size_t>& shape,
              const Bytes& bytes) {
    std::string extents;
    for (const size_t extent : shape) extents += oscar::cat(extents.empty() ? "" : ",", extent);
    header_ += oscar::cat(header_.empty() ? "" : ",", "\"", name, "\":{\"dtype\":\"", dtype,
                          "\",\"shape\":[", extents, "],\"data_offsets\":[", data_.size(), ",",
                          data_.size() + bytes.size(), "]}");
    append(data_, bytes.data(), bytes.size());
  }
  void tensor_f32(const std::string& name, const std::vector<size_t>& shape,
                  const std::vector<float>& values) {
    Bytes bytes;
    append(bytes, values.data(), values.size() * sizeof(float));
    tensor(name, "F32", shape, bytes);
  }
  Bytes bytes() const {
    return safetensors_bytes(oscar::cat("{\"__metadata__\":{\"format\":\"pt\"}",
                                        header_.empty() ? "" : ",", header_, "}  "),
                             data_);
  }
  void write(const std::string& path) const { write_file(path, bytes()); }

 private:
  std::string header_;
  Bytes data_;
};

}  // namespace oscar_test
