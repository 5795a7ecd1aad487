// The GPU storage of an INT2 cache: a record of 16 tokens of one KV head, laid out in the order in
// which the tensor-core kernels consume it. This header is the only home of its byte positions.
//
// A record of head_dim D (64, 96, 128, 192, 256) is 8 D + 128 bytes:
//   [0, 4 D)        K codes, 2 bits each
//   [4 D, 8 D)      V codes, 2 bits each
//   [8 D, +128)     (scale, min) fp16 pairs: for g in 0..7: K(g) V(g) K(g + 8) V(g + 8)
// value = code * scale + min. A page of one KV head is 4 consecutive records (64 tokens).
//
// Codes live in 32-bit words that belong to one of 32 lanes, D / 32 words a lane. A word is two
// 16-bit halves; a half holds 8 codes, so that one AND with 0x0003'0003 << 2 j leaves two codes as
// fp16 subnormals c * 4^j * 2^-24 (j < 5; j >= 5 after a right shift by 10). "item" = the 8-dim
// slice a tensor-core fragment register covers:
//   K: lane = 4 (token mod 8) + (dim mod 32) / 8, item = 4 (dim / 32) + (dim mod 8) / 2, half = dim
//      mod 2: a lane holds runs of 8 dims of a token, the contraction index of q . k.
//   V: lane = 4 ((dim mod 64) / 8) + (token mod 8) / 2, item = 8 (dim / 64) + dim mod 8, half =
//      token mod 2; the last 32 dims of D = 96 use runs of 4 dims.
// Item q of the tokens 0-7 and of the tokens 8-15 sit at the same position of two sister words (the
// 4^j factor is then one per fragment register pair). D = 96 has a single last word: tokens 0-7 at
// positions 0-3, tokens 8-15 at positions 4-7.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define OSCAR_HOST_DEVICE __host__ __device__
#else
#define OSCAR_HOST_DEVICE
#endif

