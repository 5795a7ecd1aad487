// Internal to the weight readers: the per-type block expanders of each instruction set, which agree
// bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>

namespace oscar::dequantize {

// Expands `num_blocks` whole blocks of one type; source and destination need no alignment. For the
// unquantized types a block is one element.
using BlockFunction = void (*)(const uint8_t* source, size_t num_blocks, float* destination);

// type: a GGUF type id of WeightType. Null for an unknown type.
BlockFunction scalar_function(uint32_t type);
// Only after cpu_features() said so.
BlockFunction avx2_function(uint32_t type);
BlockFunction avx512_function(uint32_t type);

}  // namespace oscar::dequantize
