// Internal to the GGUF reader: the tensor types of the format with their names and block sizes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace oscar {

// Those that WeightType lacks can be listed but not expanded.
struct GgufTensorType {
  uint32_t id;
  const char* name;
  size_t elements, bytes;  // of one block
};

// Null: no such type (formats.md 10.3).
const GgufTensorType* find_gguf_tensor_type(uint32_t id);

}  // namespace oscar
