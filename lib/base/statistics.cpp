#include "base/statistics.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "base/parallel.h"
#include "base/random.h"

namespace oscar {
namespace {

// Sum of squared deviations from the mean; rounding must not make it negative.
double centered_square(double n, double sum, double sum_sq) {
  return std::max(0.0, sum_sq - sum * sum / n);
}

// P(X = i), X ~ Binomial(n, 1/2).
double half_binomial(size_t n, size_t i) {
  const double dn = static_cast<double>(n), di = static_cast<double>(i);
  return std::exp(std::lgamma(dn + 1) - std::lgamma(di + 1) - std::lgamma(dn - di + 1) -
                  dn * std::log(2.0));
}

// 2 * P(X <= min(b, c)) before the cap, X ~ Binomial(b + c, 1/2).
double doubled_tail(size_t b, size_t c) {
  double tail = 0;
  for (size_t i = 0; i <= std::min(b, c); ++i) tail += half_binomial(b + c, i);
  return 2 * tail;
}

}  // namespace

std::optional<double> Sums::mean() const {
  if (n < 1) return std::nullopt;
  return sum / n;
}

std::optional<double> Sums::deviation() const {
  if (n < 2) return std::nullopt;
  return std::sqrt(centered_square(n, sum, sum_sq) / (n - 1));
}

std::optional<double> Sums::standard_error() const {
  const auto spread = deviation();
  if (!spread) return std::nullopt;
  return *spread / std::sqrt(n);
}

Sums sums_of(std::span<const double> values) {
  Sums sums;
  for (const double value : values) sums.add(value);
  return sums;
}

double percentile_of_sorted(std::span<const double> sorted, double fraction) {
  OSCAR_CHECK(!sorted.empty(), "percentile: no values");
  OSCAR_CHECK(fraction >= 0 && fraction <= 1, "percentile: fraction ", fraction,
              " is outside [0, 1]");
  const double position = fraction * static_cast<double>(sorted.size() - 1);
  const size_t below = std::min(static_cast<size_t>(position), sorted.size() - 1);
  const double weight = position - static_cast<double>(below);
  // No interpolation towards an infinite neighbour that has no weight: 0 * inf is not a number.
  if (weight == 0 || below + 1 == sorted.size() || sorted[below] == sorted[below + 1]) {
    return sorted[below];
  }
  return sorted[below] + weight * (sorted[below + 1] - sorted[below]);
}

double percentile(std::vector<double> values, double fraction) {
  OSCAR_CHECK(std::none_of(values.begin(), values.end(), [](double v) { return std::isnan(v); }),
              "percentile: a value is not a number");
  std::sort(values.begin(), values.end());
  return percentile_of_sorted(values, fraction);
}

std::optional<Interval> bootstrap_interval(
    size_t num_clusters, const std::function<double(std::span<const uint32_t> counts)>& statistic,
    const BootstrapOptions& options) {
  OSCAR_CHECK(options.resamples >= 1, "bootstrap: at least one resample is needed");
  OSCAR_CHECK(options.confidence > 0 && options.confidence < 1, "bootstrap: confidence ",
              options.confidence, " is outside (0, 1)");
  if (num_clusters < 2) return std::nullopt;
  std::vector<double> values(options.resamples);
  constexpr size_t kResamplesPerItem = 250;
  parallel_for_ranges(options.resamples, kResamplesPerItem, [&](size_t begin, size_t end) {
    std::vector<uint32_t> counts(num_clusters);
    for (size_t resample = begin; resample < end; ++resample) {
      std::fill(counts.begin(), counts.end(), 0U);
      for (size_t draw = 0; draw < num_clusters; ++draw) {
        const double u = uniform_at(options.seed, resample * num_clusters + draw);
        ++counts[static_cast<size_t>(u * static_cast<double>(num_clusters))];
      }
      values[resample] = statistic(counts);
    }
  });
  std::erase_if(values, [](double value) { return std::isnan(value); });
  if (values.empty()) return std::nullopt;
  std::sort(values.begin(), values.end());
  const double tail = (1 - options.confidence) / 2;
  return Interval{percentile_of_sorted(values, tail), percentile_of_sorted(values, 1 - tail)};
}

std::optional<Interval> bootstrap_ratio(std::span<const double> numerators,
                                        std::span<const double> denominators,
                                        const BootstrapOptions& options) {
  OSCAR_CHECK(numerators.size() == denominators.size(), "bootstrap: ", numerators.size(),
              " numerators but ", denominators.size(), " denominators");
  return bootstrap_interval(
      numerators.size(),
      [&](std::span<const uint32_t> counts) {
        double top = 0, bottom = 0;
        for (size_t i = 0; i < counts.size(); ++i) {
          if (counts[i] == 0) continue;
          top += counts[i] * numerators[i];
          bottom += counts[i] * denominators[i];
        }
        return bottom == 0 ? std::nan("") : top / bottom;
      },
      options);
}

std::optional<double> cluster_standard_error(std::span<const double> numerators,
                                             std::span<const double> denominators) {
  OSCAR_CHECK(numerators.size() == denominators.size(), "cluster error: ", numerators.size(),
              " numerators but ", denominators.size(), " denominators");
  const double clusters = static_cast<double>(numerators.size());
  const double bottom = std::accumulate(denominators.begin(), denominators.end(), 0.0);
  if (clusters < 2 || bottom == 0) return std::nullopt;
  const double ratio = std::accumulate(numerators.begin(), numerators.end(), 0.0) / bottom;
  double square = 0;
  for (size_t i = 0; i < numerators.size(); ++i) {
    const double residual = numerators[i] - ratio * denominators[i];
    square += residual * residual;
  }
  return std::sqrt(clusters / (clusters - 1) * square) / std::abs(bottom);
}

std::optional<double> clustered_mean_error(std::span<const double> sums,
                                           std::span<const double> counts, const Sums& items) {
  const auto over_items = items.standard_error();
  const auto over_clusters = cluster_standard_error(sums, counts);
  if (!over_items || !over_clusters) return over_items;
  return std::max(*over_items, *over_clusters);
}

Estimate paired_difference(const PairedOutcomes& outcomes) {
  OSCAR_CHECK(outcomes.n() > 0, "paired difference: no item was answered in both arms");
  const double n = static_cast<double>(outcomes.n());
  const double b = static_cast<double>(outcomes.only_first);
  const double c = static_cast<double>(outcomes.only_second);
  Estimate estimate{(b - c) / n, std::nullopt};
  if (outcomes.n() >= 2) {
    estimate.se = std::sqrt(std::max(0.0, (b + c) - (b - c) * (b - c) / n) / (n * (n - 1)));
  }
  return estimate;
}

double mcnemar_exact(size_t only_first, size_t only_second) {
  if (only_first + only_second == 0) return 1;
  return std::min(1.0, doubled_tail(only_first, only_second));
}

double mcnemar_mid_p(size_t only_first, size_t only_second) {
  const size_t discordant = only_first + only_second;
  if (discordant == 0) return 1;
  return std::min(1.0, doubled_tail(only_first, only_second) -
                           half_binomial(discordant, std::min(only_first, only_second)));
}

Interval wilson_interval(double successes, double n, double z) {
  OSCAR_CHECK(n > 0, "Wilson interval: no trials");
  OSCAR_CHECK(successes >= 0 && successes <= n, "Wilson interval: ", successes, " successes in ", n,
              " trials");
  const double p = successes / n, z2 = z * z;
  const double center = (p + z2 / (2 * n)) / (1 + z2 / n);
  const double half = z / (1 + z2 / n) * std::sqrt(p * (1 - p) / n + z2 / (4 * n * n));
  return {std::max(0.0, center - half), std::min(1.0, center + half)};
}

std::vector<double> holm_adjust(std::span<const double> p_values) {
  for (const double p : p_values) {
    OSCAR_CHECK(p >= 0 && p <= 1, "Holm: p value ", p, " is outside [0, 1]");
  }
  std::vector<size_t> order(p_values.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return p_values[a] < p_values[b]; });
  std::vector<double> adjusted(p_values.size());
  double largest = 0;
  for (size_t rank = 0; rank < order.size(); ++rank) {
    const double scaled = static_cast<double>(order.size() - rank) * p_values[order[rank]];
    largest = std::max(largest, std::min(1.0, scaled));
    adjusted[order[rank]] = largest;
  }
  return adjusted;
}

