#include <catch2/catch.hpp>
#include <fstream>
#include <string>

#include "base/error.h"
#include "support/paths.h"
#include "tools/cmd_generate.h"

using namespace oscar;

namespace {

GenerateCommand command() {
  GenerateCommand options;
  options.model = std::string("no/such/model.gguf");
  options.prompt = std::string("Hello");
  options.quiet = true;
  return options;
}

}  // namespace

TEST_CASE("generate names the option that is wrong before it reads the model") {
  GenerateCommand options = command();
  SECTION("prompt twice") {
    options.prompt_file = std::string("x.txt");
    CHECK_THROWS_WITH(run_generate(options), Catch::Contains("--prompt-file"));
  }
  SECTION("no prompt") {
    options.prompt.clear();
    CHECK_THROWS_WITH(run_generate(options), Catch::Contains("--prompt"));
  }
  SECTION("missing prompt file") {
    options.prompt.clear();
    options.prompt_file = std::string("no/such/prompt.txt");
    CHECK_THROWS_WITH(run_generate(options), Catch::Contains("no/such/prompt.txt"));
  }
  SECTION("empty prompt file") {
    const oscar_test::TemporaryFolder folder;
    options.prompt.clear();
    options.prompt_file = (folder / "empty.txt").string();
    std::ofstream(options.prompt_file).close();
    CHECK_THROWS_WITH(run_generate(options), Catch::Contains("empty.txt"));
  }
  SECTION("chat and raw") {
    options.chat = options.raw = true;
    CHECK_THROWS_WITH(run_generate(options), Catch::Contains("--raw"));
  }
  SECTION("compute") {
    options.compute = std::string("fp16");
    CHECK_THROWS_WITH(run_generate(options),
                      Catch::Contains("--compute") && Catch::Contains("fp16"));
  }
  SECTION("mode") {
    options.mode = std::string("lazy");
    CHECK_THROWS_WITH(run_generate(options), Catch::Contains("--mode") && Catch::Contains("lazy"));
  }
  SECTION("temperature") {
    options.temperature = -1.0;
    CHECK_THROWS_WITH(run_generate(options), Catch::Contains("--temperature"));
  }
  SECTION("model") {
    CHECK_THROWS_WITH(run_generate(options), Catch::Contains("no/such/model.gguf"));
  }
}

TEST_CASE("generate refuses an unknown arm and a system message without a template", "[model]") {
  const auto model = oscar_test::demo_model();
  SKIP_UNLESS(model, "no demo model");
  GenerateCommand options = command();
  options.model = model->string();
  SECTION("arm") {
    options.arm = std::string("fancy");
    CHECK_THROWS_WITH(run_generate(options), Catch::Contains("fancy"));
  }
  SECTION("system") {
    options.raw = true;
    options.system = std::string("You are terse.");
    CHECK_THROWS_WITH(run_generate(options), Catch::Contains("--system"));
  }
}
