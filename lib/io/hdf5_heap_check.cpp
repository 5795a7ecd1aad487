#include "io/hdf5_heap_check.h"

#include <cstring>
#include <deque>
#include <optional>
#include <span>

#include "base/error.h"
#include "io/mapped_file.h"

namespace oscar {
namespace {

constexpr uint16_t kAttributeMessage = 0x000C, kContinuationMessage = 0x0010;
constexpr size_t kMaxChunks = 1024;
constexpr uint64_t kUndefinedAddress = ~0ULL;

template <class T>
T load(const uint8_t* source) {
  T value;
  std::memcpy(&value, source, sizeof value);
  return value;
}
uint64_t padded(uint64_t size) { return (size + 7) / 8 * 8; }

using Bytes = std::span<const uint8_t>;

class HeapCheck {
 public:
  HeapCheck(const MappedFile& file, const std::string& what) : file_(file.bytes()), what_(what) {}

  void run(uint64_t header_address, const std::string& attribute) {
    constexpr uint8_t kSignature[] = {0x89, 'H', 'D', 'F', '\r', '\n', 0x1a, '\n'};
    const Bytes super = range(0, 16);
    require(std::memcmp(super.data(), kSignature, sizeof kSignature) == 0,
            "user blocks are not supported");
    require(super[8] > 1 || (super[13] == 8 && super[14] == 8), "addresses are not of 8 bytes");
    const Bytes descriptor = find_attribute(header_address, attribute);
    check_string(load<uint32_t>(descriptor.data()), load<uint64_t>(descriptor.data() + 4),
                 load<uint32_t>(descriptor.data() + 12));
  }

 private:
  void require(bool condition, const char* problem) const {
    OSCAR_CHECK(condition, what_, ": ", problem);
  }
  Bytes range(uint64_t begin, uint64_t size) const {
    require(begin <= file_.size() && size <= file_.size() - begin,
            "points past the end of the file");
    return file_.subspan(begin, size);
  }

  // The 16 bytes (length, heap address, index) of the string: messages of the object header, chunk
  // by chunk.
  Bytes find_attribute(uint64_t header_address, const std::string& name) const {
    const Bytes prefix = range(header_address, 16);
    require(prefix[0] == 1, "the object header is not of version 1");
    std::deque<Bytes> chunks = {range(header_address + 16, load<uint32_t>(prefix.data() + 8))};
    for (size_t visited = 0; !chunks.empty(); ++visited) {
      require(visited < kMaxChunks, "the object header has too many chunks");
      Bytes chunk = chunks.front();
      chunks.pop_front();
      while (chunk.size() >= 8) {
        const auto type = load<uint16_t>(chunk.data());
        const size_t size = load<uint16_t>(chunk.data() + 2);
        require(size <= chunk.size() - 8, "a message of the object header is cut off");
        const Bytes message = chunk.subspan(8, size);
        if (type == kContinuationMessage) {
          require(size >= 16, "a continuation of the object header is cut off");
          chunks.push_back(
              range(load<uint64_t>(message.data()), load<uint64_t>(message.data() + 8)));
        } else if (type == kAttributeMessage) {
          const std::optional<Bytes> found = value_of(message, name);
          if (found) return *found;
        }
        chunk = chunk.subspan(8 + size);
      }
    }
    fail(what_, ": not found in the object header");
  }

  // The value when the message is the attribute of that name.
  std::optional<Bytes> value_of(Bytes message, const std::string& name) const {
    // Version 1 pads its parts to 8 bytes; 2 does not; 3 adds the name's character set.
    require(message.size() >= 9 && message[0] >= 1 && message[0] <= 3,
            "the attribute message has an unknown version");
    const bool pads = message[0] == 1;
    const uint64_t start = message[0] == 3 ? 9 : 8;
    const auto part = [&](size_t at) -> uint64_t {
      const auto size = load<uint16_t>(message.data() + at);
      return pads ? padded(size) : size;
    };
    const size_t name_size = load<uint16_t>(message.data() + 2);
    const uint64_t header = start + part(2) + part(4) + part(6);
    require(header <= message.size(), "the attribute message is cut off");
    const Bytes stored = message.subspan(start, name_size);
    const bool same = stored.size() == name.size() + 1 && stored.back() == 0 &&
                      std::memcmp(stored.data(), name.data(), name.size()) == 0;
    if (!same) return std::nullopt;
    require(message.size() - header >= 16, "the attribute's value is cut off");
    return message.subspan(header, 16);
  }

  void check_string(uint32_t length, uint64_t address, uint32_t index) const {
    if (address == 0 || address == kUndefinedAddress) {
      require(length == 0, "a string without a heap has a length");
      return;
    }
    const Bytes head = range(address, 16);
    require(std::memcmp(head.data(), "GCOL\1", 5) == 0, "the string's heap is damaged");
    Bytes heap = range(address, load<uint64_t>(head.data() + 8));
    require(heap.size() >= 16, "the string's heap is damaged");
    heap = heap.subspan(16);
    bool found = false;
    while (heap.size() >= 16) {
      const auto number = load<uint16_t>(heap.data());
      const auto size = load<uint64_t>(heap.data() + 8);
      // Object 0 is the free space; its size includes its own head.
      require(size <= heap.size(), "an object of the string's heap is cut off");
      const uint64_t step = number == 0 ? size : 16 + padded(size);
      require(step >= 16 && step <= heap.size(), "an object of the string's heap is cut off");
      if (number != 0 && number == index) {
        require(!found, "the string's heap has an object twice");
        require(length <= size, "the string is longer than its object in the heap");
        found = true;
      }
      heap = heap.subspan(step);
    }
    require(found, "the string is not in its heap");
  }

  Bytes file_;
  const std::string& what_;
};

}  // namespace

void check_variable_string(const std::string& path, uint64_t header_address,
                           const std::string& object, const std::string& attribute) {
  const auto file = MappedFile::open(path);
  const std::string what = cat(path, ": attribute ", attribute, " of ", object);
  HeapCheck(*file, what).run(header_address, attribute);
}

}  // namespace oscar
