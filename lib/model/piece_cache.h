// Remembers the ids of the pieces of one text, so that a word is merged once however often it
// occurs.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "base/random.h"

namespace oscar {

// The keys are views: the text behind them must outlive the cache.
class PieceCache {
 public:
  // The ids kept for the piece; `produce(ids)` appends them to the vector when it is new. The span
  // is valid until the next call.
  template <class Produce>
  std::span<const int32_t> get(std::string_view piece, const Produce& produce) {
    if (entries_.empty()) entries_.resize(1024);
    const uint64_t hash = hash_of(piece);
    size_t slot = find(piece, hash);
    if (entries_[slot].text == nullptr) {
      if ((used_ + 1) * 2 > entries_.size()) {
        grow();
        slot = find(piece, hash);
      }
      ++used_;
      const size_t first = ids_.size();
      produce(ids_);
      entries_[slot] = {hash, piece.data(), piece.size(), first, ids_.size() - first};
    }
    const Entry& entry = entries_[slot];
    return {ids_.data() + entry.first_id, entry.num_ids};
  }

 private:
  struct Entry {
    uint64_t hash = 0;
    const char* text = nullptr;  // null: free
    size_t size = 0, first_id = 0, num_ids = 0;
  };

  static uint64_t hash_of(std::string_view piece) {
    uint64_t hash = piece.size();
    size_t i = 0;
    for (; i + 8 <= piece.size(); i += 8) {
      uint64_t word = 0;
      std::memcpy(&word, piece.data() + i, 8);
      hash = mix64(hash ^ word);
    }
    uint64_t word = 0;
    std::memcpy(&word, piece.data() + i, piece.size() - i);
    return mix64(hash * 0x9E3779B97F4A7C15ULL ^ word);
  }
  // Slot of the piece, or the free slot where it belongs.
  size_t find(std::string_view piece, uint64_t hash) const {
    const size_t mask = entries_.size() - 1;
    for (size_t slot = static_cast<size_t>(hash) & mask;; slot = (slot + 1) & mask) {
      const Entry& entry = entries_[slot];
      if (entry.text == nullptr ||
          (entry.hash == hash && std::string_view(entry.text, entry.size) == piece)) {
        return slot;
      }
    }
  }
  void grow() {
    std::vector<Entry> old(entries_.size() * 2);
    old.swap(entries_);
    for (const Entry& entry : old) {
      if (entry.text != nullptr) entries_[find({entry.text, entry.size}, entry.hash)] = entry;
    }
  }

  std::vector<Entry> entries_;
  std::vector<int32_t> ids_;
  size_t used_ = 0;
};

}  // namespace oscar
