// Byte-level byte pair encoding: the vocabulary in raw bytes, the merge table and the merging of
// one piece.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "model/tokenizer_spec.h"

namespace oscar {

// Byte map of GPT-2 (formats.md 12): bytes <-> printable code points.
uint32_t byte_to_code_point(uint8_t byte);
// Raw bytes of a token written in the byte alphabet; false when a character is outside it.
bool decode_byte_alphabet(std::string_view token, std::string& bytes);

class Bpe {
 public:
  // Throws Error naming the file and the merge or vocabulary entry.
  explicit Bpe(const TokenizerSpec& spec);
  Bpe(const Bpe&) = delete;  // ids_ points into bytes_
  Bpe& operator=(const Bpe&) = delete;

  // Appends the ids of one piece; ends (may be null) gets the end of each token, as a position in
  // the piece. A byte that has no token (vocabularies trained without the full alphabet) gives
  // nothing, as in the reference implementation. O(n log n) for n bytes.
  void encode(std::string_view piece, std::vector<int32_t>& ids, std::vector<size_t>* ends) const;

  // Bytes of a token; empty for unused tokens.
  const std::string& bytes(int32_t id) const { return bytes_[static_cast<size_t>(id)]; }
  size_t vocab_size() const { return bytes_.size(); }
  size_t num_merges() const { return num_merges_; }

 private:
  struct Merge {
    uint64_t pair = kNoPair;  // left id << 32 | right id
    uint32_t rank = 0;
    int32_t id = 0;
  };
  static constexpr uint64_t kNoPair = ~0ULL;
  struct Symbols;

  void add_tokens(const TokenizerSpec& spec);
  void add_merge(uint64_t pair, uint32_t rank, int32_t id);
  const Merge* find(int32_t left, int32_t right) const;
  void merge_short(Symbols& symbols) const;
  void merge_long(Symbols& symbols) const;

  std::vector<std::string> bytes_;                     // by id
  std::unordered_map<std::string_view, int32_t> ids_;  // raw bytes -> id, views into bytes_
  int32_t byte_ids_[256];                              // -1: the vocabulary lacks the byte
  std::vector<Merge> merges_;                          // open addressing, a power of two
  size_t num_merges_ = 0;
  bool ignore_merges_ = false;
};

}  // namespace oscar
