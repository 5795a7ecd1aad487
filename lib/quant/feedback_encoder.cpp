// The feedback encoder (best_recipe step 5): start range, multipliers, error feedback, sweeps and
// refits, chosen by e A e^T.
#include <algorithm>
#include <cmath>
#include <limits>

#include "quant/clip.h"
#include "quant/codec_impl.h"

namespace oscar {
namespace {

constexpr float kGridFractions[6] = {0.44F, 0.54F, 0.64F, 0.74F, 0.86F, 1.0F};
constexpr int kGridSize = 36;

// Candidates are dealt to the replicas of a row: number c is tried by replica c % replicas as its
// candidate c / replicas. Numbers past the end repeat the last one.
struct Deal {
  size_t lanes, period, replicas, total;
  size_t per_lane() const { return (total + replicas - 1) / replicas; }
  size_t number(size_t candidate, size_t lane) const {
    return std::min(candidate * replicas + lane / period, total - 1);
  }
  // fill(number, first slot of the candidate arrays, first lane) for every run of `period` lanes.
  template <class Fill>
  void for_each_run(const Fill& fill) const {
    for (size_t candidate = 0; candidate < per_lane(); ++candidate)
      for (size_t lane = 0; lane < lanes; lane += period)
        fill(number(candidate, lane), candidate * lanes + lane, lane);
  }
};

Deal deal(const RowEncoder& encoder, const RowBatch& batch, size_t total) {
  const auto lanes = static_cast<size_t>(encoder.kernels->lanes);
  const auto period = static_cast<size_t>(batch.period);
  return {lanes, period, lanes / period, total};
}

CandidateArgs candidate_args(const RowEncoder& encoder, RowBatch& batch, const Deal& dealt) {
  return {.x = batch.x.data(),
          .l_panels = encoder.panels.l.data(),
          .pivot = encoder.metric->pivot.data(),
          .scale = batch.candidate_scale.data(),
          .low = batch.candidate_low.data(),
          .head_dim = encoder.spec.head_dim,
          .max_code = encoder.rule.max_code,
          .num_candidates = static_cast<int>(dealt.per_lane()),
          .feedback = false,
          .error = batch.error.data(),
          .trial = batch.trial.data(),
          .best_cost = batch.best_cost.data(),
          .best_index = batch.best_index.data(),
          .codes = nullptr};
}

void reset_best(RowBatch& batch) {
  batch.best_cost.assign(batch.best_cost.size(), std::numeric_limits<float>::infinity());
}

// Lane with the cheapest new candidate of a row, dealt.lanes when no replica found a cheaper one.
// Of equal costs the lower number wins, so that the deal has no influence.
size_t cheapest_lane(const RowBatch& batch, const Deal& dealt, size_t row) {
  size_t winner = dealt.lanes, winner_number = 0;
  for (size_t lane = row; lane < dealt.lanes; lane += dealt.period) {
    if (batch.best_index[lane] < 0) continue;
    const size_t number = dealt.number(static_cast<size_t>(batch.best_index[lane]), lane);
    const bool cheaper = winner == dealt.lanes || batch.best_cost[lane] < batch.best_cost[winner];
    const bool tied = !cheaper && batch.best_cost[lane] == batch.best_cost[winner];
    if (cheaper || (tied && number < winner_number)) {
      winner = lane;
      winner_number = number;
    }
  }
  return winner;
}

// Lets `attempt` try what batch.candidate_* hold against the best so far and gives all replicas of
// a row the winner: cost, scale, low, and (when codes are wanted) stored pair and codes.
template <class Attempt>
void run_round(RowBatch& batch, const Deal& dealt, bool with_codes, const Attempt& attempt) {
  batch.best_index.assign(batch.best_index.size(), -1);
  attempt();
  for (size_t row = 0; row < dealt.period; ++row) {
    const size_t winner = cheapest_lane(batch, dealt, row);
    if (winner == dealt.lanes) continue;
    const size_t best = static_cast<size_t>(batch.best_index[winner]) * dealt.lanes + winner;
    for (size_t lane = row; lane < dealt.lanes; lane += dealt.period) {
      batch.best_cost[lane] = batch.best_cost[winner];
      batch.best_scale[lane] = batch.candidate_scale[best];
      batch.best_low[lane] = batch.candidate_low[best];
      if (!with_codes) continue;
      batch.pairs[lane] = batch.candidate_pairs[best];
      for (size_t first = 0; lane != winner && first < batch.codes.size(); first += dealt.lanes)
        batch.codes[first + lane] = batch.codes[first + winner];
    }
  }
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

// The candidates of a round: multiples of batch.scale about the middle of the range, as they will
// be stored. A scale of 0 stands for code 0 everywhere (constant rows).
void make_candidates(const RowEncoder& encoder, RowBatch& batch, const Deal& dealt,
                     const std::vector<double>& multipliers) {
  const float half = 0.5F * static_cast<float>(encoder.rule.max_code);
  float* scale = batch.candidate_scale.data();
  float* low = batch.candidate_low.data();
  dealt.for_each_run([&](size_t number, size_t slot, size_t first_lane) {
    const auto factor = static_cast<float>(multipliers[number]);
    for (size_t i = 0; i < dealt.period; ++i)
      scale[slot + i] = factor * batch.scale[first_lane + i];
  });
  const size_t count = dealt.per_lane() * dealt.lanes;
  if (!encoder.rule.has_zero) {  // fp16 pair
    encoder.kernels->round_fp16(scale, static_cast<int>(count));
    for (size_t first = 0; first < count; first += dealt.lanes)
      for (size_t lane = 0; lane < dealt.lanes; ++lane)
        low[first + lane] = batch.low[lane] + half * (batch.scale[lane] - scale[first + lane]);
    encoder.kernels->round_fp16(low, static_cast<int>(count));
    for (size_t i = 0; i < count; ++i) batch.candidate_pairs[i] = {scale[i], low[i], false};
    return;
  }
  for (size_t first = 0; first < count; first += dealt.lanes)
    for (size_t lane = 0; lane < dealt.lanes; ++lane) {
      const size_t i = first + lane;
      const StoredPair pair =
          centered_pair(encoder.rule, scale[i], batch.low[lane] + half * batch.scale[lane]);
      batch.candidate_pairs[i] = pair;
      scale[i] = pair.scale;
      // A point (scale 0) keeps its value in the zero as if the scale were 1.
      const bool point = pair.scale == 0.0F && !holds_constants(encoder.rule.format);
      low[i] = point ? -pair.second : low_of(encoder.rule, pair);
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
    const double xy = static_cast<double>(batch.products[1][lane]);
    const double yy = static_cast<double>(batch.products[2][lane]);
    const double x1 = static_cast<double>(batch.products[3][lane]);
    const double y1 = static_cast<double>(batch.products[4][lane]);
    const double determinant = yy * oo - y1 * y1;
    const double scale = (xy * oo - x1 * y1) / determinant;
    const double low = (x1 * yy - xy * y1) / determinant;
    const bool sound =
        determinant > 1e-6 * yy * oo && scale > 0.0 && std::isfinite(scale) && std::isfinite(low);
    batch.scale[lane] = sound ? static_cast<float>(scale) : batch.best_scale[lane];
    batch.low[lane] = sound ? static_cast<float>(low) : batch.best_low[lane];
  }
}

// Counts what the chosen pairs mean; a row without a finite cost does not fit the metadata.
void check_best(const RowEncoder& encoder, RowBatch& batch) {
  for (size_t lane = 0; lane < static_cast<size_t>(batch.count); ++lane) {
    if (!std::isfinite(batch.best_cost[lane]))
      fail_metadata_overflow(encoder, batch.first_row + lane, batch.minimum[lane],
                             batch.maximum[lane]);
    if (batch.pairs[lane].scale == 0.0F && !holds_constants(encoder.rule.format)) {
      batch.pairs[lane].scale = 1.0F;
      ++batch.stats->meta_fallbacks;
    }
    if (batch.pairs[lane].saturated) ++batch.stats->scale_saturated;
  }
}

}  // namespace

void start_from_grid(const RowEncoder& encoder, RowBatch& batch, bool in_metric) {
  const CodecSpec& spec = encoder.spec;
  const auto steps = static_cast<float>(encoder.rule.max_code);
  std::vector<float>& mean = batch.threshold;
  encoder.kernels->mean(batch.x.data(), spec.head_dim, mean.data());
  encoder.kernels->min_max(batch.x.data(), nullptr, spec.head_dim, spec.head_dim,
                           batch.minimum.data(), batch.maximum.data());
  const Deal dealt = deal(encoder, batch, kGridSize);
  dealt.for_each_run([&](size_t number, size_t slot, size_t first_lane) {
    const float below = kGridFractions[number / 6], above = kGridFractions[number % 6];
    for (size_t i = 0; i < dealt.period; ++i) {
      const size_t lane = first_lane + i;
      const float low = mean[lane] + below * (batch.minimum[lane] - mean[lane]);
      const float high = mean[lane] + above * (batch.maximum[lane] - mean[lane]);
      batch.candidate_scale[slot + i] = (high - low) / steps;
      batch.candidate_low[slot + i] = low;
    }
  });
  reset_best(batch);
  for (size_t lane = 0; lane < dealt.lanes; ++lane) {  // stays where no cost is finite
    batch.best_scale[lane] = (batch.maximum[lane] - batch.minimum[lane]) / steps;
    batch.best_low[lane] = batch.minimum[lane];
  }
  run_round(batch, dealt, false, [&] {
    if (in_metric) {
      encoder.kernels->try_candidates(candidate_args(encoder, batch, dealt));
    } else {
      encoder.kernels->try_ranges({.x = batch.x.data(),
                                   .scale = batch.candidate_scale.data(),
                                   .low = batch.candidate_low.data(),
                                   .head_dim = spec.head_dim,
                                   .max_code = encoder.rule.max_code,
                                   .num_candidates = static_cast<int>(dealt.per_lane()),
                                   .best_cost = batch.best_cost.data(),
                                   .best_index = batch.best_index.data()});
    }
  });
  for (size_t lane = 0; lane < dealt.lanes; ++lane) {
    // The mean of a constant row is rounded: its range must not become the rounding error.
    const bool constant = batch.minimum[lane] == batch.maximum[lane];
    batch.scale[lane] = constant ? 0.0F : batch.best_scale[lane];
    batch.low[lane] = constant ? batch.minimum[lane] : batch.best_low[lane];
  }
}

void encode_feedback(const RowEncoder& encoder, RowBatch& batch) {
  const FeedbackOptions& options = encoder.spec.feedback;
  options.start == StartRange::kClip
      ? start_from_clip(encoder, batch)
      : start_from_grid(encoder, batch, options.start == StartRange::kMetricGrid);
  reset_best(batch);
  for (int round = 0; round <= options.refits; ++round) {
    if (round > 0) refit(encoder, batch);
    const auto& multipliers = round == 0 ? options.multipliers : options.refit_multipliers;
    const Deal dealt = deal(encoder, batch, multipliers.size());
    make_candidates(encoder, batch, dealt, multipliers);
    CandidateArgs args = candidate_args(encoder, batch, dealt);
    args.feedback = options.feedback;
    args.codes = batch.codes.data();
    run_round(batch, dealt, true, [&] { encoder.kernels->try_candidates(args); });
  }
  check_best(encoder, batch);
  if (options.sweeps == 0) return;
  encoder.kernels->sweep_codes({.x = batch.x.data(),
                                .a_panels = encoder.panels.a.data(),
                                .a_inverse = encoder.panels.a_inverse.data(),
                                .scale = batch.best_scale.data(),
                                .low = batch.best_low.data(),
                                .head_dim = encoder.spec.head_dim,
                                .max_code = encoder.rule.max_code,
                                .sweeps = options.sweeps,
                                .error = batch.error.data(),
                                .codes = batch.codes.data()});
}

MetricPanels make_metric_panels(const EncoderMetric& metric, bool with_a) {
  const auto size = static_cast<size_t>(metric.head_dim);
  MetricPanels panels;
  panels.ones_l.assign(size, 0.0F);
  for (size_t begin = size; begin > 0; begin -= 4)
    for (size_t j = size; j-- > begin - 4;)
      for (size_t k = begin - 4; k < begin; ++k) panels.l.push_back(metric.l[j * size + k]);
  for (size_t begin = 0; with_a && begin < size; begin += 4)
    for (size_t j = 0; j < size; ++j)
      for (size_t k = begin; k < begin + 4; ++k) panels.a.push_back(metric.a[j * size + k]);
  for (size_t i = 0; i < size; ++i) {
    panels.a_inverse.push_back(1.0F / metric.a[i * size + i]);
    double sum = 0.0;
    for (size_t j = i; j < size; ++j) sum += static_cast<double>(metric.l[j * size + i]);
    panels.ones_l[i] = static_cast<float>(sum);
    panels.ones_norm += static_cast<double>(metric.pivot[i]) * sum * sum;
  }
  return panels;
}

}  // namespace oscar
