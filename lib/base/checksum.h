// A 64-bit checksum of bytes that are written one after another: finds damage, not forgery.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace oscar {

class Checksum {
 public:
  // Counts of all pieces but the last must be multiples of 8 where pieces are to be cut otherwise
  // later: the end of a piece is padded with zeros.
  void add(const void* bytes, size_t count) {
    const auto* cursor = static_cast<const unsigned char*>(bytes);
    for (; count >= sizeof(uint64_t); count -= sizeof(uint64_t), cursor += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, cursor, sizeof word);
      mix(word);
    }
    uint64_t rest = 0;
    std::memcpy(&rest, cursor, count);
    if (count > 0) mix(rest);
  }

  // 16 hexadecimal digits.
  std::string hex() const {
    std::string text;
    for (int shift = 60; shift >= 0; shift -= 4) text += "0123456789abcdef"[state_ >> shift & 15U];
    return text;
  }

 private:
  // One to one in the state for every word and in the word for every state, so that one damaged
  // word always shows.
  void mix(uint64_t word) { state_ = std::rotl(state_ ^ word, 29) * 0x9e3779b97f4a7c15ULL; }

  uint64_t state_ = 0x243f6a8885a308d3ULL;
};

}  // namespace oscar
