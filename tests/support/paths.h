// Where tests find the demo model, the demo texts and the optional reference fixtures, and how they
// say that they skip.
#pragma once

#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>

namespace oscar_test {

// Root of the source tree the tests were built from; defined in test_main.cpp.
const char* source_folder();

inline std::optional<std::filesystem::path> existing(const std::filesystem::path& path) {
  if (std::filesystem::exists(path)) return path;
  return std::nullopt;
}

inline std::filesystem::path from_environment(const char* variable,
                                              const std::filesystem::path& otherwise) {
  const char* value = std::getenv(variable);
  return value == nullptr || *value == 0 ? otherwise : std::filesystem::path(value);
}

// The cache folder that scripts/fetch_demo.sh fills: OSCAR_CACHE or <source>/.cache.
inline std::filesystem::path cache_folder() {
  return from_environment("OSCAR_CACHE", std::filesystem::path(source_folder()) / ".cache");
}
inline std::optional<std::filesystem::path> demo_model() {
  return existing(cache_folder() / "smollm2-135m-instruct-q4_1.gguf");
}
// novel: emma, mansfield_park, northanger_abbey, persuasion, pride_and_prejudice,
// sense_and_sensibility
inline std::optional<std::filesystem::path> demo_text(const std::string& novel) {
  return existing(cache_folder() / "austen" / (novel + ".txt"));
}
// Second real model (head_dim 128), only where somebody put it.
inline std::optional<std::filesystem::path> qwen_model() {
  return existing(cache_folder() / "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf");
}
// Reference material beside the checkout: OSCAR_SHARED or <source>/../shared.
inline std::optional<std::filesystem::path> shared(const std::string& relative) {
  return existing(
      from_environment("OSCAR_SHARED",
                       std::filesystem::path(source_folder()).parent_path() / "shared") /
      relative);
}

// A fresh folder, removed with everything in it at the end of the test.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "oscar-test-XXXXXX").string();
    REQUIRE(mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace oscar_test

// Catch2 v2 has no SKIP: the reason is printed and the test ends.
#define SKIP_UNLESS(condition, reason) \
  if (!(condition)) {                  \
    WARN("skipped: " << (reason));     \
    return;                            \
  }
