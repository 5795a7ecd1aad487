#include "tools/output_check.h"

#include <filesystem>

#include "base/error.h"

namespace oscar {

void check_output(const std::string& path, const std::vector<std::string>& inputs) {
  if (path.empty()) return;
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  OSCAR_CHECK(folder.empty() || std::filesystem::is_directory(folder), path, ": the folder ",
              folder.string(), " does not exist");
  OSCAR_CHECK(!std::filesystem::is_directory(path), path, ": is a folder, expected a file name");
  OSCAR_CHECK(!std::filesystem::exists(path) || std::filesystem::is_regular_file(path), path,
              ": is not a regular file and is not replaced");
  for (const std::string& input : inputs) {
    std::error_code absent;
    OSCAR_CHECK(input.empty() || !std::filesystem::equivalent(path, input, absent), path,
                ": is read by this run and must not be replaced by its result");
  }
}

}  // namespace oscar
