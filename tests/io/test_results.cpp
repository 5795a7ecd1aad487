// Result rows: text form, round trip, refusals, merging.
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "io/results.h"
#include "support/gguf_writer.h"
#include "support/paths.h"

using namespace oscar;
using Catch::Matchers::Contains;
using oscar_test::TemporaryFolder;

namespace {

ResultRow sample(const std::vector<double>& values) {
  ResultRow row;
  row.suite = "kl";
  row.cell = "austen-2048";
  row.metric = "kl_mean";
  row.arm = "oscar";
  row.mode = "exact";
  row.n = static_cast<double>(values.size());
  for (const double value : values) {
    row.sum += value;
    row.sum_sq += value * value;
  }
  row.value = row.sum / row.n;
  const double mean = row.value;
  double squares = 0.0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  if (values.size() > 1) row.se = std::sqrt(squares / row.n / (row.n - 1));
  row.numbers["windows.sink"] = 64;
  row.numbers["tokens_int2_read"] = 10;
  row.labels["hashes.model"] = "abc";
  row.labels["codec"] = "int2-g64";
  row.labels["command"] = "oscar eval";
  return row;
}

}  // namespace

TEST_CASE("a row becomes one line of JSON and comes back", "[results]") {
  ResultRow row = sample({0.5, 1.5});
  row.ci_lo = 0.25;
  row.ci_hi = 2;
  row.ci_method = "bootstrap";
  row.paired_with = "bf16";
  row.numbers["big"] = 1e300;
  row.numbers["tiny"] = 0.1;
  row.numbers["lost"] = std::numeric_limits<double>::infinity();
  row.labels["text"] = "quote \" and \n line \xc3\xa9";
  const std::string line = to_json_line(row);
  CHECK(line.find('\n') == std::string::npos);
  CHECK_THAT(line, Contains("\"windows\":{\"sink\":64}") && Contains("\"n\":2,") &&
                       Contains("\"lost\":\"inf\""));
  const ResultRow back = parse_result_row(line, "here");
  CHECK(back.suite == "kl");
  CHECK(back.value == row.value);
  CHECK(back.se == row.se);
  CHECK(back.ci_hi == 2.0);
  CHECK(back.ci_method == "bootstrap");
  CHECK(back.paired_with == "bf16");
  CHECK(back.numbers == row.numbers);
  CHECK(back.labels == row.labels);
  CHECK(to_json_line(back) == line);

  row.value = std::numeric_limits<double>::quiet_NaN();
  row.labels["broken"] = "\xff";
  CHECK(std::isnan(parse_result_row(to_json_line(row), "here").value));
}

TEST_CASE("names that clash are refused", "[results]") {
  ResultRow row = sample({1});
  row.numbers["a"] = 1;
  row.numbers["a.b"] = 1;
  CHECK_THROWS_WITH(to_json_line(row), Contains("a.b clashes"));
  row = sample({1});
  row.numbers["same"] = 1;
  row.labels["same"] = "x";
  CHECK_THROWS_WITH(to_json_line(row), Contains("same clashes"));
  row = sample({1});
  row.labels["arm"] = "x";
  CHECK_THROWS_WITH(to_json_line(row), Contains("field of its own"));
  row = sample({1});
  row.labels["a..b"] = "x";
  CHECK_THROWS_WITH(to_json_line(row), Contains("not a usable name"));
  row = sample({1});
  row.labels["verdict"] = "nan";
  CHECK_THROWS_WITH(to_json_line(row), Contains("stands for a number"));
}

