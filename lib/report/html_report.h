// One self-contained HTML page from result rows: tables and dot plots with error bars as inline
// SVG, no external assets.
#pragma once

#include <string>
#include <vector>

#include "io/results.h"

namespace oscar {

// Throws Error when there is no row, or when rows of one cell must not stand together.
std::string html_report(const std::vector<ResultRow>& rows, const std::string& title);

// A dot with an error bar for each arm.
struct PlotPoint {
  std::string label;
  double value = 0;
  double lo = 0, hi = 0;  // ends of the error bar
};
// logarithmic: points with value <= 0 are left out. Empty text when no point is left.
std::string dot_plot_svg(const std::string& title, const std::vector<PlotPoint>& points,
                         bool logarithmic);

}  // namespace oscar