void PairedLosses::add(double reference, double test) {
  n += 1;
  sum_reference += reference;
  sum_test += test;
  sum_sq_reference += reference * reference;
  sum_sq_test += test * test;
  sum_product += reference * test;
  sum_sq_difference += (test - reference) * (test - reference);
}

void PairedLosses::add(const PairedLosses& other) {
  n += other.n;
  sum_reference += other.sum_reference;
  sum_test += other.sum_test;
  sum_sq_reference += other.sum_sq_reference;
  sum_sq_test += other.sum_sq_test;
  sum_product += other.sum_product;
  sum_sq_difference += other.sum_sq_difference;
}

PairedPerplexity paired_perplexity(const PairedLosses& losses) {
  OSCAR_CHECK(losses.n > 0, "perplexity: no row was scored");
  const double n = losses.n;
  PairedPerplexity result;
  const double mean_reference = losses.sum_reference / n, mean_test = losses.sum_test / n;
  result.ppl_reference = std::exp(mean_reference);
  result.ppl_test = std::exp(mean_test);
  result.ln_ratio = mean_test - mean_reference;
  result.ratio = std::exp(result.ln_ratio);
  if (n < 2 || !std::isfinite(result.ln_ratio)) return result;
  // Variances of the means: population variance / (n - 1).
  const double scale = 1 / (n * (n - 1));
  const double var_reference =
      centered_square(n, losses.sum_reference, losses.sum_sq_reference) * scale;
  const double var_test = centered_square(n, losses.sum_test, losses.sum_sq_test) * scale;
  const double covariance =
      (losses.sum_product - losses.sum_reference * losses.sum_test / n) * scale;
  const double var_difference =
      centered_square(n, losses.sum_test - losses.sum_reference, losses.sum_sq_difference) * scale;
  result.ln_ratio_se = std::sqrt(var_difference);
  result.ratio_se = result.ratio * *result.ln_ratio_se;
  result.ppl_reference_se = result.ppl_reference * std::sqrt(var_reference);
  result.ppl_test_se = result.ppl_test * std::sqrt(var_test);
  if (var_reference > 0 && var_test > 0) {
    result.correlation = covariance / std::sqrt(var_reference * var_test);
  }
  return result;
}

}  // namespace oscar