namespace oscar {

inline constexpr int kRecordTokens = 16;
inline constexpr int kPageRecords = 4;
inline constexpr int kInt2PageTokens = kRecordTokens * kPageRecords;
inline constexpr int kRecordMetaBytes = 128;

enum class KvSide : uint8_t { kKey = 0, kValue = 1 };

OSCAR_HOST_DEVICE constexpr bool record_supports(int head_dim) {
  return head_dim == 64 || head_dim == 96 || head_dim == 128 || head_dim == 192 || head_dim == 256;
}
OSCAR_HOST_DEVICE constexpr int record_code_bytes(int head_dim) { return 4 * head_dim; }  // a side
OSCAR_HOST_DEVICE constexpr int record_bytes(int head_dim) {
  return 2 * record_code_bytes(head_dim) + kRecordMetaBytes;
}
OSCAR_HOST_DEVICE constexpr int record_page_bytes(int head_dim) {
  return kPageRecords * record_bytes(head_dim);
}

// The record as bytes, so that sizeof and pointer arithmetic carry the format.
template <int kHeadDim>
struct alignas(16) Int2Record {
  static_assert(record_supports(kHeadDim));
  uint32_t k_words[kHeadDim];
  uint32_t v_words[kHeadDim];
  uint16_t scale_min[kRecordTokens * 4];
};
static_assert(sizeof(Int2Record<64>) == 640 && sizeof(Int2Record<96>) == 896);
static_assert(sizeof(Int2Record<128>) == 1152 && sizeof(Int2Record<192>) == 1664);
static_assert(sizeof(Int2Record<256>) == 2176 && record_bytes(128) == 1152);

// Index of lane word `word` (0 .. D / 32 - 1) among the D words of a side: chunks of 4, then 2,
// then 1 words a lane, so that a lane reads its chunk with one 16-, 8- or 4-byte access.
OSCAR_HOST_DEVICE constexpr int record_word_index(int head_dim, int lane, int word) {
  const int words = head_dim / 32, full = words / 4 * 4;
  if (word < full) return word / 4 * 128 + lane * 4 + word % 4;
  const int rest = words - full;  // 0, 2 or 3
  if (rest >= 2 && word < full + 2) return full * 32 + lane * 2 + (word - full);
  return (words - 1) * 32 + lane;
}

struct RecordSlot {
  int lane, item, half;  // see the top of the file
};
OSCAR_HOST_DEVICE constexpr RecordSlot record_k_slot(int token, int dim) {
  return {4 * (token % 8) + dim % 32 / 8, 4 * (dim / 32) + dim % 8 / 2, dim % 2};
}
OSCAR_HOST_DEVICE constexpr RecordSlot record_v_slot(int head_dim, int token, int dim) {
  const int full_dims = head_dim / 64 * 64, lane = token % 8 / 2;
  if (dim < full_dims) return {4 * (dim % 64 / 8) + lane, 8 * (dim / 64) + dim % 8, token % 2};
  const int rest = dim - full_dims;
  return {4 * (rest / 4) + lane, full_dims / 8 + rest % 4, token % 2};
}

// Word and bit of an item: {word of the lane, position 0-7 in the half}.
struct RecordPosition {
  int word, position;
};
OSCAR_HOST_DEVICE constexpr RecordPosition record_item_position(int head_dim, int item,
                                                                int token_half) {
  const int full_items = head_dim / 64 * 8;
  if (item < full_items) return {item / 8 * 2 + token_half, item % 8};
  return {head_dim / 32 - 1, item - full_items + 4 * token_half};
}

// Where the code of (token 0-15, dim) is: bits [bit, bit + 2) of the side's codes (bit 0 = least
// significant bit of the first byte; words are little-endian).
OSCAR_HOST_DEVICE constexpr int record_code_bit(int head_dim, KvSide side, int token, int dim) {
  const RecordSlot slot =
      side == KvSide::kKey ? record_k_slot(token, dim) : record_v_slot(head_dim, token, dim);
  const RecordPosition at = record_item_position(head_dim, slot.item, token / 8);
  return 32 * record_word_index(head_dim, slot.lane, at.word) + 16 * slot.half + 2 * at.position;
}
// Byte offset of the codes of a side, and of the (scale, min) pair of (side, token), in the record.
OSCAR_HOST_DEVICE constexpr int record_code_offset(int head_dim, KvSide side) {
  return side == KvSide::kKey ? 0 : record_code_bytes(head_dim);
}
OSCAR_HOST_DEVICE constexpr int record_meta_offset(int head_dim, KvSide side, int token) {
  return 2 * record_code_bytes(head_dim) + token % 8 * 16 + token / 8 * 8 +
         (side == KvSide::kValue ? 4 : 0);
}
static_assert(record_code_bit(128, KvSide::kKey, 0, 0) == 0);
static_assert(record_code_bit(128, KvSide::kKey, 0, 1) == 16);
static_assert(record_code_bit(128, KvSide::kValue, 1, 0) == 16);
static_assert(record_meta_offset(128, KvSide::kValue, 9) == 1024 + 16 + 8 + 4);

// Writes one token's row into a record: codes [D] in 0..3, fp16 bits of scale and min. Other tokens
// of the record keep their bits. Throws Error on an unsupported head_dim, a token outside 0..15 or
// a code above 3.
void record_write_row(uint8_t* record, int head_dim, KvSide side, int token, const uint8_t* codes,
                      uint16_t scale_fp16, uint16_t min_fp16);
// Inverse; scale_fp16 and min_fp16 may be null.
void record_read_row(const uint8_t* record, int head_dim, KvSide side, int token, uint8_t* codes,
                     uint16_t* scale_fp16, uint16_t* min_fp16);
// Values [D] of one token's row: code * scale + min in float.
void record_decode_row(const uint8_t* record, int head_dim, KvSide side, int token, float* values);

}  // namespace oscar
