// report: tables and plots of rows files.
#pragma once

#include <string>
#include <vector>

namespace oscar {

struct ReportOptions {
  std::vector<std::string> inputs;  // rows files
  std::string out = "";             // page to write; empty = tables on stdout
  std::string title = "oscar: cache arms compared";
  bool markdown = false;  // instead of HTML (with out) or text (without)
};

void run_report(const ReportOptions& options);

}  // namespace oscar
