#include "tools/output_check.h"

#include <filesystem>
#include <map>

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

void check_distinct_outputs(const std::vector<std::pair<std::string, std::string>>& outputs) {
  std::map<std::filesystem::path, const std::pair<std::string, std::string>*> seen;
  for (const auto& output : outputs) {
    if (output.second.empty()) continue;
    const auto path = std::filesystem::weakly_canonical(std::filesystem::absolute(output.second));
    const auto [other, is_new] = seen.emplace(path, &output);
    OSCAR_CHECK(is_new, other->second->first, " ", other->second->second, " and ", output.first,
                " ", output.second, " are the same file; expected different names");
  }
}

}  // namespace oscar
