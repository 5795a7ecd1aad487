// eval, compare, simulate and report as their subcommands run them: files written, exit codes,
// refusals.
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/error.h"
#include "base/random.h"
#include "io/capture_file.h"
#include "io/results.h"
#include "support/paths.h"
#include "tools/cmd_eval.h"
#include "tools/cmd_report.h"
#include "tools/cmd_simulate.h"
#include "tools/console.h"

using namespace oscar;
using Catch::Matchers::Contains;
using oscar_test::TemporaryFolder;

namespace {

std::string content(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

EvalOptions small_options(const TemporaryFolder& folder) {
  const std::string text = (folder / "excerpt.txt").string();
  std::ofstream(text) << content(*oscar_test::demo_text("persuasion")).substr(0, 3000);
  EvalOptions options;
  options.model = oscar_test::demo_model()->string();
  options.texts = {text};
  options.arms = {"hadamard", "int8"};
  options.length = 448;
  options.windows = 1;
  options.rows = "from:416";
  options.baseline = "hadamard";
  options.no_null = options.quiet = true;
  options.out = (folder / "rows.jsonl").string();
  options.markdown = (folder / "table.md").string();
  options.html = (folder / "page.html").string();
  return options;
}

std::string small_capture(const TemporaryFolder& folder) {
  CaptureInfo info;
  info.model_architecture = "llama";
  info.text_sha256 = std::string(64, 'c') + "," + std::string(64, 'd');
  info.head_dim = 32;
  info.num_layers = info.num_heads = info.num_kv_heads = 1;
  const std::string path = (folder / "capture.h5").string();
  CaptureWriter writer(path, info);
  writer.begin_sequence(std::vector<int32_t>(400, 1));
  Random random(1);
  std::vector<float> rows(400 * 32);
  for (float& value : rows) value = static_cast<float>(random.normal());
  writer.append(0, rows.data(), rows.data(), rows.data(), nullptr);
  writer.end_sequence();
  writer.finish();
  return path;
}

}  // namespace

TEST_CASE("eval stores rows, table and page, and removes its finished windows", "[model]") {
  SKIP_UNLESS(oscar_test::demo_model() && oscar_test::demo_text("persuasion"),
              "the demo model is not in the cache folder");
  const TemporaryFolder folder;
  EvalOptions options = small_options(folder);
  options.max_kl = 0.01;  // hadamard is over it, int8 is not
  set_exit_code(kExitOk);
  run_eval(options);
  CHECK(exit_code() == kExitUnderThreshold);
  set_exit_code(kExitOk);
  const auto rows = read_rows(options.out);
  CHECK(rows.size() > 20);
  CHECK(rows[0].labels.at("tool").starts_with("0."));
  CHECK(rows[0].labels.at("data_sha256").size() == 64);
  CHECK_THAT(content(options.markdown), Contains("| hadamard | 64/256 |"));
  CHECK_THAT(content(options.html), Contains("<svg"));
  CHECK_FALSE(std::filesystem::exists(options.out + ".partial.jsonl"));

  // The page of stored rows is the page of the run.
  run_report({.inputs = {options.out}, .out = (folder / "again.html").string()});
  CHECK(content(folder / "again.html") == content(options.html));
}

TEST_CASE("rows of recall tasks carry the length of their own prompts", "[model]") {
  SKIP_UNLESS(oscar_test::demo_model() && oscar_test::demo_text("persuasion"),
              "the demo model is not in the cache folder");
  const TemporaryFolder folder;
  EvalOptions options = small_options(folder);
  std::ofstream(options.texts[0]) << content(*oscar_test::demo_text("persuasion")).substr(0, 9000);
  options.sets = {"recall"};
  options.arms = {"int8"};
  options.baseline.clear();
  options.sink = options.recent = 16;
  options.recall_length = 640;
  options.recall_contexts = 1;
  run_eval(options);
  const auto rows = read_rows(options.out);
  CHECK(rows.size() > 4);
  for (const ResultRow& row : rows) CHECK(row.cell == "excerpt-640");
}

TEST_CASE("a baseline that no arm has is refused, a default one is left out", "[model]") {
  SKIP_UNLESS(oscar_test::demo_model() && oscar_test::demo_text("persuasion"),
              "the demo model is not in the cache folder");
  const TemporaryFolder folder;
  EvalOptions options = small_options(folder);
  options.arms = {"int8"};
  CHECK_THROWS_WITH(run_eval(options), Contains("--baseline hadamard") && Contains("no arm"));
  CHECK_FALSE(std::filesystem::exists(options.out));
  options.baseline_optional = true;
  run_eval(options);
  for (const ResultRow& row : read_rows(options.out)) CHECK(row.paired_with != "hadamard");
}

TEST_CASE("scored rows do not depend on the windows of the arms", "[model]") {
  SKIP_UNLESS(oscar_test::demo_model() && oscar_test::demo_text("persuasion"),
              "the demo model is not in the cache folder");
  const TemporaryFolder folder;
  EvalOptions options = small_options(folder);
  options.rows = "auto";
  options.baseline.clear();
  const auto rows_of = [&](const char* arm) {
    options.arms = {arm};
    std::filesystem::remove(options.out);
    run_eval(options);
    for (const ResultRow& row : read_rows(options.out)) {
      if (row.arm == arm && row.metric == "kl") return row.n;
    }
    return decltype(ResultRow::n){};
  };
  const auto with_windows = rows_of("int8");
  CHECK(with_windows == 448 - 384);
  CHECK(rows_of("naive") == with_windows);
}

TEST_CASE("eval refuses an output that cannot be written before it loads anything") {
  EvalOptions options;
  options.model = "absent.gguf";
  options.texts = {"absent.txt"};
  options.quiet = true;
  options.out = "no/such/folder/rows.jsonl";
  CHECK_THROWS_WITH(run_eval(options), Contains("no/such/folder"));
  options.out.clear();
  CHECK_THROWS_WITH(run_eval(options), Contains("absent.gguf"));
}

TEST_CASE("results never replace a file that the run reads") {
  const TemporaryFolder folder;
  const std::string text = (folder / "text.txt").string();
  std::ofstream(text) << "words";
  std::filesystem::create_symlink(text, folder / "link.txt");
  EvalOptions options;
  options.model = text;
  options.texts = {"other.txt"};
  options.quiet = true;
  options.out = (folder / "link.txt").string();
  CHECK_THROWS_WITH(run_eval(options), Contains("must not be replaced"));
  options.out.clear();
  options.html = text;
  CHECK_THROWS_WITH(run_eval(options), Contains("must not be replaced"));
  CHECK_THROWS_WITH(run_report({.inputs = {text}, .out = text}), Contains("must not be replaced"));
  SimulateCommand command;
  command.capture = command.out = text;
  CHECK_THROWS_WITH(run_simulate(command), Contains("must not be replaced"));
  CHECK(content(text) == "words");
}

TEST_CASE("simulate stores one row an arm and head and one an arm") {
  const TemporaryFolder folder;
  SimulateCommand command;
  command.capture = small_capture(folder);
  command.arms = {"naive-windows", "int8"};
  command.out = (folder / "rows.jsonl").string();
  command.quiet = true;
  run_simulate(command);
  const auto rows = read_rows(command.out);
  CHECK(rows.size() == 4);
  CHECK(rows[0].labels.at("capture_sha256").size() == 64);
  run_report({.inputs = {command.out}, .out = (folder / "page.html").string()});
  CHECK_THAT(content(folder / "page.html"), Contains("layer 0 head 0"));

  command.arms = {"oscar"};
  CHECK_THROWS_WITH(run_simulate(command), Contains("bundle"));
  command.arms = {"nonsense"};
  CHECK_THROWS_WITH(run_simulate(command), Contains("nonsense"));
  command.capture = (folder / "absent.h5").string();
  CHECK_THROWS_WITH(run_simulate(command), Contains("absent.h5"));
}

TEST_CASE("report refuses files that are not rows") {
  const TemporaryFolder folder;
  const std::string path = (folder / "rows.jsonl").string();
  std::ofstream(path) << "hello\n";
  CHECK_THROWS_WITH(run_report({.inputs = {path}}), Contains("rows.jsonl"));
  CHECK_THROWS_AS(run_report({.inputs = {(folder / "absent.jsonl").string()}}), Error);
}
