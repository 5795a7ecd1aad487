// Means, intervals, paired differences and tests as the evaluation protocol defines them; undefined
// values (too few samples, 0/0) are empty optionals, never 0 or NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

namespace oscar {

inline constexpr uint64_t kBootstrapSeed = 20260517;
inline constexpr size_t kBootstrapResamples = 10000;

// Count, sum and sum of squares of one quantity; adding two of them merges the samples.
struct Sums {
  double n = 0, sum = 0, sum_sq = 0;
  void add(double value) {
    n += 1;
    sum += value;
    sum_sq += value * value;
  }
  void add(const Sums& other) {
    n += other.n;
    sum += other.sum;
    sum_sq += other.sum_sq;
  }
  std::optional<double> mean() const;
  std::optional<double> deviation() const;       // sample standard deviation, ddof 1; needs n >= 2
  std::optional<double> standard_error() const;  // deviation / sqrt(n)
};

Sums sums_of(std::span<const double> values);

// Value at position fraction * (n - 1) of the sorted values, linear interpolation. Infinite values
// sort last. Throws Error when empty, on NaN, or when fraction is outside [0, 1].
double percentile(std::vector<double> values, double fraction);
double percentile_of_sorted(std::span<const double> sorted, double fraction);

struct Interval {
  double lo = 0, hi = 0;
};

struct BootstrapOptions {
  uint64_t seed = kBootstrapSeed;
  size_t resamples = kBootstrapResamples;
  double confidence = 0.95;
};

// Percentile interval over resamples of whole clusters (items, windows, sequences).
// statistic(counts): the statistic when cluster i is taken counts[i] times; it must be finite.
// Empty for fewer than two clusters. Same seed, same interval, for any thread count.
std::optional<Interval> bootstrap_interval(
    size_t num_clusters, const std::function<double(std::span<const uint32_t> counts)>& statistic,
    const BootstrapOptions& options = {});

// Fewer clusters give a percentile interval that is far too narrow (two give about +- one standard
// error): none is reported then.
inline constexpr size_t kMinIntervalClusters = 5;

// The common case: a ratio of sums, for example sum of losses / number of rows by window.
// Resamples whose denominator is 0 are left out.
std::optional<Interval> bootstrap_ratio(std::span<const double> numerators,
                                        std::span<const double> denominators,
                                        const BootstrapOptions& options = {});
// Standard error of the same ratio over clusters (linearised, ddof 1). Empty for fewer than two
// clusters.
std::optional<double> cluster_standard_error(std::span<const double> numerators,
                                             std::span<const double> denominators);

// The error to print beside a mean of items that come in clusters: over clusters, but never below
// the error over items, which two or three clusters undercut by chance. Empty for fewer than two
// items.
std::optional<double> clustered_mean_error(std::span<const double> sums,
                                           std::span<const double> counts, const Sums& items);

// Outcomes of two arms on the same items: how many both got right, only the first, only the second,
// none.
struct PairedOutcomes {
  size_t both = 0, only_first = 0, only_second = 0, neither = 0;
  size_t n() const { return both + only_first + only_second + neither; }
};

struct Estimate {
  double value = 0;
  std::optional<double> se;
};

// Accuracy of the first minus accuracy of the second. Throws when there is no item.
Estimate paired_difference(const PairedOutcomes& outcomes);
// Two-sided McNemar p value from the discordant counts; mid-p subtracts the point mass once.
double mcnemar_exact(size_t only_first, size_t only_second);
double mcnemar_mid_p(size_t only_first, size_t only_second);

// Wilson score interval of a proportion (95 % unless z says otherwise). Throws when n = 0 or
// successes > n.
Interval wilson_interval(double successes, double n, double z = 1.959963984540054);

// Holm-adjusted p values, in the order given. Throws when a p value is outside [0, 1].
std::vector<double> holm_adjust(std::span<const double> p_values);

// Losses (nats) of a reference and a test arm on the same rows. Sums only, so that files merge.
struct PairedLosses {
  double n = 0, sum_reference = 0, sum_test = 0;
  double sum_sq_reference = 0, sum_sq_test = 0, sum_product = 0;
  double sum_sq_difference = 0;  // kept apart: the variance of the difference must not cancel
  void add(double reference, double test);
  void add(const PairedLosses& other);
};

struct PairedPerplexity {
  double ppl_reference = 0, ppl_test = 0;
  double ln_ratio = 0, ratio = 1;
  // Over rows, which are correlated: a lower bound. Empty for fewer than two rows.
  std::optional<double> ppl_reference_se, ppl_test_se, ln_ratio_se, ratio_se;
  std::optional<double> correlation;  // empty when one of the variances is 0
};

// Throws when n = 0.
PairedPerplexity paired_perplexity(const PairedLosses& losses);

}  // namespace oscar
