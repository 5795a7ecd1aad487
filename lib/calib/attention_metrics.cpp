#include "calib/attention_metrics.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/parallel.h"
#include "calib/metric_tile.h"
#include "linalg/blas.h"

namespace oscar {
namespace {

// max(0, a2 - 2 a1 W o^T + a0 o W o^T), given W o^T.
double output_weight(double a0, const double* a1, double a2, const float* o, const double* w_o,
                     size_t dim) {
  double cross = 0.0, own = 0.0;
  for (size_t i = 0; i < dim; ++i) {
    cross += a1[i] * w_o[i];
    own += static_cast<double>(o[i]) * w_o[i];
  }
  return std::max(0.0, a2 - 2.0 * cross + a0 * own);
}

// W o^T of query head `head` for tokens [first, first + count), [count, D].
std::vector<double> projected_outputs(const LayerActivations& a, const HeadGeometry& geometry,
                                      const TensorD& energy, size_t head, size_t first,
                                      size_t count) {
  const size_t dim = geometry.head_dim;
  std::vector<double> outputs(count * dim), projected(count * dim);
  for (size_t i = 0; i < count; ++i) {
    const float* o = a.o + ((first + i) * geometry.num_heads + head) * dim;
    for (size_t d = 0; d < dim; ++d) outputs[i * dim + d] = static_cast<double>(o[d]);
  }
  blas::multiply(outputs.data(), energy.data(), count, dim, dim, projected.data());
  return projected;
}

// The weights in double, the softmax included: slow, for comparisons.
void exact_weights(const LayerActivations& a, const HeadGeometry& geometry,
                   const MetricOptions& options, const OutputEnergy* energy, size_t kv_head,
                   size_t t, double* logit, double* output) {
  const size_t dim = geometry.head_dim, group = geometry.group_size();
  const size_t stride = geometry.num_kv_heads * dim;
  const size_t end = options.sink + visible_keys(options, t);
  std::vector<double> p(t + 1), value(dim);
  for (size_t g = 0; g < group; ++g) {
    const size_t h = kv_head * group + g;
    const float* q = a.q + (t * geometry.num_heads + h) * dim;
    double largest = -HUGE_VAL, total = 0.0;
    for (size_t j = 0; j <= t; ++j) {
      const float* k = a.k + j * stride + kv_head * dim;
      double score = 0.0;
      for (size_t d = 0; d < dim; ++d)
        score += static_cast<double>(q[d]) * static_cast<double>(k[d]);
      p[j] = score / std::sqrt(static_cast<double>(dim));
      largest = std::max(largest, p[j]);
    }
    for (double& weight : p) total += weight = std::exp(weight - largest);
    std::vector<double> a1(dim, 0.0);
    double a0 = 0.0, a2 = 0.0;
    for (size_t j = options.sink; j < end; ++j) {
      const double square = p[j] / total * (p[j] / total);
      a0 += square;
      if (!options.output) continue;
      const float* v = a.v + j * stride + kv_head * dim;
      double form = 0.0;
      for (size_t d = 0; d < dim; ++d) value[d] = static_cast<double>(v[d]);
      for (size_t i = 0; i < dim; ++i)
        for (size_t d = 0; d < dim; ++d)
          form += value[i] * (*energy)[h].values[i * dim + d] * value[d];
      for (size_t d = 0; d < dim; ++d) a1[d] += square * value[d];
      a2 += square * form;
    }
    logit[g] = a0;
    if (options.output)
      output[g] = output_weight(a0, a1.data(), a2, a.o + (t * geometry.num_heads + h) * dim,
                                projected_outputs(a, geometry, (*energy)[h], h, t, 1).data(), dim);
  }
}

}  // namespace

MetricWeights metric_weights(const LayerActivations& activations, const HeadGeometry& geometry,
                             const MetricOptions& options, const OutputEnergy* energy,
                             size_t kv_head, size_t begin, size_t end) {
  const size_t group = geometry.group_size();
  MetricWeights weights;
  weights.logit.resize((end - begin) * group, 0.0);
  if (options.output) weights.output.resize(weights.logit.size(), 0.0);
  const size_t first = std::max(begin, options.sink + options.recent);
  if (first >= end) return weights;
  const auto at = [&](std::vector<double>& values, size_t t) {
    return values.empty() ? nullptr : values.data() + (t - begin) * group;
  };
  if (options.in_double) {
    parallel_for(end - first, [&](size_t i) {
      exact_weights(activations, geometry, options, energy, kv_head, first + i,
                    at(weights.logit, first + i), at(weights.output, first + i));
    });
    return weights;
  }
  thread_local MetricHead head;
  head.prepare(activations, geometry, options, energy, kv_head, end);
  const MetricHead& prepared = head;  // thread_local names differ between threads
  const size_t num_tiles = (end - first + kMetricTileTokens - 1) / kMetricTileTokens;
  parallel_for(num_tiles, [&](size_t item) {
    const size_t t = first + (num_tiles - 1 - item) * kMetricTileTokens;  // the longest rows first
    metric_tile(activations, geometry, options, prepared, t, std::min(kMetricTileTokens, end - t),
                at(weights.logit, t), at(weights.output, t));
  });
  return weights;
}

LayerMetrics::LayerMetrics(const HeadGeometry& geometry, const MetricOptions& options,
                           std::shared_ptr<const OutputEnergy> energy)
    : geometry_(geometry), options_(options), energy_(std::move(energy)) {
  OSCAR_CHECK(!options.output || (energy_ != nullptr && energy_->size() == geometry.num_heads),
              "the output metric needs the output projection of every query head");
  if (options.logit) logit_.assign(geometry.num_kv_heads, GramSum(geometry.head_dim));
  if (options.output) output_.assign(geometry.num_kv_heads, GramSum(geometry.head_dim));
}

void LayerMetrics::add(const LayerActivations& activations, size_t begin, size_t end) {
  OSCAR_CHECK(activations.first_position == 0, "attention metrics need whole sequences");
  OSCAR_CHECK(activations.lse != nullptr || options_.in_double, "layer ", activations.layer,
              ": attention metrics need the log-sum-exp of the scores");
  OSCAR_CHECK(!options_.output || activations.o != nullptr, "layer ", activations.layer,
              ": the output metric needs attention outputs");
  const size_t first = std::max(begin, options_.sink + options_.recent);
  if (first >= end) return;
  std::vector<MetricWeights> weights;
  for (size_t h = 0; h < geometry_.num_kv_heads; ++h)
    weights.push_back(
        metric_weights(activations, geometry_, options_, energy_.get(), h, first, end));
  parallel_for(2 * geometry_.num_kv_heads, [&](size_t item) {
    const size_t h = item / 2;
    const RowBlock rows = group_rows(geometry_, activations.q, h, first, end);
    if (item % 2 == 0 && options_.logit) logit_[h].add(rows, weights[h].logit.data());
    if (item % 2 == 1 && options_.output) output_[h].add(rows, weights[h].output.data());
  });
  rows_ += static_cast<double>((end - first) * geometry_.group_size());
}

void LayerMetrics::merge(const LayerMetrics& other) {
  OSCAR_CHECK(logit_.size() == other.logit_.size() && output_.size() == other.output_.size(),
              "cannot merge attention metrics of different kinds");
  for (size_t h = 0; h < logit_.size(); ++h) logit_[h].merge(other.logit_[h]);
  for (size_t h = 0; h < output_.size(); ++h) output_[h].merge(other.output_[h]);
  rows_ += other.rows_;
}

LayerMetrics LayerMetrics::from(const HeadGeometry& geometry, const MetricOptions& options,
                                std::vector<GramSum> logit, std::vector<GramSum> output) {
  LayerMetrics metrics;
  metrics.geometry_ = geometry;
  metrics.options_ = options;
  metrics.options_.logit = !logit.empty();
  metrics.options_.output = !output.empty();
  if (!logit.empty()) metrics.rows_ = logit[0].count();
  if (!output.empty()) metrics.rows_ = output[0].count();
  metrics.logit_ = std::move(logit);
  metrics.output_ = std::move(output);
  return metrics;
}

void LayerMetrics::restore(const LayerMetrics& stored) {
  if (stored.rows_ == 0.0) return;
  OSCAR_CHECK(logit_.size() == stored.logit_.size() && output_.size() == stored.output_.size(),
              "stored attention metrics are of other kinds than those asked for");
  logit_ = stored.logit_;
  output_ = stored.output_;
  rows_ = stored.rows_;
}

TensorD LayerMetrics::logit_metric(size_t kv_head) const { return logit_.at(kv_head).mean(); }
TensorD LayerMetrics::output_metric(size_t kv_head) const { return output_.at(kv_head).mean(); }

}  // namespace oscar
