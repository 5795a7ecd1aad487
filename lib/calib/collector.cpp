#include "calib/collector.h"

#include <algorithm>

#include "base/error.h"
#include "base/parallel.h"
#include "calib/gates.h"

namespace oscar {
namespace {

constexpr size_t kDuplicateCheckTokens = 256;

}  // namespace

Collector::Collector(const ActivationSource& source, const std::vector<size_t>& layers,
                     const StatisticsOptions& options, const MetricOptions& metric_options,
                     const Energies& energies, size_t held_out_from)
    : geometry_(source.geometry()),
      offsets_(source.sequence_offsets()),
      split_(held_out_from),
      with_metrics_(metric_options.logit || metric_options.output) {
  for (const size_t layer : layers) {
    LayerMoments& moments = layers_[layer];
    moments.calibration = LayerStatistics(geometry_, options);
    moments.held_out_queries.assign(geometry_.num_kv_heads, GramSum(geometry_.head_dim));
    const auto energy = energies.find(layer);
    if (energy != energies.end()) moments.energy = energy->second;
    if (with_metrics_) moments.metrics = LayerMetrics(geometry_, metric_options, moments.energy);
  }
}

void Collector::on_layer(const LayerActivations& activations) {
  const size_t begin = offsets_[activations.sequence];
  const size_t end = begin + activations.num_tokens;
  OSCAR_CHECK(activations.first_position == 0 && end == offsets_[activations.sequence + 1],
              "calibration needs whole sequences");
  if (activations.sequence == 0) check_heads(activations);
  LayerMoments& moments = layers_.at(activations.layer);
  const size_t split = std::clamp(split_, begin, end) - begin;
  if (split > 0) {
    moments.calibration.add(activations, 0, split);
    if (with_metrics_) moments.metrics.add(activations, 0, split);
  }
  if (split < activations.num_tokens)
    parallel_for(geometry_.num_kv_heads, [&](size_t h) {
      moments.held_out_queries[h].add(
          group_rows(geometry_, activations.q, h, split, activations.num_tokens));
    });
}

void Collector::restore(size_t layer, const MomentsLayer& stored, const ContestOptions& windows) {
  const LayerMoments found =
      from_moments(stored, geometry_, windows, layers_.at(layer).calibration.shared_rope());
  LayerMoments& moments = layers_.at(layer);
  for (size_t h = 0; h < geometry_.num_kv_heads; ++h)
    moments.calibration.head(h) = found.calibration.head(h);
  if (moments.calibration.rope() != nullptr)
    moments.calibration.restore_rope_rows(found.calibration.rope_rows());
  moments.held_out_queries = found.held_out_queries;
  moments.metrics.restore(found.metrics);
}

void Collector::check_heads(const LayerActivations& activations) const {
  const size_t tokens = std::min(activations.num_tokens, kDuplicateCheckTokens);
  const size_t dim = geometry_.head_dim;
  check_duplicate_heads(activations.layer, "q", activations.q, tokens, geometry_.num_heads, dim);
  check_duplicate_heads(activations.layer, "k", activations.k, tokens, geometry_.num_kv_heads, dim);
  check_duplicate_heads(activations.layer, "v", activations.v, tokens, geometry_.num_kv_heads, dim);
}

}  // namespace oscar
