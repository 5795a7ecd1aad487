// Deterministic damage to seed files: the same seed number gives the same bytes on every machine.
#pragma once

#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/random.h"
#include "support/gguf_writer.h"

namespace oscar_test {

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  // One to four small changes; `hot` bytes at the start are hit three times in four (headers are
  // short and interesting, data is long and dull).
  Bytes mutate(const Bytes& seed, size_t hot) {
    Bytes bytes = seed;
    const uint64_t changes = 1 + random_.below(4);
    for (uint64_t i = 0; i < changes && !bytes.empty(); ++i) change(bytes, hot);
    return bytes;
  }
  uint64_t below(uint64_t limit) { return random_.below(limit); }

 private:
  size_t position(const Bytes& bytes, size_t hot) {
    const size_t limit = random_.below(4) != 0 ? std::min(hot, bytes.size()) : bytes.size();
    return random_.below(std::max<size_t>(limit, 1));
  }

  void change(Bytes& bytes, size_t hot) {
    constexpr uint64_t kNumbers[] = {0,          1,          2,          0x7f,       0x80,
                                     0xff,       0x7fff,     0x8000,     0xffff,     1ULL << 24,
                                     1ULL << 31, 0xffffffff, 1ULL << 32, 1ULL << 40, 1ULL << 61,
                                     1ULL << 62, 1ULL << 63, ~0ULL,      ~0ULL - 31, ~0ULL >> 1};
    const size_t at = position(bytes, hot);
    switch (random_.below(8)) {
      case 0:
        bytes[at] = static_cast<uint8_t>(bytes[at] ^ (1U << random_.below(8)));
        break;
      case 1:
        bytes[at] = static_cast<uint8_t>(random_.below(256));
        break;
      case 2:
      case 3: {
        // An interesting number of 1, 2, 4 or 8 bytes, or near the present one.
        uint64_t number = kNumbers[random_.below(std::size(kNumbers))];
        const size_t width = size_t{1} << random_.below(4);
        if (at + width > bytes.size()) break;
        if (random_.below(3) == 0) {
          std::memcpy(&number, bytes.data() + at, width);
          number += random_.below(5) - 2;
        }
        std::memcpy(bytes.data() + at, &number, width);
        break;
      }
      case 4: {
        const size_t count = std::min<size_t>(1 + random_.below(16), bytes.size() - at);
        bytes.erase(bytes.begin() + static_cast<ptrdiff_t>(at),
                    bytes.begin() + static_cast<ptrdiff_t>(at + count));
        break;
      }
      case 5: {
        // A piece of the file once more, somewhere else.
        const size_t count = std::min<size_t>(1 + random_.below(64), bytes.size() - at);
        const Bytes piece(bytes.begin() + static_cast<ptrdiff_t>(at),
                          bytes.begin() + static_cast<ptrdiff_t>(at + count));
        const auto target = static_cast<ptrdiff_t>(position(bytes, hot));
        bytes.insert(bytes.begin() + target, piece.begin(), piece.end());
        break;
      }
      case 6: {
        // A digit or a JSON sign.
        constexpr char kSigns[] = "0123456789-+.eE\"\\{}[]:,nutf";
        bytes[at] = static_cast<uint8_t>(kSigns[random_.below(sizeof kSigns - 1)]);
        break;
      }
      default:
        if (random_.below(4) == 0) bytes.resize(at);
        break;
    }
  }

  oscar::Random random_;
};

inline Bytes to_bytes(std::string_view text) { return {text.begin(), text.end()}; }

// Largest resident size of the process so far, in MiB.
inline double peak_resident_mib() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024.0;
}

}  // namespace oscar_test
