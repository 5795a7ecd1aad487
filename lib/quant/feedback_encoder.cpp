// The feedback encoder (best_recipe step 5): start range, multipliers, error feedback, sweeps and
// refits, chosen by e A e^T.
#include <cmath>
#include <limits>

#include "quant/clip.h"
#include "quant/codec_impl.h"

namespace oscar {
namespace {

constexpr float kGridFractions[6] = {0.44F, 0.54F, 0.64F, 0.74F, 0.86F, 1.0F};
constexpr int kGridSize = 36;

CandidateArgs candidate_args(const RowEncoder& encoder, RowBatch& batch, size_t first,
                             int num_candidates) {
  const auto lanes = static_cast<size_t>(encoder.kernels->lanes);
  return {.x = batch.x.data(),
          .l_panels = encoder.panels.l.data(),
          .a_panels = encoder.panels.a.data(),
          .pivot = encoder.metric->pivot.data(),
          .a_diag = encoder.panels.a_diag.data(),
          .scale = batch.candidate_scale.data() + first * lanes,
          .low = batch.candidate_low.data() + first * lanes,
          .head_dim = encoder.spec.head_dim,
          .max_code = encoder.rule.max_code,
          .num_candidates = num_candidates,
          .sweeps = 0,
          .feedback = false,
          .error = batch.error.data(),
          .trial = batch.trial.data(),
          .best_cost = batch.best_cost.data(),
          .best_index = batch.best_index.data(),
          .first_index = static_cast<int>(first),
          .codes = nullptr};
}

void reset_best(RowBatch& batch) {
  batch.best_cost.assign(batch.best_cost.size(), std::numeric_limits<float>::infinity());
  batch.best_index.assign(batch.best_index.size(), -1);
}

// Cheap start: the row clipped at an order statistic. Fills batch.scale and batch.low, [lanes].
void start_from_clip(const RowEncoder& encoder, RowBatch& batch) {
  const CodecSpec& spec = encoder.spec;
  const int k = spec.head_dim - clip_index(spec.feedback.start_clip, spec.head_dim);
  encoder.kernels->kth_largest(batch.x.data(), spec.head_dim, k, batch.threshold.data());
  encoder.kernels->min_max(batch.x.data(), batch.threshold.data(), spec.head_dim, spec.head_dim,
                           batch.minimum.data(), batch.maximum.data());
  const auto steps = static_cast<float>(encoder.rule.max_code);
  for (size_t lane = 0; lane < batch.scale.size(); ++lane) {
    batch.scale[lane] = (batch.maximum[lane] - batch.minimum[lane]) / steps;
    batch.low[lane] = batch.minimum[lane];
  }
}

// Full start: the cheapest of 6 x 6 ranges around the mean, plain rounding, in the metric.
void start_from_grid(const RowEncoder& encoder, RowBatch& batch) {
  const CodecSpec& spec = encoder.spec;
  const auto lanes = static_cast<size_t>(encoder.kernels->lanes);
  const auto steps = static_cast<float>(encoder.rule.max_code);
  std::vector<float>& mean = batch.threshold;
  encoder.kernels->mean(batch.x.data(), spec.head_dim, mean.data());
  encoder.kernels->min_max(batch.x.data(), nullptr, spec.head_dim, spec.head_dim,
                           batch.minimum.data(), batch.maximum.data());
  for (size_t i = 0; i < kGridSize; ++i) {
    for (size_t lane = 0; lane < lanes; ++lane) {
      const float low = mean[lane] + kGridFractions[i / 6] * (batch.minimum[lane] - mean[lane]);
      const float high = mean[lane] + kGridFractions[i % 6] * (batch.maximum[lane] - mean[lane]);
      batch.candidate_scale[i * lanes + lane] = (high - low) / steps;
      batch.candidate_low[i * lanes + lane] = low;
    }
  }
  reset_best(batch);
  encoder.kernels->try_candidates(candidate_args(encoder, batch, 0, kGridSize));
  for (size_t lane = 0; lane < lanes; ++lane) {
    const int index = batch.best_index[lane] < 0 ? kGridSize - 1 : batch.best_index[lane];
    const size_t best = static_cast<size_t>(index) * lanes + lane;
    // The mean of a constant row is rounded: its range must not become the rounding error.
    const bool constant = batch.minimum[lane] == batch.maximum[lane];
    batch.scale[lane] = constant ? 0.0F : batch.candidate_scale[best];
    batch.low[lane] = constant ? batch.minimum[lane] : batch.candidate_low[best];
  }
}

// Candidates `first` .. of this round: multiples of batch.scale about the middle of the range, as
// they will be stored. A scale that the type rounds to 0 stands for a constant row at the middle.
void make_candidates(const RowEncoder& encoder, RowBatch& batch, size_t first) {
  const auto lanes = static_cast<size_t>(encoder.kernels->lanes);
  const float half = 0.5F * static_cast<float>(encoder.rule.max_code);
  const std::vector<double>& multipliers = encoder.spec.feedback.multipliers;
  float* scale = batch.candidate_scale.data() + first * lanes;
  float* low = batch.candidate_low.data() + first * lanes;
  const size_t count = multipliers.size() * lanes;
  for (size_t i = 0; i < count; ++i)
    scale[i] = static_cast<float>(multipliers[i / lanes]) * batch.scale[i % lanes];
  if (!encoder.rule.has_zero) {  // fp16 pair
    encoder.kernels->round_fp16(scale, static_cast<int>(count));
    for (size_t i = 0; i < count; ++i)
      low[i] = batch.low[i % lanes] + half * (batch.scale[i % lanes] - scale[i]);
    encoder.kernels->round_fp16(low, static_cast<int>(count));
    for (size_t i = 0; i < count; ++i) {
      batch.candidate_pairs[first * lanes + i].scale = scale[i];
      batch.candidate_pairs[first * lanes + i].second = low[i];
    }
    return;
  }
  for (size_t i = 0; i < count; ++i) {
    const float middle = batch.low[i % lanes] + half * batch.scale[i % lanes];
    StoredPair pair;
    if (encoder.rule.format == MetaFormat::kLog8) {
      pair = round_pair(encoder.rule, scale[i], middle - half * scale[i], true);
    } else {
      const float stored = round_values(encoder.rule, scale[i], 0.0F).scale;
      pair = round_pair(encoder.rule, stored, middle - half * stored, true);
      if (!usable(pair) && std::isfinite(stored)) {
        pair = constant_pair(encoder.rule, middle);
        scale[i] = 0.0F;
        low[i] = low_of(encoder.rule, pair);
        pair.scale = 0.0F;
        batch.candidate_pairs[first * lanes + i] = pair;
        continue;
      }
    }
    batch.candidate_pairs[first * lanes + i] = pair;
    scale[i] = pair.scale;
    low[i] = low_of(encoder.rule, pair);
  }
}

// Least-squares (scale, low) in the metric for the best codes so far; lanes whose system is
// singular keep their best pair.
void refit(const RowEncoder& encoder, RowBatch& batch) {
  const auto lanes = static_cast<size_t>(encoder.kernels->lanes);
  const auto size = static_cast<size_t>(encoder.spec.head_dim);
  for (size_t i = 0; i < size * lanes; ++i) batch.y[i] = static_cast<float>(batch.codes[i]);
  encoder.kernels->metric_products({.x = batch.x.data(),
                                    .y = batch.y.data(),
                                    .l_panels = encoder.panels.l.data(),
                                    .pivot = encoder.metric->pivot.data(),
                                    .ones_l = encoder.panels.ones_l.data(),
                                    .head_dim = encoder.spec.head_dim,
                                    .xx = batch.products[0].data(),
                                    .xy = batch.products[1].data(),
                                    .yy = batch.products[2].data(),
                                    .x1 = batch.products[3].data(),
                                    .y1 = batch.products[4].data()});
  const double oo = encoder.panels.ones_norm;
  for (size_t lane = 0; lane < lanes; ++lane) {
    if (batch.best_index[lane] < 0) continue;
    const size_t best = static_cast<size_t>(batch.best_index[lane]) * lanes + lane;
    const double xy = static_cast<double>(batch.products[1][lane]);
    const double yy = static_cast<double>(batch.products[2][lane]);
    const double x1 = static_cast<double>(batch.products[3][lane]);
    const double y1 = static_cast<double>(batch.products[4][lane]);
    const double determinant = yy * oo - y1 * y1;
    const double scale = (xy * oo - x1 * y1) / determinant;
    const double low = (x1 * yy - xy * y1) / determinant;
    const bool sound =
        determinant > 1e-6 * yy * oo && scale > 0.0 && std::isfinite(scale) && std::isfinite(low);
    batch.scale[lane] = sound ? static_cast<float>(scale) : batch.candidate_scale[best];
    batch.low[lane] = sound ? static_cast<float>(low) : batch.candidate_low[best];
  }
}

// Takes the best candidate's pair of every row.
void take_best(const RowEncoder& encoder, RowBatch& batch) {
  const auto lanes = static_cast<size_t>(encoder.kernels->lanes);
  for (size_t lane = 0; lane < lanes; ++lane) {
    const bool real = lane < static_cast<size_t>(batch.count);
    if (batch.best_index[lane] < 0)
      fail_metadata_overflow(encoder, batch.first_row + lane, batch.minimum[lane],
                             batch.maximum[lane]);
    StoredPair pair =
        batch.candidate_pairs[static_cast<size_t>(batch.best_index[lane]) * lanes + lane];
    if (pair.scale == 0.0F) {
      pair.scale = 1.0F;
      if (real) ++batch.stats->meta_fallbacks;
    }
    if (real && pair.saturated) ++batch.stats->scale_saturated;
    batch.pairs[lane] = pair;
  }
}

}  // namespace

void encode_feedback(const RowEncoder& encoder, RowBatch& batch) {
  const FeedbackOptions& options = encoder.spec.feedback;
  options.start_grid ? start_from_grid(encoder, batch) : start_from_clip(encoder, batch);
  reset_best(batch);
  const size_t round_size = options.multipliers.size();
  for (size_t round = 0; round <= static_cast<size_t>(options.refits); ++round) {
    if (round > 0) refit(encoder, batch);
    make_candidates(encoder, batch, round * round_size);
    CandidateArgs args =
        candidate_args(encoder, batch, round * round_size, static_cast<int>(round_size));
    args.sweeps = options.sweeps;
    args.feedback = options.feedback;
    args.codes = batch.codes.data();
    encoder.kernels->try_candidates(args);
  }
  take_best(encoder, batch);
}

MetricPanels make_metric_panels(const EncoderMetric& metric) {
  const auto size = static_cast<size_t>(metric.head_dim);
  MetricPanels panels;
  panels.ones_l.assign(size, 0.0F);
  for (size_t begin = size; begin > 0; begin -= 4)
    for (size_t j = size; j-- > begin - 4;)
      for (size_t k = begin - 4; k < begin; ++k) panels.l.push_back(metric.l[j * size + k]);
  for (size_t begin = 0; begin < size; begin += 4)
    for (size_t j = 0; j < size; ++j)
      for (size_t k = begin; k < begin + 4; ++k) panels.a.push_back(metric.a[j * size + k]);
  for (size_t i = 0; i < size; ++i) {
    panels.a_diag.push_back(metric.a[i * size + i]);
    double sum = 0.0;
    for (size_t j = i; j < size; ++j) sum += static_cast<double>(metric.l[j * size + i]);
    panels.ones_l[i] = static_cast<float>(sum);
    panels.ones_norm += static_cast<double>(metric.pivot[i]) * sum * sum;
  }
  return panels;
}

}  // namespace oscar
