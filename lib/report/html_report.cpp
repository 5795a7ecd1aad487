#include "report/html_report.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "report/arms_report.h"
#include "report/simulate_report.h"
#include "report/table.h"

namespace oscar {
namespace {

constexpr const char* kStyle =
    "body{font:15px/1.45 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;"
    "color:#222;background:#fff}table{border-collapse:collapse;margin:1rem 0;font-size:13px}"
    "th,td{padding:.25rem .6rem;border-bottom:1px solid #ddd;text-align:left;white-space:nowrap}"
    ".n{text-align:right;font-variant-numeric:tabular-nums}h1{font-size:1.5rem}"
    "h2{font-size:1.15rem;margin-top:2rem}.scroll{overflow-x:auto}svg{margin:.5rem 1rem .5rem 0}"
    "footer{color:#777;font-size:12px;margin-top:2rem}";

struct Axis {
  double lo = 0, hi = 1;
  bool logarithmic = false;
  double left = 0, width = 1;  // pixels
  double place(double value) const {
    const double position =
        logarithmic ? (std::log10(value) - std::log10(lo)) / (std::log10(hi) - std::log10(lo))
                    : (value - lo) / (hi - lo);
    return left + width * std::clamp(position, 0.0, 1.0);
  }
};

std::vector<double> ticks(const Axis& axis) {
  std::vector<double> values;
  if (axis.logarithmic) {
    for (double power = std::floor(std::log10(axis.lo)); power <= std::ceil(std::log10(axis.hi));
         power += 1) {
      const double value = std::pow(10.0, power);
      if (value >= axis.lo * 0.999 && value <= axis.hi * 1.001) values.push_back(value);
    }
    return values;
  }
  const double rough = (axis.hi - axis.lo) / 5;
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  const double unit = rough / power < 1.5   ? 1
                      : rough / power < 3.5 ? 2
                      : rough / power < 7.5 ? 5
                                            : 10;
  const double step = unit * power;
  for (double value = std::ceil(axis.lo / step) * step; value <= axis.hi + step * 1e-9;
       value += step) {
    values.push_back(std::abs(value) < step * 1e-6 ? 0 : value);
  }
  return values;
}

Axis fit_axis(const std::vector<PlotPoint>& points, bool logarithmic) {
  Axis axis;
  axis.logarithmic = logarithmic;
  axis.lo = axis.hi = points[0].value;
  for (const PlotPoint& point : points) {
    // On a logarithmic axis a bar that reaches 0 is cut at a tenth of its value.
    const double lo = logarithmic ? std::max(point.lo, point.value / 10) : point.lo;
    axis.lo = std::min({axis.lo, point.value, lo});
    axis.hi = std::max({axis.hi, point.value, point.hi});
  }
  if (logarithmic) {
    axis.lo = std::pow(10.0, std::floor(std::log10(axis.lo)));
    axis.hi = std::pow(10.0, std::ceil(std::log10(axis.hi) + 1e-9));
    if (axis.hi <= axis.lo) axis.hi = axis.lo * 10;
  } else {
    const double span = axis.hi > axis.lo ? axis.hi - axis.lo : std::max(1e-9, std::abs(axis.hi));
    axis.lo -= 0.05 * span;
    axis.hi += 0.05 * span;
  }
  return axis;
}

std::string px(double value) { return format_fixed(value, 1); }

std::vector<PlotPoint> points_of(const CellRows& cell, const std::string& metric) {
  std::vector<PlotPoint> points;
  for (const std::string& arm : cell.arms) {
    const ResultRow* row = cell.find(arm, metric);
    if (row == nullptr || row->n < 1 || !std::isfinite(row->value)) continue;
    PlotPoint point{arm, row->value, row->value - 1.96 * row->se, row->value + 1.96 * row->se};
    if (!row->ci_method.empty()) {
      point.lo = row->ci_lo;
      point.hi = row->ci_hi;
    }
    points.push_back(point);
  }
  return points;
}

std::string cell_section(const std::vector<CellRows>& cells, const CellRows& cell) {
  std::string html = cat("<h2>", escape_html(cell.cell), "</h2>\n<div class=\"scroll\">",
                         arms_table(cell).html(), "</div>\n");
  html += dot_plot_svg("KL to the reference (nats per token), 95 % intervals",
                       points_of(cell, "kl"), true);
  html += dot_plot_svg("Δ ln PPL against the reference, 95 % intervals",
                       points_of(cell, "ln_ppl_ratio"), false);
  html += dot_plot_svg("same most likely token (share)", points_of(cell, "top1"), false);
  html += dot_plot_svg("margin of the right value in kv-lookup (nats), 95 % intervals",
                       points_of(cell, "kv_margin"), false);
  const Table differences = difference_table(cell);
  if (differences.num_rows() > 0) html += differences.html();
  const Table buckets = bucket_table(cells, cell.cell);
  if (buckets.num_rows() > 0) html += cat("<div class=\"scroll\">", buckets.html(), "</div>\n");
  return html;
}

std::string origin(const std::vector<ResultRow>& rows) {
  std::vector<std::string> lines;
  for (const ResultRow& row : rows) {
    std::string line;
    for (const char* name : {"model", "model_sha256", "data_sha256", "tool", "device", "command"}) {
      const auto found = row.labels.find(name);
      if (found != row.labels.end())
        line += cat(line.empty() ? "" : " · ", name, " ", found->second);
    }
    if (std::find(lines.begin(), lines.end(), line) == lines.end()) lines.push_back(line);
  }
  std::string html = "<footer>";
  for (const std::string& line : lines) html += cat("<p>", escape_html(line), "</p>");
  return html + "</footer>\n";
}

}  // namespace

std::string dot_plot_svg(const std::string& title, const std::vector<PlotPoint>& points,
                         bool logarithmic) {
  std::vector<PlotPoint> shown;
  for (const PlotPoint& point : points) {
    if (std::isfinite(point.value) && (!logarithmic || point.value > 0)) shown.push_back(point);
  }
  if (shown.empty()) return "";
  constexpr double kRow = 20, kTop = 28, kLeft = 150, kWidth = 360, kRight = 24;
  Axis axis = fit_axis(shown, logarithmic);
  axis.left = kLeft;
  axis.width = kWidth;
  const double bottom = kTop + kRow * static_cast<double>(shown.size());
  std::string svg =
      cat("<svg width=\"", px(kLeft + kWidth + kRight), "\" height=\"", px(bottom + 24),
          "\" role=\"img\" font-size=\"12\" font-family=\"system-ui,sans-serif\"><title>",
          escape_html(title), "</title><text x=\"4\" y=\"16\" font-weight=\"600\">",
          escape_html(title), "</text>\n");
  for (const double tick : ticks(axis)) {
    const std::string x = px(axis.place(tick));
    svg += cat("<line x1=\"", x, "\" x2=\"", x, "\" y1=\"", px(kTop), "\" y2=\"", px(bottom),
               "\" stroke=\"#ddd\"/><text x=\"", x, "\" y=\"", px(bottom + 16),
               "\" text-anchor=\"middle\" fill=\"#555\">", format_number(tick, 3), "</text>\n");
  }
  for (size_t i = 0; i < shown.size(); ++i) {
    const PlotPoint& point = shown[i];
    const std::string y = px(kTop + kRow * (static_cast<double>(i) + 0.5));
    const double lo = logarithmic ? std::max(point.lo, axis.lo) : point.lo;
    svg +=
        cat("<text x=\"", px(kLeft - 8), "\" y=\"", y,
            "\" text-anchor=\"end\" dominant-baseline=\"middle\">", escape_html(point.label),
            "</text><line x1=\"", px(axis.place(lo)), "\" x2=\"", px(axis.place(point.hi)),
            "\" y1=\"", y, "\" y2=\"", y, "\" stroke=\"#1f6f8b\" stroke-width=\"2\"/><circle cx=\"",
            px(axis.place(point.value)), "\" cy=\"", y, "\" r=\"4\" fill=\"#1f6f8b\"><title>",
            escape_html(point.label), ": ", format_number(point.value), "</title></circle>\n");
  }
  return svg + "</svg>\n";
}

std::string html_report(const std::vector<ResultRow>& rows, const std::string& title) {
  OSCAR_CHECK(!rows.empty(), "report: there is no row");
  std::string html =
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width\"><title>" +
      escape_html(title) + "</title><style>" + kStyle + "</style></head><body>\n<h1>" +
      escape_html(title) + "</h1>\n";
  const std::vector<CellRows> cells = split_cells(rows);
  for (const CellRows& cell : cells) {
    if (is_bucket(cell.cell)) continue;
    check_mergeable(cell);
    html += cell_section(cells, cell);
  }
  const Table worst = simulate_table(rows, 20);
  if (worst.num_rows() > 0) {
    html += "<h2>Simulation, worst layers first</h2>\n<div class=\"scroll\">" + worst.html() +
            "</div>\n";
  }
  return html + origin(rows) + "</body></html>\n";
}

}  // namespace oscar
