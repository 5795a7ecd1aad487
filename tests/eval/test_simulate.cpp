#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "base/parallel.h"
#include "base/random.h"
#include "eval/simulate.h"
#include "support/paths.h"

namespace {

using namespace oscar;

constexpr size_t kDim = 32, kHeads = 4, kKvHeads = 2;

CaptureInfo info() {
  CaptureInfo capture;
  capture.model_architecture = "llama";
  capture.model_sha256 = std::string(64, '1');
  capture.text_sha256 = std::string(64, '2');
  capture.head_dim = kDim;
  capture.num_layers = 2;
  capture.num_heads = kHeads;
  capture.num_kv_heads = kKvHeads;
  capture.rope_theta = 10000;
  capture.bf16 = false;
  return capture;
}

std::vector<float> normal(Random& random, size_t count, double offset = 0) {
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(random.normal() + offset);
  return values;
}

// Two sequences of 448 and 96 tokens; keys carry a constant part, as real ones do.
std::string write_capture(const oscar_test::TemporaryFolder& folder) {
  const std::string path = (folder / "capture.h5").string();
  CaptureWriter writer(path, info());
  Random random(5);
  for (const size_t tokens : {448, 96}) {
    writer.begin_sequence(std::vector<int32_t>(tokens, 1));
    for (int64_t layer = 0; layer < 2; ++layer) {
      const auto q = normal(random, tokens * kHeads * kDim);
      const auto k = normal(random, tokens * kKvHeads * kDim, 2.0);
      const auto v = normal(random, tokens * kKvHeads * kDim);
      writer.append(layer, q.data(), k.data(), v.data(), nullptr);
    }
    writer.end_sequence();
  }
  writer.finish();
  return path;
}

std::vector<std::shared_ptr<const KvArm>> arms_named(const std::vector<std::string>& names) {
  std::vector<std::shared_ptr<const KvArm>> arms;
  for (const std::string& name : names) {
    arms.push_back(std::make_shared<const KvArm>(make_arm(name, config_of(info()), {}, nullptr)));
  }
  return arms;
}

const ResultRow& find(const std::vector<ResultRow>& rows, const std::string& arm,
                      const std::string& cell) {
  for (const ResultRow& row : rows) {
    if (row.arm == arm && row.cell == cell) return row;
  }
  FAIL("no row " << arm << " " << cell);
  return rows[0];
}

}  // namespace

TEST_CASE("simulation rows: every arm, layer and head, and errors in the right order") {
  const oscar_test::TemporaryFolder folder;
  const CaptureReader capture(write_capture(folder));
  const auto rows = simulate(
      capture, arms_named({"bf16", "naive", "naive-windows", "hadamard", "kivi", "int4", "int8"}),
      {}, {});
  CHECK(rows.size() == 7 * (2 * kKvHeads + 1));
  const auto error = [&](const std::string& arm) { return find(rows, arm, "all").value; };
  CHECK(error("bf16") < 1e-4);
  CHECK(error("int8") < 1e-3);
  CHECK(error("int8") < error("int4"));
  CHECK(error("int4") < error("hadamard"));
  CHECK(error("naive-windows") < error("naive"));
  // Only the first sequence reaches behind the windows: positions 384, 392, ... 440.
  CHECK(find(rows, "int8", "layer 1 head 1").n == 8 * kHeads / kKvHeads);
  const ResultRow& windows = find(rows, "naive-windows", "layer 0 head 0");
  CHECK(windows.numbers.at("k_mse_sink") < 1e-3);
  CHECK(windows.numbers.at("k_mse_recent") < 1e-3);
  CHECK(windows.numbers.at("k_mse_history") > 0.01);
  CHECK(find(rows, "naive", "layer 0 head 0").numbers.at("k_mse_sink") > 0.01);
  CHECK(windows.numbers.at("attention_sink") + windows.numbers.at("attention_recent") +
            windows.numbers.at("attention_history") ==
        Approx(1).epsilon(1e-4));
  CHECK(windows.labels.at("windows") == "64/256");
}

TEST_CASE("simulation does not depend on the thread count") {
  const oscar_test::TemporaryFolder folder;
  const CaptureReader capture(write_capture(folder));
  set_num_threads(1);
  const auto one = simulate(capture, arms_named({"hadamard"}), {}, {});
  set_num_threads(3);
  const auto three = simulate(capture, arms_named({"hadamard"}), {}, {});
  set_num_threads(0);
  REQUIRE(one.size() == three.size());
  for (size_t i = 0; i < one.size(); ++i) CHECK(one[i].sum == three[i].sum);
}

TEST_CASE("simulations that cannot be run are refused by name") {
  const oscar_test::TemporaryFolder folder;
  const std::string path = write_capture(folder);
  const CaptureReader capture(path);
  const auto arms = arms_named({"int4"});
  CHECK_THROWS_AS(simulate(capture, {}, {}, {}), Error);
  CHECK_THROWS_WITH(simulate(capture, arms, {.first_query = 448}, {}), Catch::Contains("448"));
  CHECK_THROWS_WITH(simulate(capture, arms, {.layers = {7}}, {}), Catch::Contains("no layer 7"));
  CHECK_THROWS_AS(simulate(capture, arms, {.query_stride = 0}, {}), Error);
  auto short_arm = std::make_shared<KvArm>(*arms[0]);
  short_arm->layers.pop_back();
  CHECK_THROWS_WITH(simulate(capture, {short_arm}, {}, {}), Catch::Contains("layer 1"));
  CHECK_THROWS_AS(CaptureReader((folder / "absent.h5").string()), Error);
}
