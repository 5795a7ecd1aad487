// Variable-length strings whose heap is damaged are refused before libhdf5 follows them.
#include <catch2/catch.hpp>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string_view>

#include "base/error.h"
#include "io/hdf5_file.h"
#include "support/gguf_writer.h"
#include "support/paths.h"

using namespace oscar;
using Catch::Matchers::Contains;
using oscar_test::Bytes;
using oscar_test::TemporaryFolder;

namespace {

struct Sample {
  TemporaryFolder folder;
  std::string path = (folder / "s.h5").string();
  Bytes bytes;
  size_t heap = 0;        // offset of the global heap
  size_t descriptor = 0;  // offset of (length, heap address, index) of attribute "text"

  Sample() {
    {
      Hdf5File file = Hdf5File::create(path);
      file.create_group("/g");
      // Enough attributes for the object header to need a continuation.
      for (int i = 0; i < 30; ++i) {
        file.write_attribute("/g", "other" + std::to_string(i), std::string("o"));
      }
      file.write_attribute("/g", "text", std::string("0123456789"));
      file.write_attribute("/g", "empty", std::string());
      file.close();
    }
    std::ifstream file(path, std::ios::binary);
    bytes.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    const std::string_view all(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    heap = all.find("GCOL");
    REQUIRE(heap != std::string_view::npos);
    Bytes wanted;
    oscar_test::append_value<uint32_t>(wanted, 10);
    oscar_test::append_value<uint64_t>(wanted, heap);
    descriptor = all.find({reinterpret_cast<const char*>(wanted.data()), wanted.size()});
    REQUIRE(descriptor != std::string_view::npos);
  }

  template <class T>
  T get(size_t at) const {
    T value;
    std::memcpy(&value, bytes.data() + at, sizeof value);
    return value;
  }
  // Offset of the heap object that holds the text.
  size_t object() const {
    const auto index = get<uint32_t>(descriptor + 12);
    for (size_t at = heap + 16; at + 16 < bytes.size();) {
      if (get<uint16_t>(at) == index) return at;
      at += 16 + (get<uint64_t>(at + 8) + 7) / 8 * 8;
    }
    FAIL("no object " << index);
    return 0;
  }
  // The message when the attribute is read after `number` was written at `offset`, "" when it is
  // read.
  template <class T>
  std::string refusal(size_t offset, T number) const {
    Bytes damaged = bytes;
    std::memcpy(damaged.data() + offset, &number, sizeof number);
    oscar_test::write_file(path, damaged);
    try {
      const Hdf5File file = Hdf5File::open(path);
      const std::string text = file.string_attribute("/g", "text");
      CHECK(text.size() <= 10);
    } catch (const Error& error) {
      CHECK_THAT(error.what(), Contains("s.h5") && Contains("text"));
      return error.what();
    }
    return "";
  }
};

}  // namespace

TEST_CASE("strings in a sound heap are read, wherever their attribute stands", "[hdf5]") {
  const Sample sample;
  const Hdf5File file = Hdf5File::open(sample.path);
  CHECK(file.string_attribute("/g", "text") == "0123456789");
  CHECK(file.string_attribute("/g", "empty").empty());
  for (int i = 0; i < 30; ++i) CHECK(file.string_attribute("/g", cat("other", i)) == "o");
}

TEST_CASE("a damaged heap or descriptor is refused", "[hdf5]") {
  const Sample sample;
  const size_t object = sample.object();
  CHECK(sample.refusal<uint8_t>(sample.heap, 'G').empty());
  CHECK_THAT(sample.refusal<uint8_t>(sample.heap, 'X'), Contains("heap is damaged"));
  CHECK_THAT(sample.refusal<uint64_t>(sample.heap + 8, ~0ULL), Contains("past the end"));
  CHECK_THAT(sample.refusal<uint64_t>(sample.heap + 8, 8), Contains("heap is damaged"));
  CHECK_THAT(sample.refusal<uint64_t>(object + 8, 1ULL << 40), Contains("is cut off"));
  CHECK_THAT(sample.refusal<uint64_t>(object + 8, ~0ULL), Contains("is cut off"));
  CHECK_THAT(sample.refusal<uint64_t>(object + 8, 9), Contains("longer than its object"));
  CHECK_THAT(sample.refusal<uint16_t>(object, 9999), Contains("not in its heap"));
  CHECK_THAT(sample.refusal<uint32_t>(sample.descriptor, 1U << 31), Contains("longer than its"));
  CHECK_THAT(sample.refusal<uint64_t>(sample.descriptor + 4, 1ULL << 50), Contains("past the end"));
  CHECK_THAT(sample.refusal<uint64_t>(sample.descriptor + 4, 0), Contains("without a heap"));
  CHECK_THAT(sample.refusal<uint32_t>(sample.descriptor + 12, 60000), Contains("not in its heap"));
  CHECK_THAT(sample.refusal<uint32_t>(sample.descriptor + 12, ~0U), Contains("not in its heap"));
}
