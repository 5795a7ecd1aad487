// Errors of arms on captured activations, layer by layer and head by head, without running the
// model.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/progress.h"
#include "eval/simulate_head.h"
#include "io/capture_file.h"
#include "io/results.h"
#include "model/config.h"

namespace oscar {

struct SimulateOptions {
  size_t query_stride = 8;   // every so many queries of a sequence
  size_t first_query = 0;    // first position whose query is used; 0 = middle of the sequence, at
                             // least 64 behind the widest windows
  size_t max_sequences = 0;  // 0 = all of the capture
  std::vector<int64_t> layers = {};                // empty = all of the capture
  std::map<std::string, std::string> labels = {};  // for every row
};

// Geometry of the captured model, as far as arms need it.
ModelConfig config_of(const CaptureInfo& info);

// One row for every arm, layer and KV head (metric "output_error": squared error of the attention
// output over its square; further errors in `numbers`), and one for every arm over all of them
// (cell "all"). Throws Error when the capture has no sequence that is longer than the first query,
// a layer is missing, or an arm has too few layers; names layer, tensor and head when a captured
// value is not finite.
std::vector<ResultRow> simulate(const CaptureReader& capture,
                                const std::vector<std::shared_ptr<const KvArm>>& arms,
                                const SimulateOptions& options, const Progress& progress);

}  // namespace oscar
