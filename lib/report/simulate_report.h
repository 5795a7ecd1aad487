// Tables of simulated quantization errors: arms at a glance, and the worst layers.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "io/results.h"
#include "report/table.h"

namespace oscar {

// One line an arm: mean over layers and heads. No rows when there is no simulation among `rows`.
Table simulate_summary_table(const std::vector<ResultRow>& rows);
// One line a layer and head, all arms side by side; the lines where the last arm does worst first;
// at most `limit` lines (0 = all).
Table simulate_table(const std::vector<ResultRow>& rows, size_t limit);

}  // namespace oscar
