#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <cmath>
#include <fstream>

#include "base/error.h"
#include "base/random.h"
#include "base/token_fingerprint.h"
#include "eval/evaluate.h"
#include "eval/likelihood_rows.h"
#include "eval/partial_file.h"
#include "support/paths.h"

namespace {

using namespace oscar;
using oscar_test::TemporaryFolder;

// The first `bytes` bytes of a novel, so that tokenizing it costs nothing.
std::string excerpt(const TemporaryFolder& folder, const std::filesystem::path& novel,
                    size_t bytes) {
  std::ifstream source(novel, std::ios::binary);
  std::string text(bytes, ' ');
  source.read(text.data(), static_cast<std::streamsize>(bytes));
  const std::string path = (folder / "excerpt.txt").string();
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

EvalRequest small_request(const TemporaryFolder& folder) {
  EvalRequest request;
  request.model_path = oscar_test::demo_model()->string();
  request.text_paths = {excerpt(folder, *oscar_test::demo_text("pride_and_prejudice"), 6000)};
  request.length = 448;
  request.max_windows = 2;
  request.rows = "from:400";
  request.arms = {"int8", "naive"};
  return request;
}

const ResultRow& find(const std::vector<ResultRow>& rows, const std::string& arm,
                      const std::string& metric) {
  for (const ResultRow& row : rows) {
    if (row.arm == arm && row.metric == metric && row.cell.find('@') == std::string::npos) {
      return row;
    }
  }
  FAIL("no row " << arm << " " << metric);
  return rows[0];
}

bool have_demo() {
  return oscar_test::demo_model().has_value() &&
         oscar_test::demo_text("pride_and_prejudice").has_value();
}

}  // namespace

TEST_CASE("arms in lock-step: noise floor, INT8 near zero, plain INT2 far away", "[model]") {
  SKIP_UNLESS(have_demo(), "the demo model is not in the cache folder");
  const TemporaryFolder folder;
  EvalSession session = open_session(small_request(folder));
  const auto rows = evaluate_likelihood(session, {});
  CHECK(find(rows, kNullArm, "kl").value <= 1e-6);
  CHECK(find(rows, kNullArm, "top1").value == 1);
  const ResultRow& int8 = find(rows, "int8", "kl");
  CHECK(int8.value < 2e-3);
  CHECK(int8.value > 0);
  CHECK(int8.n == 96);
  CHECK(int8.numbers.at("tokens_int2_read") > 0);
  CHECK(find(rows, "naive", "kl").value > 100 * int8.value);
  CHECK(find(rows, "naive", "ln_ppl_ratio").value > 0.5);
  CHECK(std::abs(find(rows, "int8", "ln_ppl_ratio").value) < 0.02);
  CHECK(find(rows, "bf16", "ppl").value > 5);
  CHECK(find(rows, "bf16", "ppl").value < 100);
}

TEST_CASE("windows wider than the text: an arm equals the reference and says so", "[model]") {
  SKIP_UNLESS(have_demo(), "the demo model is not in the cache folder");
  const TemporaryFolder folder;
  EvalRequest request = small_request(folder);
  request.arms = {"naive-windows"};
  request.arm_options.windows = {.sink = 448, .recent = 0};
  request.null_run = false;
  EvalSession session = open_session(request);
  const auto rows = evaluate_likelihood(session, {});
  CHECK(find(rows, "naive-windows", "kl").value <= 1e-6);
  CHECK(find(rows, "naive-windows", "kl").labels.at("status") == "not quantized");
  REQUIRE_FALSE(session.notes.empty());
  CHECK_THAT(session.notes.back(), Catch::Contains("not quantized"));
}

TEST_CASE("serving windows score like exact ones, and BOS is one more token", "[model]") {
  SKIP_UNLESS(have_demo(), "the demo model is not in the cache folder");
  const TemporaryFolder folder;
  EvalRequest request = small_request(folder);
  request.arms = {"int8"};
  request.max_windows = 1;
  request.null_run = false;
  request.with_bos = true;
  request.arm_options.windows.mode = WindowMode::kServing;
  EvalSession session = open_session(request);
  const auto rows = evaluate_likelihood(session, {});
  CHECK(find(rows, "int8", "kl").value < 2e-3);
  CHECK(find(rows, "int8", "kl").mode == "serving");
  CHECK(find(rows, "int8", "kl").numbers.at("tokens_int2_read") > 0);
}

TEST_CASE("one prefill can serve all arms", "[model]") {
  SKIP_UNLESS(have_demo(), "the demo model is not in the cache folder");
  const TemporaryFolder folder;
  EvalRequest request = small_request(folder);
  request.max_windows = 1;
  request.null_run = false;
  request.after_prefill = true;
  EvalSession session = open_session(request);
  const auto rows = evaluate_likelihood(session, {});
  CHECK(find(rows, "int8", "kl").mode == "after-prefill");
  CHECK(find(rows, "int8", "kl").value < 2e-3);
  CHECK(find(rows, "int8", "kl").numbers.at("tokens_int2_read") > 0);
  CHECK(find(rows, "naive", "kl").value > 0.2);
  request.prefill = 420;
  EvalSession late = open_session(request);
  CHECK_THROWS_WITH(evaluate_likelihood(late, {}), Catch::Contains("--prefill 420"));
}

TEST_CASE("an interrupted run resumes to the same rows", "[model]") {
  SKIP_UNLESS(have_demo(), "the demo model is not in the cache folder");
  const TemporaryFolder folder;
  EvalRequest request = small_request(folder);
  request.arms = {"hadamard"};
  request.null_run = false;
  EvalSession whole = open_session(request);
  const auto expected = evaluate_likelihood(whole, {});

  request.partial_path = (folder / "run.partial.jsonl").string();
  EvalSession first = open_session(request);
  evaluate_likelihood(first, {});
  first.partial.reset();
  // The kill came after the first window: keep the header and one record.
  std::ifstream file(request.partial_path);
  std::string header, record;
  std::getline(file, header);
  std::getline(file, record);
  file.close();
  std::ofstream(request.partial_path) << header << "\n" << record << "\n{\"window\": 1, \"ar";
  EvalSession second = open_session(request);
  const auto rows = evaluate_likelihood(second, {});
  CHECK_THAT(second.notes.front(), Catch::Contains("1 windows taken"));
  REQUIRE(rows.size() == expected.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    INFO(rows[i].arm << " " << rows[i].metric << " " << rows[i].cell);
    CHECK(rows[i].sum == expected[i].sum);
    CHECK(rows[i].value == expected[i].value);
    CHECK(rows[i].ci_lo == expected[i].ci_lo);
  }
  second.partial.reset();
  // Other options must not take these windows.
  request.rows = "tail:8";
  EvalSession other = open_session(request);
  CHECK_THROWS_WITH(evaluate_likelihood(other, {}), Catch::Contains("other options"));
}

TEST_CASE("requests that cannot be run are refused by name", "[model]") {
  SKIP_UNLESS(have_demo(), "the demo model is not in the cache folder");
  const TemporaryFolder folder;
  const EvalRequest good = small_request(folder);
  EvalRequest request = good;
  request.arms = {"naiive"};
  CHECK_THROWS_WITH(open_session(request), Catch::Contains("naiive"));
  request = good;
  request.arms = {"oscar"};
  CHECK_THROWS_WITH(open_session(request), Catch::Contains("oscar") && Catch::Contains("bundle"));
  request.skip_impossible_arms = true;
  CHECK_THAT(open_session(request).notes.at(0), Catch::Contains("oscar left out"));
  request = good;
  request.reference = "naive";
  CHECK_THROWS_WITH(open_session(request), Catch::Contains("--reference"));
  request = good;
  request.bundle_path = (folder / "absent.h5").string();
  CHECK_THROWS_WITH(open_session(request), Catch::Contains("absent.h5"));
  request = good;
  request.length = 4000;
  EvalSession session = open_session(request);
  CHECK_THROWS_WITH(evaluate_likelihood(session, {}), Catch::Contains("--length"));
  std::atomic<bool> interrupted{true};
  Progress progress;
  progress.interrupted = &interrupted;
  EvalSession stopped = open_session(good);
  CHECK_THROWS_AS(evaluate_likelihood(stopped, progress), Interrupted);
}

TEST_CASE("a file is recognized as the one a bundle without fingerprints was calibrated on") {
  EvalText text;
  text.sha256 = std::string(64, 'a');
  BundleInfo info;
  info.text_sha256 = std::string(64, 'b');
  const auto refused = [&] { return calibration_overlap(info, {text}, 64, 1).refused; };
  CHECK_FALSE(refused());
  info.options_json = "{\"texts\": [{\"sha256\": \"" + text.sha256 + "\"}]}";
  CHECK(refused());
  info.options_json = "{}";
  info.text_sha256 = text.sha256;
  CHECK(refused());
  info.text_sha256 = std::string(64, 'b') + "," + text.sha256;
  CHECK(refused());
}

TEST_CASE("scored windows are compared with the tokens that a bundle was calibrated on") {
  Random random(4);
  const auto tokens = [&](size_t count) {
    std::vector<int32_t> drawn(count);
    for (int32_t& token : drawn) token = static_cast<int32_t>(random.below(1000));
    return drawn;
  };
  const std::vector<int32_t> novel = tokens(40000), other = tokens(40000);
  EvalText text;
  text.sha256 = std::string(64, 'a');
  BundleInfo info;
  info.text_sha256 = text.sha256;  // the same file does not matter where tokens are known
  info.token_fingerprints = token_fingerprints(std::span(novel).subspan(10000, 8000));
  const auto overlap = [&](std::vector<int32_t> scored, size_t windows) {
    text.tokens = std::move(scored);
    return calibration_overlap(info, {text}, 1000, windows);
  };
  // Windows in front of the calibration tokens, and reaching into them.
  CHECK_FALSE(overlap(novel, 10).any());
  CHECK(overlap(novel, 10).scored > 500);
  CHECK(overlap(novel, 11).refused);
  CHECK(overlap(novel, 0).refused);
  CHECK_FALSE(overlap(other, 0).any());
  // The passage stands elsewhere in another file.
  std::vector<int32_t> quoting = other;
  std::copy_n(novel.begin() + 12000, 2000, quoting.begin() + 501);
  CHECK(overlap(quoting, 0).refused);
  CHECK_FALSE(overlap({quoting.begin() + 3000, quoting.end()}, 0).any());
  // A short one is said, not refused.
  std::vector<int32_t> boilerplate = other;
  std::copy_n(novel.begin() + 12000, 200, boilerplate.begin() + 501);
  const CalibrationOverlap shared = overlap(boilerplate, 0);
  CHECK(shared.any());
  CHECK_FALSE(shared.refused);
}

TEST_CASE("the standard controls are centered where the bundle has key means") {
  const auto last = [](const Bundle* bundle) { return standard_arms(bundle).back(); };
  CHECK(last(nullptr) == "int8");
  Bundle bundle;
  bundle.layers[0].k_mean = TensorF({1, 8});
  bundle.layers[1];
  CHECK(last(&bundle) == "int8");
  bundle.layers[1].k_mean = TensorF({1, 8});
  CHECK(last(&bundle) == "int8:k.centered");
  const std::vector<std::string> arms = standard_arms(&bundle);
  CHECK(std::find(arms.begin(), arms.end(), "int4:k.centered") != arms.end());
  CHECK(std::find(arms.begin(), arms.end(), "int4") == arms.end());
}
