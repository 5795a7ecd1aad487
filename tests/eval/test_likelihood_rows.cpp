#include <catch2/catch.hpp>
#include <cmath>
#include <fstream>
#include <limits>

#include "base/error.h"
#include "base/random.h"
#include "eval/likelihood_rows.h"
#include "eval/partial_file.h"
#include "support/paths.h"

namespace {

using namespace oscar;

std::shared_ptr<const KvArm> plain_arm(const std::string& name, bool quantized) {
  auto arm = std::make_shared<KvArm>();
  arm->name = name;
  arm->quantized = quantized;
  return arm;
}

// Windows of 4 rows; the reference, one arm, the null run.
LikelihoodRun synthetic_run(size_t windows) {
  LikelihoodRun run;
  run.cell = "novel-1024";
  run.targets = {508, 511, 512, 1000};
  run.window_length = 1024;
  run.arms = {plain_arm("bf16", false), plain_arm("fp32", false)};
  run.null_run = true;
  run.mode = "exact";
  run.bootstrap_seed = 7;
  Random random(3);
  for (size_t w = 0; w < windows; ++w) {
    WindowRecord record;
    record.window = w;
    for (size_t a = 0; a < 3; ++a) {
      ArmWindow arm;
      for (size_t row = 0; row < 4; ++row) {
        const double loss = 2 + 0.3 * static_cast<double>(row) + 0.1 * static_cast<double>(w);
        arm.nll.push_back(static_cast<float>(a == 1 ? loss + 0.1 + 0.01 * random.normal() : loss));
        arm.kl.push_back(a == 1 ? 0.25F * static_cast<float>(row + 1) : 0.0F);
        arm.kl_top.push_back(arm.kl.back() / 2);
        arm.delta_p.push_back(a == 1 ? -0.5F : 0.0F);
        arm.agreement.push_back(static_cast<uint8_t>(a == 1 && row == 0 ? 3 : kSameTop1 | 5));
      }
      arm.tokens_int2_read = 10;
      arm.rows_encoded = 100;
      arm.gains_clamped = a == 1 ? 3 : 0;
      arm.scales_saturated = a == 1 ? 2 : 0;
      arm.forward_s = 0.5;
      record.arms.push_back(arm);
    }
    run.records.push_back(record);
  }
  return run;
}

const ResultRow& find(const std::vector<ResultRow>& rows, const std::string& arm,
                      const std::string& metric, const std::string& cell = "novel-1024") {
  for (const ResultRow& row : rows) {
    if (row.arm == arm && row.metric == metric && row.cell == cell) return row;
  }
  FAIL("no row " << arm << " " << metric << " " << cell);
  return rows[0];
}

}  // namespace

TEST_CASE("rows carry token-weighted values, paired differences and their errors") {
  const LikelihoodRun run = synthetic_run(6);
  const auto rows = likelihood_rows(run);
  const double mean = 2 + 0.3 * 1.5 + 0.1 * 2.5;
  const ResultRow& ppl = find(rows, "bf16", "ppl");
  CHECK(ppl.value == Approx(std::exp(mean)).epsilon(1e-6));
  CHECK(ppl.n == 24);
  CHECK(ppl.sum == Approx(24 * mean).epsilon(1e-6));
  CHECK(ppl.ci_lo < ppl.value);
  CHECK(ppl.ci_hi > ppl.value);
  CHECK(ppl.paired_with.empty());
  // Window means differ by 0.1: the error of six window means, 0.0764, is under the one over rows,
  // sqrt(0.141667 / 23), which bounds it from below.
  CHECK(ppl.se == Approx(ppl.value * std::sqrt(0.1416667 / 23)).epsilon(1e-5));
  CHECK(ppl.se == Approx(ppl.numbers.at("se_rows")));
  const ResultRow& ratio = find(rows, "fp32", "ln_ppl_ratio");
  CHECK(ratio.value == Approx(0.1).margin(0.01));
  CHECK(ratio.se < 0.01);
  CHECK(ratio.paired_with == "bf16");
  CHECK(ratio.numbers.at("ratio") == Approx(std::exp(ratio.value)));
  CHECK(ratio.numbers.at("correlation") > 0.99);
}

