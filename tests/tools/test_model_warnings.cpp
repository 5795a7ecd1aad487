// Oddities of a model's files reach the person who runs it.
#include <fcntl.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>

#include "support/paths.h"
#include "support/tiny_model.h"
#include "tools/commands.h"

using namespace oscar;
using Catch::Contains;

namespace {

// What a command writes to standard error.
template <class Work>
std::string standard_error_of(const std::string& path, const Work& work) {
  std::fflush(stderr);
  const int before = dup(STDERR_FILENO);
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  dup2(file, STDERR_FILENO);
  close(file);
  work();
  std::fflush(stderr);
  dup2(before, STDERR_FILENO);
  close(before);
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

}  // namespace

TEST_CASE("warnings about a model are shown once where it is opened, unless quiet") {
  const oscar_test::TemporaryFolder folder;
  oscar_test::TinyModel model;
  model.fill().write_folder(folder / "m");
  const std::string config = folder / "m/config.json";
  std::string text = model.config_json();
  const std::string theta = "\"rope_theta\": 10000.0, ";
  text.erase(text.find(theta), theta.size());
  std::ofstream(config) << text;
  const auto bench = [&](const std::string& more) {
    return standard_error_of(folder / "log", [&] {
      CLI::App app;
      add_bench_cpu(app);
      app.parse("bench cpu --prefill 8 --decode 0 --repeats 1 --json " + more + " --model " +
                    (folder / "m").string(),
                false);
    });
  };
  const std::string shown = bench("");
  CHECK_THAT(shown, Contains("warning: ") && Contains("rope_theta is missing"));
  CHECK(shown.find("rope_theta") == shown.rfind("rope_theta"));
  CHECK_THAT(bench("--quiet"), !Contains("rope_theta"));
}
