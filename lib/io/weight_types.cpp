#include "io/weight_types.h"

#include <array>
#include <cstring>

#include "base/cpu.h"
#include "base/error.h"
#include "io/dequantize.h"

namespace oscar {
namespace {

struct TypeFacts {
  const char* name;
  size_t elements, bytes;  // of a block
};

TypeFacts facts(WeightType type) {
  switch (type) {
    case WeightType::kF32:
      return {"F32", 1, 4};
    case WeightType::kF16:
      return {"F16", 1, 2};
    case WeightType::kBF16:
      return {"BF16", 1, 2};
    case WeightType::kQ4_0:
      return {"Q4_0", 32, 18};
    case WeightType::kQ4_1:
      return {"Q4_1", 32, 20};
    case WeightType::kQ5_0:
      return {"Q5_0", 32, 22};
    case WeightType::kQ5_1:
      return {"Q5_1", 32, 24};
    case WeightType::kQ8_0:
      return {"Q8_0", 32, 34};
    case WeightType::kQ4_K:
      return {"Q4_K", 256, 144};
    case WeightType::kQ5_K:
      return {"Q5_K", 256, 176};
    case WeightType::kQ6_K:
      return {"Q6_K", 256, 210};
  }
  fail("unknown weight type ", static_cast<uint32_t>(type));
}

// Where the fp16 scales of a block stand: byte offsets, second = first when there is one.
struct ScaleOffsets {
  size_t first, second;
};
ScaleOffsets scale_offsets(WeightType type) {
  switch (type) {
    case WeightType::kQ4_1:
    case WeightType::kQ5_1:
    case WeightType::kQ4_K:
    case WeightType::kQ5_K:
      return {0, 2};
    case WeightType::kQ6_K:
      return {208, 208};
    default:
      return {0, 0};
  }
}

uint16_t load_u16(const uint8_t* source) {
  uint16_t bits = 0;
  std::memcpy(&bits, source, sizeof bits);
  return bits;
}

// Words whose exponent bits (mask) are all ones are NaN or infinite.
template <class Word>
bool any_saturated(const uint8_t* source, size_t count, Word mask) {
  unsigned found = 0;
  for (size_t i = 0; i < count; ++i) {
    Word word = 0;
    std::memcpy(&word, source + i * sizeof(Word), sizeof word);
    found |= (word & mask) == mask ? 1U : 0U;
  }
  return found != 0;
}

using FunctionTable = std::array<dequantize::BlockFunction, 32>;

FunctionTable function_table() {
  FunctionTable table{};
  for (uint32_t type = 0; type < table.size(); ++type) {
#if defined(__x86_64__)
    if (cpu_features().avx512) {
      table[type] = dequantize::avx512_function(type);
    } else if (cpu_features().avx2) {
      table[type] = dequantize::avx2_function(type);
    } else {
      table[type] = dequantize::scalar_function(type);
    }
#else
    table[type] = dequantize::scalar_function(type);
#endif
  }
  return table;
}

}  // namespace

const char* type_name(WeightType type) { return facts(type).name; }
size_t block_elements(WeightType type) { return facts(type).elements; }
size_t block_bytes(WeightType type) { return facts(type).bytes; }

size_t row_bytes(WeightType type, size_t columns) {
  const TypeFacts f = facts(type);
  OSCAR_CHECK(columns % f.elements == 0, "a row of ", columns,
              " elements is not a multiple of the ", f.name, " block of ", f.elements);
  size_t bytes = 0;
  OSCAR_CHECK(!__builtin_mul_overflow(columns / f.elements, f.bytes, &bytes), "a row of ", columns,
              " elements overflows");
  return bytes;
}

void dequantize_row(WeightType type, const uint8_t* source, size_t columns, float* destination) {
  static const FunctionTable kFunctions = function_table();
  const TypeFacts f = facts(type);
  OSCAR_CHECK(columns % f.elements == 0, "a row of ", columns,
              " elements is not a multiple of the ", f.name, " block of ", f.elements);
  kFunctions[static_cast<uint32_t>(type)](source, columns / f.elements, destination);
}

bool row_is_finite(WeightType type, const uint8_t* source, size_t columns) {
  constexpr uint16_t kHalfExponent = 0x7c00, kBf16Exponent = 0x7f80;
  if (type == WeightType::kF32) return !any_saturated<uint32_t>(source, columns, 0x7f800000U);
  if (type == WeightType::kF16) return !any_saturated<uint16_t>(source, columns, kHalfExponent);
  if (type == WeightType::kBF16) return !any_saturated<uint16_t>(source, columns, kBf16Exponent);
  const ScaleOffsets at = scale_offsets(type);
  const size_t bytes = block_bytes(type), blocks = row_bytes(type, columns) / bytes;
  unsigned found = 0;
  for (size_t b = 0; b < blocks; ++b, source += bytes) {
    const unsigned first = load_u16(source + at.first), second = load_u16(source + at.second);
    found |= (first & kHalfExponent) == kHalfExponent ? 1U : 0U;
    found |= (second & kHalfExponent) == kHalfExponent ? 1U : 0U;
  }
  return found == 0;
}

}  // namespace oscar