TEST_CASE("files of rows: line numbers in messages, nothing half-written", "[results]") {
  const TemporaryFolder folder;
  const std::string path = (folder / "rows.jsonl").string();
  write_rows({sample({1, 2}), sample({3})}, path);
  CHECK(read_rows(path).size() == 2);

  const std::string line = to_json_line(sample({1}));
  oscar_test::write_file(path, line + "\n\n  \n" + line);
  CHECK(read_rows(path).size() == 2);
  oscar_test::write_file(path, line + "\n{\"suite\": 1}\n");
  CHECK_THROWS_WITH(read_rows(path), Contains("rows.jsonl:2: field suite: expected a string"));
  oscar_test::write_file(path, line + "\n" + line.substr(0, 40));
  CHECK_THROWS_WITH(read_rows(path), Contains("rows.jsonl:2: not valid JSON"));
  oscar_test::write_file(path, "\n\n");
  CHECK_THROWS_WITH(read_rows(path), Contains("no result rows"));
  CHECK_THROWS_WITH(parse_result_row("[]", "x"), Contains("expected a JSON object"));
  CHECK_THROWS_WITH(parse_result_row("{\"suite\":\"a\"}", "x"), Contains("cell is missing"));
  CHECK_THROWS_WITH(parse_result_row(line.substr(0, line.size() - 1) + ",\"extra\":[1]}", "x"),
                    Contains("extra") && Contains("array"));

  CHECK_THROWS_WITH(write_rows({}, (folder / "no/such/rows.jsonl").string()),
                    Contains("rows.jsonl") && Contains("No such file"));
  // A target that cannot be replaced (a folder): the error leaves no temporary file.
  std::filesystem::create_directory(folder / "taken.jsonl");
  CHECK_THROWS_AS(write_rows({sample({1})}, (folder / "taken.jsonl").string()), Error);
  size_t entries = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    entries += entry.exists() ? 1 : 0;
  }
  CHECK(entries == 2);
}

TEST_CASE("merging adds sums and counts, and equals one run", "[results]") {
  const ResultRow whole = sample({0.5, 1.5, 2.5, 7.0, 1.0});
  ResultRow first = sample({0.5, 1.5});
  first.ci_method = "bootstrap";
  ResultRow second = sample({2.5, 7.0, 1.0});
  second.labels["command"] = "another command";
  const std::vector<ResultRow> merged = merge_rows({first, second});
  REQUIRE(merged.size() == 1);
  CHECK(merged[0].n == 5);
  CHECK(merged[0].value == Approx(whole.value).epsilon(1e-14));
  CHECK(merged[0].se == Approx(whole.se).epsilon(1e-12));
  CHECK(merged[0].ci_method.empty());
  CHECK(merged[0].numbers.at("tokens_int2_read") == 20);
  CHECK(merged[0].numbers.at("windows.sink") == 64);

  ResultRow other = sample({1});
  other.arm = "bf16";
  other.value = 99;  // alone: nothing is recomputed
  const std::vector<ResultRow> apart = merge_rows({first, other, second});
  REQUIRE(apart.size() == 2);
  CHECK(apart[0].arm == "oscar");
  CHECK(apart[1].value == 99);
  CHECK(merge_rows({}).empty());
}

TEST_CASE("perplexities merge through their mean loss", "[results]") {
  const auto ppl = [](const std::vector<double>& losses) {
    ResultRow row = sample(losses);
    row.labels["estimator"] = "exp_mean";
    row.se *= std::exp(row.value);
    row.value = std::exp(row.value);
    return row;
  };
  const ResultRow whole = ppl({1, 2, 4});
  const std::vector<ResultRow> merged = merge_rows({ppl({1}), ppl({2, 4})});
  CHECK(merged[0].value == Approx(whole.value).epsilon(1e-14));
  CHECK(merged[0].se == Approx(whole.se).epsilon(1e-12));
}

TEST_CASE("rows that do not belong together are refused", "[results]") {
  const auto refusal = [](auto&& change) {
    ResultRow row = sample({1, 2});
    change(row);
    try {
      merge_rows({sample({1, 2}), row});
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(refusal([](ResultRow&) {}).empty());
  CHECK_THAT(refusal([](ResultRow& r) { r.labels["hashes.model"] = "def"; }),
             Contains("hashes.model differs: abc and def"));
  CHECK_THAT(refusal([](ResultRow& r) { r.numbers["windows.sink"] = 0; }),
             Contains("windows.sink differs: 64 and 0"));
  CHECK_THAT(refusal([](ResultRow& r) { r.labels["codec"] = "int4"; }), Contains("codec differs"));
  CHECK_THAT(refusal([](ResultRow& r) { r.labels.erase("codec"); }), Contains("codec is not in"));
  CHECK_THAT(refusal([](ResultRow& r) { r.numbers["extra"] = 1; }), Contains("different numbers"));
  CHECK_THAT(refusal([](ResultRow& r) { r.value = 1.9; }),
             Contains("does not follow from sum / n"));
  CHECK_THAT(refusal([](ResultRow& r) { r.n = 0; }), Contains("nothing to merge"));
  CHECK_THAT(refusal([](ResultRow& r) { r.labels["estimator"] = "max"; }),
             Contains("estimator max cannot be merged"));
}
