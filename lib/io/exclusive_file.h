// Files that one process at a time may write.
#pragma once

#include <string>

namespace oscar {

// Opens `path` for reading and writing, created when it is absent and never truncated, and locks it
// (flock). The lock lasts until the descriptor is closed or the process ends, however it ends.
// Returns the descriptor. Throws Error naming the file when another open descriptor has the lock,
// or when the file cannot be opened or locked. Remove or rename the file before closing it: who
// opened it meanwhile notices and starts anew.
int open_exclusively(const std::string& path);

// An empty file that is there, and locked, as long as this object.
class LockFile {
 public:
  explicit LockFile(const std::string& path);
  ~LockFile();
  LockFile(const LockFile&) = delete;
  LockFile& operator=(const LockFile&) = delete;

 private:
  std::string path_;
  int file_;
};

}  // namespace oscar
