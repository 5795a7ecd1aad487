// The bytes of a packed KV row: pack orders, metadata conventions and where every code and every
// metadata value lies. Nothing else computes an offset.
//
//   row   = [codes: head_dim * bits / 8 bytes][metadata: num_groups pairs (first, second)]
//   block = [codes of token 0][codes of token 1] ... [metadata: one pair per channel]   (token
//   axis)
//
// Codes are unsigned; inside a byte the first dim takes the lowest bits. Metadata values are
// little-endian and not aligned: read and write them with memcpy.
#pragma once

#include <cstddef>
#include <cstdint>

namespace oscar {

// How the codes of a row are spread over its bytes; n = 8 / bits codes a byte.
enum class PackOrder : uint8_t {
  kConsecutive,  // byte j = dims n*j .. n*j + n - 1 (vLLM, GGUF forks)
  kQuartered,    // byte j = dims j, j + D/n, j + 2D/n, ... (SGLang; 2 bits: quarters of the row)
};

// The two stored values of a group and how a code becomes a number.
enum class MetaFormat : uint8_t {
  kScaleZeroFp32,  // upstream: value = (code - zero) * scale, zero = -min / scale, not rounded to
                   // an integer
  kScaleZeroBf16,
  kScaleZeroFp16,
  kScaleMinFp16,  // ours: value = code * scale + min, codes chosen with the unrounded pair (rtn) or
                  // for the stored pair (feedback)
  kScaleMinFp16First,  // vLLM: the pair is rounded to fp16 before the codes are chosen
  kLog8,  // 1 byte n: scale = s_max * 2^(-n/32); 1 byte m: zero = L/2 + (m - 128) * L/96 with
          // L = 2^bits - 1 (2 bits: 1.5 + (m - 128) / 32); value = (code - zero) * scale
  kSymmetricFp16,  // one fp16 scale, no second value: value = (code - L/2) * scale
};

// Bits of one of the two stored values.
constexpr int meta_bits(MetaFormat meta) {
  return meta == MetaFormat::kScaleZeroFp32 ? 32 : meta == MetaFormat::kLog8 ? 8 : 16;
}

// Stored values of a group: 2 but for the symmetric format.
constexpr int meta_values(MetaFormat meta) { return meta == MetaFormat::kSymmetricFp16 ? 1 : 2; }

// True when the second value is a zero in code units (stored or implied), false when it is the
// minimum.
constexpr bool stores_zero(MetaFormat meta) {
  return meta != MetaFormat::kScaleMinFp16 && meta != MetaFormat::kScaleMinFp16First;
}

// One token's row of one head. head_dim is a multiple of 4, group divides head_dim, bits is 2, 4
// or 8.
struct RowFormat {
  int head_dim;
  int group;  // dims that share a metadata pair
  int bits;
  MetaFormat meta;
  PackOrder order;

  constexpr int codes_per_byte() const { return 8 / bits; }
  constexpr int max_code() const { return (1 << bits) - 1; }
  constexpr int num_groups() const { return head_dim / group; }
  constexpr size_t code_bytes() const { return static_cast<size_t>(head_dim * bits / 8); }
  constexpr size_t meta_value_bytes() const { return static_cast<size_t>(meta_bits(meta) / 8); }
  // Metadata of one group.
  constexpr size_t pair_bytes() const {
    return static_cast<size_t>(meta_values(meta)) * meta_value_bytes();
  }
  constexpr size_t row_bytes() const {
    return code_bytes() + static_cast<size_t>(num_groups()) * pair_bytes();
  }
  // Byte of the row that holds the code of `dim`, and the code's lowest bit in that byte.
  constexpr size_t code_byte(int dim) const {
    return static_cast<size_t>(order == PackOrder::kConsecutive
                                   ? dim / codes_per_byte()
                                   : dim % (head_dim / codes_per_byte()));
  }
  constexpr int code_shift(int dim) const {
    return bits * (order == PackOrder::kConsecutive ? dim % codes_per_byte()
                                                    : dim / (head_dim / codes_per_byte()));
  }
  // First byte of a group's pair; the second value follows the first.
  constexpr size_t pair_offset(int group_index) const {
    return code_bytes() + static_cast<size_t>(group_index) * pair_bytes();
  }
};

// A block of `tokens` rows whose groups run over the tokens: one pair per channel (KIVI keys).
struct TokenBlockFormat {
  RowFormat row;  // row.group is not used
  int tokens;

  constexpr size_t codes_offset(int token) const {
    return static_cast<size_t>(token) * row.code_bytes();
  }
  constexpr size_t pair_offset(int channel) const {
    return static_cast<size_t>(tokens) * row.code_bytes() +
           static_cast<size_t>(channel) * row.pair_bytes();
  }
  constexpr size_t block_bytes() const { return pair_offset(row.head_dim); }
};

// vLLM's slot of one token and KV head, fp16 pairs inline:
// [K codes][K scale][K min][V codes][V scale][V min], consecutive order. half_alignment 1: the
// slot's size is rounded up to even (pull request 46774); 16: each half is padded to a multiple of
// 16 bytes (47055).
struct VllmSlotFormat {
  int k_head_dim;
  int v_head_dim;
  int half_alignment;

  static constexpr RowFormat row(int head_dim) {
    return {head_dim, head_dim, 2, MetaFormat::kScaleMinFp16First, PackOrder::kConsecutive};
  }
  constexpr size_t padded(size_t bytes) const {
    const auto step = static_cast<size_t>(half_alignment);
    return (bytes + step - 1) / step * step;
  }
  constexpr size_t k_offset() const { return 0; }
  constexpr size_t v_offset() const { return padded(row(k_head_dim).row_bytes()); }
  constexpr size_t slot_bytes() const {
    const size_t bytes = v_offset() + padded(row(v_head_dim).row_bytes());
    return bytes + bytes % 2;
  }
};

namespace int2_format_checks {
constexpr RowFormat kOurs{128, 128, 2, MetaFormat::kScaleMinFp16, PackOrder::kConsecutive};
constexpr RowFormat kUpstream{128, 64, 2, MetaFormat::kScaleZeroFp32, PackOrder::kQuartered};
constexpr RowFormat kLog8{128, 128, 2, MetaFormat::kLog8, PackOrder::kConsecutive};
constexpr RowFormat kSymmetric{128, 32, 2, MetaFormat::kSymmetricFp16, PackOrder::kConsecutive};
static_assert(kSymmetric.row_bytes() == 40 && kSymmetric.pair_offset(3) == 38);
static_assert(kOurs.row_bytes() == 36 && kUpstream.row_bytes() == 48 && kLog8.row_bytes() == 34);
static_assert(kOurs.code_byte(5) == 1 && kOurs.code_shift(5) == 2);
static_assert(kUpstream.code_byte(70) == 6 && kUpstream.code_shift(70) == 4);
static_assert(kUpstream.pair_offset(1) == 40);
constexpr TokenBlockFormat kKivi{kOurs, 32};
static_assert(kKivi.block_bytes() == 32 * 32 + 128 * 4);
static_assert(VllmSlotFormat{128, 128, 1}.slot_bytes() == 72);
static_assert(VllmSlotFormat{128, 128, 16}.slot_bytes() == 96);
static_assert(VllmSlotFormat{100, 100, 1}.v_offset() == 29);
}  // namespace int2_format_checks

}  // namespace oscar
