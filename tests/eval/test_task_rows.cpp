#include <catch2/catch.hpp>
#include <cmath>

#include "base/error.h"
#include "eval/arm_summary.h"
#include "eval/task_rows.h"

namespace {

using namespace oscar;

ModelConfig small_model(size_t head_dim) {
  ModelConfig config;
  config.num_layers = 2;
  config.num_heads = config.num_kv_heads = 2;
  config.head_dim = head_dim;
  config.hidden_size = 2 * head_dim;
  return config;
}

std::shared_ptr<const KvArm> arm_named(const std::string& name, size_t head_dim = 64) {
  return std::make_shared<const KvArm>(make_arm(name, small_model(head_dim), {}, nullptr));
}

// Two contexts of two questions; the arm loses one nat on each and one answer.
TaskScores lookup_scores(double reference_right) {
  TaskScores scores;
  scores.task = "kv-lookup";
  scores.context = {0, 0, 1, 1};
  for (const char* name : {"bf16", "naive"}) {
    const bool test = std::string(name) == "naive";
    ArmTaskScores arm;
    arm.arm = name;
    arm.values("accuracy") = {reference_right, test ? 0.0 : reference_right, reference_right, 1};
    arm.values("margin") = {3.0 - test, 4.0 - test, 5.0 - test, 8.0 - test};
    arm.values("margin_positive") = {1, 1, 1, 1};
    arm.tokens_int2_read = test ? 100 : 0;
    scores.arms.push_back(arm);
  }
  return scores;
}

TaskRowInfo info() {
  TaskRowInfo rows;
  rows.cell = "novel-2048";
  rows.mode = "exact";
  rows.length = 1024;
  rows.arms = {arm_named("bf16"), arm_named("naive")};
  rows.bootstrap_seed = 1;
  return rows;
}

const ResultRow& find(const std::vector<ResultRow>& rows, const std::string& arm,
                      const std::string& metric) {
  for (const ResultRow& row : rows) {
    if (row.arm == arm && row.metric == metric) return row;
  }
  FAIL("no row " << arm << " " << metric);
  return rows[0];
}

}  // namespace

TEST_CASE("task rows: means, errors over contexts, paired differences") {
  const auto rows = task_rows(lookup_scores(1), info());
  const ResultRow& margin = find(rows, "bf16", "kv_margin");
  CHECK(margin.value == 5);
  CHECK(margin.n == 4);
  // Context means 3.5 and 6.5.
  CHECK(margin.se == Approx(1.5));
  CHECK(margin.labels.at("informative") == "yes");
  CHECK(margin.labels.at("task") == "kv-lookup, 1024 tokens");
  const ResultRow& difference = find(rows, "naive", "kv_margin_difference");
  CHECK(difference.value == -1);
  CHECK(difference.se == Approx(0).margin(1e-12));
  CHECK(difference.paired_with == "bf16");
  CHECK(find(rows, "naive", "kv_accuracy").value == 0.75);
  CHECK(find(rows, "naive", "kv_accuracy_difference").value == -0.25);
}

TEST_CASE("a reference that cannot do the task is named, metric by metric") {
  const auto rows = task_rows(lookup_scores(0), info());
  CHECK(find(rows, "naive", "kv_accuracy").labels.at("informative") == "no");
  CHECK(find(rows, "naive", "kv_margin").labels.at("informative") == "yes");
}

TEST_CASE("scores that do not match the arms are refused") {
  TaskScores scores = lookup_scores(1);
  scores.arms.pop_back();
  CHECK_THROWS_AS(task_rows(scores, info()), Error);
  scores = lookup_scores(1);
  scores.arms[1].values("margin").pop_back();
  CHECK_THROWS_WITH(task_rows(scores, info()), Catch::Contains("margin"));
  CHECK_THROWS_AS(task_rows({}, info()), Error);
}

TEST_CASE("bits per element of the protocol's table") {
  const auto bits = [](const std::string& name, size_t head_dim, size_t tokens) {
    return bits_per_element(*arm_named(name, head_dim), tokens);
  };
  CHECK(bits("naive", 128, 32768) == 2.25);
  CHECK(bits("hadamard", 128, 32768) == Approx(2.3843).margin(5e-5));
  CHECK(bits("hadamard", 128, 131072) == Approx(2.2836).margin(5e-5));
  CHECK(bits("hadamard:group=64", 128, 131072) == Approx(2.5330).margin(5e-5));
  CHECK(bits("hadamard:meta=scale-zero-fp32", 128, 131072) == Approx(2.5330).margin(5e-5));
  CHECK(bits("hadamard:meta=scale-zero-fp32", 128, 1000) == Approx(6.82).margin(5e-3));
  CHECK(bits("hadamard", 64, 8192) == Approx(3.0273).margin(5e-5));
  CHECK(bits("hadamard", 128, 320) == 16);
  CHECK(bits("bf16", 128, 100) == 16);
  CHECK(bits("fp32", 128, 100) == 32);
  // Keys wait in high precision until 32 tokens are together: 0 of 31 keys, 31 of 31 values.
  CHECK(bits("kivi:no-windows", 128, 31) == Approx((16 + 3.0) / 2));
  CHECK_THROWS_AS(bits("hadamard", 128, 0), Error);
}

TEST_CASE("an arm's summary names its codec") {
  const ArmSummary hadamard = summarize(*arm_named("hadamard"));
  CHECK(hadamard.codec == "int2");
  CHECK(hadamard.group == "64");
  CHECK(hadamard.meta_bits == 16);
  CHECK(hadamard.clip_k == 0.96);
  CHECK(hadamard.clip_v == 0.92);
  CHECK(to_string(hadamard.windows) == "64/256");
  CHECK(summarize(*arm_named("int8")).codec == "int8");
  CHECK(summarize(*arm_named("bf16")).codec == "bf16");
  CHECK_THAT(summarize(*arm_named("kivi")).group, Catch::Contains("tokens"));
}
