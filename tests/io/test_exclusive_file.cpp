#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <csignal>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "io/exclusive_file.h"
#include "support/paths.h"

using namespace oscar;
using Catch::Contains;

TEST_CASE("a file is written by one process at a time") {
  const oscar_test::TemporaryFolder folder;
  const std::string path = folder / "rows";
  std::ofstream(path) << "kept";
  const int first = open_exclusively(path);
  CHECK(std::filesystem::file_size(path) == 4);  // not truncated
  CHECK_THROWS_WITH(open_exclusively(path), Contains("rows") && Contains("another process"));
  // What has the name now is another file.
  std::filesystem::remove(path);
  const int second = open_exclusively(path);
  close(first);
  CHECK_THROWS_WITH(open_exclusively(path), Contains("another process"));
  close(second);
  close(open_exclusively(path));
  CHECK_THROWS_WITH(open_exclusively(folder / "none/rows"), Contains("none/rows"));
}

TEST_CASE("a lock ends with its process, however that ends") {
  const oscar_test::TemporaryFolder folder;
  const std::string path = folder / "rows";
  int ready[2] = {};
  REQUIRE(pipe(ready) == 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const int file = open_exclusively(path);
    const char byte = file >= 0 ? 'y' : 'n';
    if (write(ready[1], &byte, 1) == 1) pause();
    _exit(0);
  }
  char byte = 0;
  REQUIRE(read(ready[0], &byte, 1) == 1);
  CHECK_THROWS_WITH(open_exclusively(path), Contains("another process"));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  close(open_exclusively(path));
  close(ready[0]);
  close(ready[1]);
}

TEST_CASE("a lock file is there as long as its owner") {
  const oscar_test::TemporaryFolder folder;
  {
    const LockFile lock(folder / "lock");
    CHECK_THROWS_WITH(LockFile(folder / "lock"), Contains("another process"));
    CHECK(std::filesystem::exists(folder / "lock"));
  }
  CHECK(std::filesystem::is_empty(folder.path()));
}
