// Everything that one layer's activations leave behind for the fit of its recipes, collected in one
// pass or read from moments files.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "calib/attention_metrics.h"
#include "calib/contest.h"
#include "calib/held_out.h"
#include "calib/output_projection.h"
#include "calib/statistics.h"
#include "io/moments_file.h"

namespace oscar {

// What was not collected is empty; the fit names it when a recipe needs it.
struct LayerMoments {
  LayerStatistics calibration;
  std::vector<GramSum> held_out_queries;  // [Hkv]; counts 0 without held-out tokens
  LayerMetrics metrics;
  std::shared_ptr<const OutputEnergy> energy;  // of every query head; may be null
  std::vector<GramSum> proxy;                  // [Hkv], count = sum of the weights
  std::optional<HeldOutSample> held_out;
  std::optional<ContestData> contest;
};

// The stored form; the rows behind the sums (rows_k, rows_v) are the caller's.
MomentsLayer to_moments(const LayerMoments& layer);
// windows: sink and recent of the file; rope: of its positions, may be null. Bits of the sums are
// kept.
LayerMoments from_moments(const MomentsLayer& moments, const HeadGeometry& geometry,
                          const ContestOptions& windows,
                          std::shared_ptr<const RopeTable> rope = nullptr);

}  // namespace oscar
