#include "io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace oscar {
namespace {

// Closes the descriptor however open() ends; a mapping outlives its descriptor.
struct Descriptor {
  int number = -1;
  ~Descriptor() {
    if (number >= 0) ::close(number);
  }
};

}  // namespace

std::shared_ptr<const MappedFile> MappedFile::open(const std::string& path) {
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  OSCAR_CHECK(file.number >= 0, path, ": cannot open: ", std::strerror(errno));
  struct stat status {};
  OSCAR_CHECK(::fstat(file.number, &status) == 0, path, ": cannot stat: ", std::strerror(errno));
  OSCAR_CHECK(S_ISREG(status.st_mode), path, ": expected a regular file");
  OSCAR_CHECK(status.st_size > 0, path, ": the file has zero bytes");
  const auto size = static_cast<size_t>(status.st_size);
  void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.number, 0);
  OSCAR_CHECK(address != MAP_FAILED, path, ": cannot map ", size, " bytes: ", std::strerror(errno));
  return std::shared_ptr<const MappedFile>(
      new MappedFile(path, static_cast<const uint8_t*>(address), size));
}

MappedFile::~MappedFile() { ::munmap(const_cast<uint8_t*>(bytes_), size_); }

}  // namespace oscar
