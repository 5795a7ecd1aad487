// Element types of stored weights (GGUF and safetensors) and their expansion to float32.
#pragma once

#include <cstddef>
#include <cstdint>

namespace oscar {

// Numbers are the GGUF type ids.
enum class WeightType : uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kBF16 = 30,
};

const char* type_name(WeightType type);
size_t block_elements(WeightType type);  // elements in one block (1, 32 or 256)
size_t block_bytes(WeightType type);

// Bytes of a row of `columns` elements; throws when columns is not a multiple of the block.
size_t row_bytes(WeightType type, size_t columns);

// Expands `columns` elements starting at a block boundary. Exact float32 values of the format
// (fixtures are made from the same values).
void dequantize_row(WeightType type, const uint8_t* source, size_t columns, float* destination);

// True when `columns` elements hold no NaN or infinity; of block types the scales are looked at,
// which decides it.
bool row_is_finite(WeightType type, const uint8_t* source, size_t columns);

}  // namespace oscar