TEST_CASE("divergence, agreement and the noise floor") {
  const auto rows = likelihood_rows(synthetic_run(6));
  const ResultRow& kl = find(rows, "fp32", "kl");
  CHECK(kl.value == Approx(0.625));
  CHECK(kl.numbers.at("median") == Approx(0.625));
  CHECK(kl.numbers.at("max") == 1);
  // All windows are alike: the error over windows would be 0.
  CHECK(kl.se == Approx(std::sqrt(0.078125 / 23)).epsilon(1e-6));
  CHECK(find(rows, "fp32", "top1").value == Approx(0.75));
  CHECK(find(rows, "fp32", "top1").numbers.at("se_rows") == Approx(std::sqrt(0.1875 / 23)));
  CHECK(find(rows, "fp32", "top5").value == Approx((0.6 + 3) / 4));
  CHECK(find(rows, "fp32", "delta_p").numbers.at("rms") == Approx(0.5));
  CHECK(find(rows, "fp32", "kl50").value == Approx(0.3125));
  CHECK(find(rows, kNullArm, "kl").value == 0);
  CHECK(find(rows, kNullArm, "ln_ppl_ratio").value == 0);
  CHECK(kl.labels.at("kl_by_window") == "0.625 0.625 0.625 0.625 0.625 0.625");
  CHECK(find(rows, "fp32", "top1").labels.count("kl_by_window") == 0);
  // Buckets of 512 positions: two rows each.
  CHECK(find(rows, "fp32", "kl", "novel-1024@0-511").value == Approx(0.375));
  CHECK(find(rows, "fp32", "kl", "novel-1024@512-1023").value == Approx(0.875));
}

TEST_CASE("infinite divergence and loss are counted apart") {
  LikelihoodRun run = synthetic_run(2);
  run.records[1].arms[1].kl[2] = std::numeric_limits<float>::infinity();
  run.records[1].arms[1].nll[2] = std::numeric_limits<float>::infinity();
  const auto rows = likelihood_rows(run);
  CHECK(find(rows, "fp32", "kl").numbers.at("infinite") == 1);
  CHECK(find(rows, "fp32", "kl").n == 7);
  CHECK_FALSE(find(rows, "fp32", "kl").numbers.contains("max"));
  CHECK(find(rows, "fp32", "ppl").labels.at("infinite_at") == "window 1 position 512");
  CHECK(std::isfinite(find(rows, "fp32", "ln_ppl_ratio").value));
}

TEST_CASE("one window: errors over rows, no interval") {
  const auto rows = likelihood_rows(synthetic_run(1));
  const ResultRow& kl = find(rows, "fp32", "kl");
  CHECK(kl.labels.at("se_method") == "rows");
  CHECK(kl.se > 0);
  CHECK(kl.ci_method.empty());
}

TEST_CASE("paired divergence differences against a baseline arm") {
  LikelihoodRun run = synthetic_run(4);
  run.arms.push_back(plain_arm("better", false));
  for (WindowRecord& record : run.records) {
    record.arms.push_back(record.arms[1]);
    for (float& kl : record.arms[3].kl) kl -= 0.125F;
    std::swap(record.arms[2], record.arms[3]);
  }
  const auto rows = paired_divergence_rows(run, "fp32");
  REQUIRE(rows.size() == 1);
  CHECK(rows[0].arm == "better");
  CHECK(rows[0].paired_with == "fp32");
  CHECK(rows[0].value == Approx(-0.125));
  CHECK(rows[0].se == Approx(0).margin(1e-8));
  CHECK(paired_divergence_rows(run, "absent").empty());
}

TEST_CASE("records that do not fit are refused") {
  LikelihoodRun run = synthetic_run(2);
  run.records[1].arms.pop_back();
  CHECK_THROWS_AS(likelihood_rows(run), Error);
  run = synthetic_run(2);
  run.targets.pop_back();
  CHECK_THROWS_AS(likelihood_rows(run), Error);
  run.records.clear();
  CHECK_THROWS_AS(likelihood_rows(run), Error);
}

TEST_CASE("what the encoder could not hold is counted over all windows and said") {
  const LikelihoodRun run = synthetic_run(3);
  const EncodeStats events = encode_events(run.records, 1);
  CHECK(events.rows == 300);
  CHECK(events.gain_clamped == 9);
  CHECK(events.scale_saturated == 6);
  CHECK(describe(events) ==
        "9 of 300 rows with the gain at its clamp, 6 of 300 rows with a scale above the largest "
        "one stored");
  CHECK(describe(encode_events(run.records, 2)).empty());
  const std::vector<ResultRow> rows = likelihood_rows(run);
  CHECK(find(rows, "fp32", "kl").numbers.at("gains_clamped") == 9);
  CHECK(find(rows, "fp32", "kl").numbers.at("rows_encoded") == 300);
}

