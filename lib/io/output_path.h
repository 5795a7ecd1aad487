// A file being written: lives under a temporary name in the same folder until commit() renames it.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <string>

#include "base/error.h"

namespace oscar {

class OutputPath {
 public:
  explicit OutputPath(const std::string& final_path)
      : final_(final_path), temporary_(final_path + ".tmp." + std::to_string(getpid())) {
    std::error_code unknown;
    OSCAR_CHECK(!std::filesystem::exists(final_, unknown) ||
                    std::filesystem::is_regular_file(final_, unknown),
                final_, ": is not a regular file and is not replaced");
  }
  OutputPath(const OutputPath&) = delete;
  OutputPath& operator=(const OutputPath&) = delete;
  // Removes what was written unless it was committed.
  ~OutputPath() {
    std::error_code ignored;
    if (!committed_) std::filesystem::remove(temporary_, ignored);
  }
  const std::string& temporary() const { return temporary_; }
  void commit() {
    std::error_code error;
    std::filesystem::rename(temporary_, final_, error);
    OSCAR_CHECK(!error, final_, ": cannot rename the finished file: ", error.message());
    committed_ = true;
  }

 private:
  std::string final_, temporary_;
  bool committed_ = false;
};

}  // namespace oscar
