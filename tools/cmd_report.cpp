#include "tools/cmd_report.h"

#include <fmt/format.h>

#include <memory>
#include <string>
#include <vector>

#include "io/atomic_file.h"
#include "io/results.h"
#include "report/arms_report.h"
#include "report/html_report.h"
#include "report/simulate_report.h"
#include "tools/commands.h"
#include "tools/output_check.h"

namespace oscar {
void run_report(const ReportOptions& options) {
  check_output(options.out, options.inputs);
  std::vector<ResultRow> rows;
  for (const std::string& path : options.inputs) {
    for (ResultRow& row : read_rows(path)) rows.push_back(std::move(row));
  }
  if (options.out.empty()) {
    const std::string text = options.markdown ? markdown_report(rows, {}) : text_report(rows);
    fmt::print("{}", text);
    const Table simulation = simulate_summary_table(rows);
    if (simulation.num_rows() > 0) {
      fmt::print("{}", options.markdown ? simulation.markdown() : simulation.text());
    }
    return;
  }
  const std::string text =
      options.markdown ? markdown_report(rows, {}) : html_report(rows, options.title);
  write_file_atomically(options.out, text);
  fmt::print("{}\n", options.out);
}

void add_report(CLI::App& app) {
  auto options = std::make_shared<ReportOptions>();
  CLI::App* command =
      app.add_subcommand("report", "tables and plots of rows files as one HTML page or as text");
  command->add_option("rows", options->inputs, "rows files (.jsonl)")->required();
  command->add_option("--out", options->out, "page to write (default: tables on the terminal)");
  command->add_option("--title", options->title, "title of the page")->capture_default_str();
  command->add_flag("--markdown", options->markdown, "Markdown instead of HTML or text");
  command->footer("Example:\n  oscar report compare.jsonl simulate.jsonl --out report.html");
  command->callback([options] { run_report(*options); });
}

}  // namespace oscar