TEST_CASE("finished windows survive in a file, a cut last line does not") {
  oscar_test::TemporaryFolder folder;
  const std::string path = (folder / "run.partial.jsonl").string();
  const LikelihoodRun run = synthetic_run(3);
  {
    PartialFile file(path, "model 1");
    for (const WindowRecord& record : run.records) file.append(record);
  }
  const auto size = std::filesystem::file_size(path);
  std::filesystem::resize_file(path, size - 20);
  {
    PartialFile file(path, "model 1");
    REQUIRE(file.records().size() == 2);
    CHECK(file.records()[1].arms[1].nll == run.records[1].arms[1].nll);
    CHECK(file.records()[1].arms[1].kl == run.records[1].arms[1].kl);
    CHECK(file.records()[1].arms[1].delta_p == run.records[1].arms[1].delta_p);
    CHECK(file.records()[1].arms[1].agreement == run.records[1].arms[1].agreement);
    CHECK(file.records()[1].arms[0].tokens_int2_read == 10);
    CHECK(file.records()[1].arms[1].rows_encoded == 100);
    CHECK(file.records()[1].arms[1].gains_clamped == 3);
    CHECK(file.records()[1].arms[1].scales_saturated == 2);
    file.append(run.records[2]);
  }
  CHECK(std::filesystem::file_size(path) == size);
  CHECK_THROWS_WITH(PartialFile(path, "model 2"),
                    Catch::Contains("\"model 1\" there, \"model 2\" here"));
  {
    PartialFile file(path, "model 1");
    CHECK(file.records().size() == 3);
    file.remove();
  }
  CHECK_FALSE(std::filesystem::exists(path));
}

TEST_CASE("windows of another run are refused by the first thing that differs") {
  oscar_test::TemporaryFolder folder;
  const std::string path = (folder / "run.partial.jsonl").string();
  const std::string arms = "arms bf16 [" + std::string(500, 'a'), end = std::string(500, 'z');
  PartialFile(path, "model 1; length 64; " + arms + "11111111" + end);
  const auto message = [&](const std::string& provenance) -> std::string {
    try {
      const PartialFile file(path, provenance);
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  };
  CHECK_THAT(message("model 1; length 128; " + arms + "11111111" + end),
             Catch::Contains("\"length 64\" there, \"length 128\" here"));
  const std::string found = message("model 1; length 64; " + arms + "22222222" + end);
  CHECK_THAT(found, Catch::Contains("arms ...") && Catch::Contains("11111111") &&
                        Catch::Contains("22222222"));
  CHECK(found.size() < 500);
}

TEST_CASE("two runs do not keep windows in one file at the same time") {
  oscar_test::TemporaryFolder folder;
  const std::string path = (folder / "run.partial.jsonl").string();
  {
    PartialFile first(path, "x");
    CHECK_THROWS_WITH(PartialFile(path, "x"),
                      Catch::Contains("partial.jsonl") && Catch::Contains("another process"));
    first.append(synthetic_run(1).records[0]);
  }
  CHECK(PartialFile(path, "x").records().size() == 1);
}

TEST_CASE("files that are not finished windows are refused") {
  oscar_test::TemporaryFolder folder;
  const std::string path = (folder / "other.jsonl").string();
  for (const std::string content : {"hello\n", "hello", "{\"format\":\"else"}) {
    std::ofstream(path) << content;
    CHECK_THROWS_WITH(PartialFile(path, "x"),
                      Catch::Contains("other.jsonl") && Catch::Contains("not a file of finished"));
    CHECK(std::filesystem::file_size(path) == content.size());
  }
  std::ofstream(path) << "{\"format\":\"oscar-eval-pa";  // our own first line, cut off by a kill
  CHECK(PartialFile(path, "x").records().empty());
  CHECK_THROWS_AS(parse_window_record("{\"window\": 1}", "line"), Error);
  CHECK_THROWS_AS(parse_window_record("[]", "line"), Error);
  const std::string line = to_json_line(synthetic_run(1).records[0]);
  std::string odd = line;
  odd.replace(odd.find("\"kl\":\"") + 6, 1, "");
  CHECK_THROWS_AS(parse_window_record(odd, "line"), Error);
  odd = line;
  odd[odd.find("\"kl\":\"") + 6] = 'x';
  CHECK_THROWS_AS(parse_window_record(odd, "line"), Error);
  CHECK_THROWS_AS(PartialFile((folder / "no" / "such.jsonl").string(), "x"), Error);
}
