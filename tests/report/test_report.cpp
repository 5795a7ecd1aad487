#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "report/arms_report.h"
#include "report/html_report.h"
#include "report/simulate_report.h"
#include "report/table.h"

namespace {

using namespace oscar;

ResultRow make_row(const std::string& arm, const std::string& metric, double value, double se,
                   const std::string& cell = "novel-2048") {
  ResultRow row;
  row.suite = "kl";
  row.cell = cell;
  row.arm = arm;
  row.metric = metric;
  row.mode = "exact";
  row.n = 100;
  row.value = value;
  row.se = se;
  row.labels["model_sha256"] = "abc";
  row.labels["windows"] = arm == "bf16" ? "" : "64/256";
  row.numbers["bpe_nominal"] = arm == "bf16" ? 16 : 2.5;
  row.numbers["bpe_used"] = arm == "bf16" ? 16 : 4.6;
  return row;
}

std::vector<ResultRow> sample_rows() {
  std::vector<ResultRow> rows{make_row("bf16", "ppl", 21.5, 0.4),
                              make_row("hadamard", "ppl", 24.25, 0.5),
                              make_row("hadamard", "ln_ppl_ratio", 0.12, 0.011),
                              make_row("hadamard", "kl", 0.113, 0.004),
                              make_row("oscar", "ppl", 21.75, 0.4),
                              make_row("oscar", "kl", 0.0063, 0.0002),
                              make_row("oscar", "top1", 0.9512, 0.003),
                              make_row("oscar", "kl", 0.005, 0.001, "novel-2048@1024-1535"),
                              make_row("oscar", "kl_difference", -0.1067, 0.004)};
  rows[3].numbers["p99"] = 1.5;
  rows.back().paired_with = "hadamard";
  rows.back().ci_lo = -0.115;
  rows.back().ci_hi = -0.099;
  rows.back().ci_method = "bootstrap over 8 windows";
  return rows;
}

ResultRow simulated(const std::string& arm, const std::string& cell, double error) {
  ResultRow row = make_row(arm, "output_error", error, error / 10, cell);
  row.suite = "simulate";
  row.numbers["logit_rms_history"] = 0.5;
  return row;
}

constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

TEST_CASE("numbers with errors keep two digits of the error") {
  CHECK(format_with_error(0.00631, 0.000212) == "0.00631 ± 0.00021");
  CHECK(format_with_error(21.5164, 0.4021) == "21.52 ± 0.40");
  CHECK(format_with_error(1504.2, 33.0) == "1504 ± 33");
  CHECK(format_with_error(3.1e-6, 2e-7) == "3.1e-06 ± 2e-07");
  CHECK(format_with_error(5.0, std::nullopt) == "5");
  CHECK(format_with_error(5.0, 0.0) == "5 ± 0");
  CHECK(format_with_error(std::nullopt, 1.0) == "n/a");
  CHECK(format_with_error(std::nan(""), 1.0) == "n/a");
  CHECK(format_with_error(kInfinity, 1.0) == "inf");
}

TEST_CASE("plain numbers") {
  CHECK(format_number(0) == "0");
  CHECK(format_number(2.25) == "2.25");
  CHECK(format_number(123456) == "123456");
  CHECK(format_number(0.00012345) == "0.0001234");
  CHECK(format_number(1.5e-9, 3) == "1.50e-09");
  CHECK(format_number(-kInfinity) == "-inf");
  CHECK(format_fixed(-0.0001, 2) == "0.00");
  CHECK(format_fixed(-1.0, 1) == "-1.0");
}

TEST_CASE("tables align by shown characters and escape what their format needs") {
  Table table({{"arm", false}, {"KL"}});
  table.add_row({"a|b", "0.1 ± 0.02"});
  table.add_row({"<longer>", "9"});
  CHECK(table.text() ==
        "arm               KL\n"
        "--------  ----------\n"
        "a|b       0.1 ± 0.02\n"
        "<longer>           9\n");
  CHECK(table.markdown() ==
        "| arm | KL |\n| --- | ---: |\n| a\\|b | 0.1 ± 0.02 |\n| <longer> | 9 |\n");
  CHECK_THAT(table.html(), Catch::Contains("<td>&lt;longer&gt;</td><td class=\"n\">9</td>"));
  CHECK_THROWS_AS(table.add_row({"one"}), Error);
  Table sparse({{"a"}, {"b"}, {"c"}});
  sparse.add_row({"1", "n/a", ""});
  sparse.drop_empty_columns();
  CHECK(sparse.text() == "a\n-\n1\n");
}

TEST_CASE("the table of arms") {
  const auto cells = split_cells(sample_rows());
  REQUIRE(cells.size() == 2);
  CHECK(cells[0].arms == std::vector<std::string>{"bf16", "hadamard", "oscar"});
  CHECK(is_bucket(cells[1].cell));
  const std::vector<std::string> expected{
      "arm       windows    bits  bits used           PPL       Δ ln PPL                 KL  KL 99 "
      "%"
      "       top-1 %",
      "--------  -------  ------  ---------  ------------  -------------  -----------------  "
      "-------"
      "  ------------",
      "bf16               16.000     16.000  21.50 ± 0.40            n/a                n/a      "
      "n/a"
      "           n/a",
      "hadamard  64/256    2.500      4.600  24.25 ± 0.50  0.120 ± 0.011    0.1130 ± 0.0040      "
      "1.5"
      "           n/a",
      "oscar     64/256    2.500      4.600  21.75 ± 0.40            n/a  0.00630 ± 0.00020      "
      "n/a"
      "  95.12 ± 0.30"};
  std::string text;
  for (const std::string& line : expected) text += line + "\n";
  CHECK(arms_table(cells[0]).text() == text);
}

TEST_CASE("reports hold differences and buckets, in text and Markdown") {
  const std::string text = text_report(sample_rows());
  CHECK_THAT(text, Catch::Contains("novel-2048, exact windows") && Catch::Contains("-26.7") &&
                       Catch::Contains("-0.115 .. -0.099") && Catch::Contains("1024-1535"));
  const std::string markdown = markdown_report(sample_rows(), {"a note"});
  CHECK_THAT(markdown, Catch::Contains("## novel-2048") && Catch::Contains("| oscar | 64/256 |") &&
                           Catch::Contains("- a note"));
}

TEST_CASE("rows of different models, data or modes do not share a table") {
  auto rows = sample_rows();
  rows[4].labels["model_sha256"] = "def";
  CHECK_THROWS_WITH(text_report(rows), Catch::Contains("model_sha256") && Catch::Contains("def"));
  rows = sample_rows();
  rows[4].mode = "serving";
  CHECK_THROWS_AS(html_report(rows, "t"), Error);
}

TEST_CASE("an arm that read nothing quantized says so") {
  auto rows = sample_rows();
  rows[5].labels["status"] = "not quantized";
  rows[4].labels["status"] = "not quantized";
  CHECK_THAT(text_report(rows), Catch::Contains("not quantized"));
  CHECK(text_report(rows).find("one window") == std::string::npos);
  rows[0].labels["se_method"] = "rows";
  CHECK_THAT(text_report(rows), Catch::Contains("one window"));
}

TEST_CASE("simulation tables: worst of the last arm first") {
  std::vector<ResultRow> rows{simulated("naive", "layer 0 head 0", 0.5),
                              simulated("naive", "layer 1 head 0", 0.9),
                              simulated("oscar", "layer 0 head 0", 0.02),
                              simulated("oscar", "layer 1 head 0", 0.01),
                              simulated("naive", "all", 0.7),
                              simulated("oscar", "all", 0.015)};
  const std::string worst = simulate_table(rows, 0).text();
  CHECK(worst.find("layer 0 head 0") < worst.find("layer 1 head 0"));
  CHECK(simulate_table(rows, 1).num_rows() == 1);
  CHECK_THAT(simulate_summary_table(rows).text(), Catch::Contains("70.0 ± 7.0"));
  CHECK(simulate_summary_table(sample_rows()).num_rows() == 0);
  CHECK(simulate_table(sample_rows(), 0).num_rows() == 0);
}

TEST_CASE("the page is self-contained and its plots have one dot an arm") {
  auto rows = sample_rows();
  rows[0].labels["command"] = "oscar compare --text <novel>";
  const std::string html = html_report(rows, "demo <1>");
  CHECK_THAT(html, Catch::StartsWith("<!doctype html>") && Catch::Contains("demo &lt;1&gt;") &&
                       Catch::Contains("<svg") && Catch::Contains("--text &lt;novel&gt;"));
  for (const char* external : {"http://", "https://", "<script", "<link", "src="}) {
    CHECK(html.find(external) == std::string::npos);
  }
  CHECK_THROWS_AS(html_report({}, "x"), Error);
}

TEST_CASE("dot plots place values in order and survive odd input") {
  const std::string svg = dot_plot_svg(
      "KL", {{"a", 0.1, 0.09, 0.11}, {"b", 0.001, -1, 0.002}, {"zero", 0, 0, 0}}, true);
  CHECK(std::count(svg.begin(), svg.end(), '\n') > 3);
  CHECK_THAT(svg, Catch::Contains(">a</text>") && Catch::Contains(">b</text>"));
  CHECK(svg.find(">zero</text>") == std::string::npos);
  CHECK(svg.find("n/a") == std::string::npos);
  CHECK(dot_plot_svg("x", {{"a", 0, 0, 0}}, true).empty());
  CHECK(dot_plot_svg("x", {{"a", kInfinity, 0, 0}}, false).empty());
  const std::string flat = dot_plot_svg("x", {{"a", 2, 2, 2}}, false);
  CHECK_THAT(flat, Catch::Contains("<circle"));
  CHECK(flat.find("n/a") == std::string::npos);
}
