// A file mapped read-only into memory, released when the last owner goes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace oscar {

class MappedFile {
 public:
  // Maps a regular file as it is now. Throws Error naming the path when it cannot be opened, is not
  // a regular file or has zero bytes. The file must not shrink while it is mapped.
  static std::shared_ptr<const MappedFile> open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  size_t size() const { return size_; }
  const uint8_t* data() const { return bytes_; }
  std::span<const uint8_t> bytes() const { return {bytes_, size_}; }

 private:
  MappedFile(std::string path, const uint8_t* bytes, size_t size)
      : path_(std::move(path)), bytes_(bytes), size_(size) {}

  std::string path_;
  const uint8_t* bytes_ = nullptr;
  size_t size_ = 0;
};

}  // namespace oscar
