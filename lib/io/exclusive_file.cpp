#include "io/exclusive_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace oscar {

int open_exclusively(const std::string& path) {
  for (;;) {
    const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    OSCAR_CHECK(file >= 0, path, ": cannot open for writing: ", std::strerror(errno));
    if (::flock(file, LOCK_EX | LOCK_NB) != 0) {
      const int error = errno;
      ::close(file);
      OSCAR_CHECK(error != EWOULDBLOCK, path,
                  ": another process is writing this file (a run with the same output?); wait for "
                  "it to end or choose another name for the output");
      fail(path, ": cannot lock: ", std::strerror(error));
    }
    // Whoever had the lock before may have removed or replaced what was opened here.
    struct stat opened = {}, named = {};
    if (::fstat(file, &opened) == 0 && ::stat(path.c_str(), &named) == 0 &&
        opened.st_dev == named.st_dev && opened.st_ino == named.st_ino)
      return file;
    ::close(file);
  }
}

LockFile::LockFile(const std::string& path) : path_(path), file_(open_exclusively(path)) {}

LockFile::~LockFile() {
  ::unlink(path_.c_str());
  ::close(file_);
}

}  // namespace oscar
