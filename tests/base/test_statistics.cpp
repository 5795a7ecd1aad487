#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "base/parallel.h"
#include "base/statistics.h"

namespace {

using namespace oscar;

// The vectors of the protocol are printed with six or seven digits.
Approx printed(double value) { return Approx(value).margin(1e-7).epsilon(1e-6); }

constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

TEST_CASE("sums give mean, deviation and standard error, merging equals adding") {
  const std::vector<double> points{22. / 30, 22. / 30, 22. / 30, 23. / 30, 23. / 30};
  const Sums sums = sums_of(points);
  CHECK(*sums.mean() * 100 == Approx(74.67).margin(0.005));
  CHECK(*sums.deviation() * 100 == Approx(1.83).margin(0.005));
  CHECK(*sums.standard_error() == Approx(*sums.deviation() / std::sqrt(5.0)));
  Sums merged = sums_of(std::vector<double>(points.begin(), points.begin() + 2));
  merged.add(sums_of(std::vector<double>(points.begin() + 2, points.end())));
  CHECK(*merged.mean() == Approx(*sums.mean()).epsilon(1e-14));
  CHECK(*merged.deviation() == Approx(*sums.deviation()).epsilon(1e-12));
  CHECK_FALSE(Sums{}.mean());
  CHECK_FALSE(sums_of(std::vector<double>{3.0}).standard_error());
  CHECK(*sums_of(std::vector<double>(7, 0.1)).deviation() == Approx(0).margin(1e-8));
}

TEST_CASE("percentiles interpolate at fraction times n - 1") {
  const std::vector<double> values{1.6, 0.1, 0.8, 0.2, 0.4};
  CHECK(percentile(values, 0.999) == printed(1.5968));
  CHECK(percentile(values, 0.9) == printed(1.28));
  CHECK(percentile(values, 0.5) == 0.4);
  CHECK(percentile(values, 0) == 0.1);
  CHECK(percentile(values, 1) == 1.6);
  CHECK(percentile({1, 2, kInfinity}, 0.5) == 2);
  CHECK(percentile({1, 2, kInfinity}, 0.75) == kInfinity);
  CHECK(percentile({kInfinity, kInfinity}, 0.5) == kInfinity);
  CHECK_THROWS_AS(percentile({}, 0.5), Error);
  CHECK_THROWS_AS(percentile({1, std::nan("")}, 0.5), Error);
  CHECK_THROWS_AS(percentile({1, 2}, 1.5), Error);
}

TEST_CASE("paired accuracy difference and its standard error") {
  const Estimate estimate =
      paired_difference({.both = 100, .only_first = 18, .only_second = 8, .neither = 74});
  CHECK(estimate.value == printed(0.05));
  CHECK(*estimate.se == printed(0.0253121));
  CHECK_THROWS_AS(paired_difference({}), Error);
  CHECK_FALSE(paired_difference({.both = 1}).se);
}

TEST_CASE("McNemar, exact and mid-p") {
  CHECK(mcnemar_exact(10, 3) == printed(0.0922852));
  CHECK(mcnemar_exact(0, 6) == printed(0.03125));
  CHECK(mcnemar_exact(12, 25) == printed(0.0470310));
  CHECK(mcnemar_exact(5, 5) == 1);
  CHECK(mcnemar_exact(0, 0) == 1);
  CHECK(mcnemar_mid_p(10, 3) == printed(0.0573730));
  CHECK(mcnemar_mid_p(0, 6) == printed(0.015625));
  CHECK(mcnemar_mid_p(12, 25) == printed(0.0335525));
  CHECK(mcnemar_mid_p(0, 0) == 1);
  CHECK(mcnemar_exact(5000, 5200) == Approx(0.0488).margin(5e-4));
}

TEST_CASE("Wilson interval") {
  const Interval most = wilson_interval(60, 100);
  CHECK(most.lo == Approx(0.5020).margin(5e-5));
  CHECK(most.hi == Approx(0.6906).margin(5e-5));
  const Interval none = wilson_interval(0, 30);
  CHECK(none.lo == 0);
  CHECK(none.hi == Approx(0.1135).margin(5e-5));
  CHECK_THROWS_AS(wilson_interval(0, 0), Error);
  CHECK_THROWS_AS(wilson_interval(4, 3), Error);
}

TEST_CASE("Holm adjustment is step-down, monotone and capped") {
  const std::vector<double> p{0.01, 0.04, 0.03, 0.5};
  const std::vector<double> adjusted = holm_adjust(p);
  CHECK(adjusted[0] == Approx(0.04));
  CHECK(adjusted[1] == Approx(0.09));
  CHECK(adjusted[2] == Approx(0.09));
  CHECK(adjusted[3] == Approx(0.5));
  CHECK(holm_adjust(std::vector<double>{0.9, 0.8}) == std::vector<double>{1.0, 1.0});
  CHECK_THROWS_AS(holm_adjust(std::vector<double>{-0.1}), Error);
}

TEST_CASE("paired perplexity from losses") {
  const double a[] = {2, 1, 3, .5, 2.5, 1.5}, q[] = {2.2, 1.1, 2.9, .7, 2.8, 1.4};
  PairedLosses losses, first, second;
  for (int i = 0; i < 6; ++i) {
    losses.add(a[i], q[i]);
    (i < 2 ? first : second).add(a[i], q[i]);
  }
  first.add(second);
  for (const PairedLosses& sums : {losses, first}) {
    const PairedPerplexity result = paired_perplexity(sums);
    CHECK(result.ln_ratio == printed(0.1));
    CHECK(*result.ln_ratio_se == printed(0.0683130));
    CHECK(result.ratio == printed(1.1051709));
    CHECK(*result.ratio_se == printed(0.0754976));
    CHECK(result.ppl_reference == printed(5.7546026));
    CHECK(result.ppl_test == printed(6.3598195));
    CHECK(*result.correlation == Approx(0.98387).margin(5e-6));
  }
  PairedLosses equal;
  for (const double loss : a) equal.add(loss, loss);
  CHECK(*paired_perplexity(equal).ln_ratio_se == 0);
  CHECK_THROWS_AS(paired_perplexity({}), Error);
  PairedLosses infinite;
  infinite.add(1, kInfinity);
  infinite.add(2, 2);
  CHECK(paired_perplexity(infinite).ppl_test == kInfinity);
  CHECK_FALSE(paired_perplexity(infinite).ln_ratio_se);
}

TEST_CASE("bootstrap over clusters") {
  std::vector<double> sums, counts;
  for (int i = 0; i < 40; ++i) {
    counts.push_back(10 + i % 3);
    sums.push_back(counts.back() * (1 + 0.1 * (i % 7)));
  }
  const auto interval = bootstrap_ratio(sums, counts);
  REQUIRE(interval);
  double top = 0, bottom = 0;
  for (size_t i = 0; i < sums.size(); ++i) {
    top += sums[i];
    bottom += counts[i];
  }
  const double se = *cluster_standard_error(sums, counts);
  CHECK(interval->lo < top / bottom);
  CHECK(interval->hi > top / bottom);
  // The percentile interval of a smooth statistic is close to +- 1.96 standard errors.
  CHECK(interval->hi - interval->lo == Approx(2 * 1.96 * se).epsilon(0.05));
  // Equal cluster sizes: the clustered error is the error of the mean of the cluster means.
  const std::vector<double> equal_sums{2, 4, 9}, ones{1, 1, 1};
  CHECK(*cluster_standard_error(equal_sums, ones) == Approx(*sums_of(equal_sums).standard_error()));

  SECTION("the printed error is over clusters, and at least over items") {
    const Sums items = sums_of(std::vector<double>{2, 4, 9});
    CHECK(*clustered_mean_error(equal_sums, ones, items) == Approx(*items.standard_error()));
    const std::vector<double> alike{6, 6}, sizes{3, 3};
    const Sums spread = sums_of(std::vector<double>{1, 2, 3, 3, 2, 1});
    CHECK(*clustered_mean_error(alike, sizes, spread) == Approx(*spread.standard_error()));
    const std::vector<double> apart{3, 9};
    const Sums blocks = sums_of(std::vector<double>{1, 1, 1, 3, 3, 3});
    CHECK(*clustered_mean_error(apart, sizes, blocks) == Approx(1.0));
    CHECK_FALSE(clustered_mean_error(alike, sizes, Sums{}));
  }
  SECTION("no interval for one cluster") {
    CHECK_FALSE(bootstrap_ratio(std::vector<double>{1}, std::vector<double>{1}));
    CHECK_FALSE(cluster_standard_error(std::vector<double>{1}, std::vector<double>{1}));
  }
  SECTION("the thread count does not matter, the seed does") {
    set_num_threads(3);
    const auto same = bootstrap_ratio(sums, counts);
    set_num_threads(0);
    CHECK(same->lo == interval->lo);
    CHECK(same->hi == interval->hi);
    const auto other = bootstrap_ratio(sums, counts, {.seed = 1});
    CHECK(other->lo != interval->lo);
  }
  SECTION("draws follow the generator: floor(u n), resample after resample") {
    std::vector<uint32_t> seen;
    bootstrap_interval(2,
                       [&](std::span<const uint32_t> c) {
                         seen.assign(c.begin(), c.end());
                         return 0.0;
                       },
                       {.seed = 0, .resamples = 1});
    // uniform_at(0, 0) = 0.8833 -> cluster 1; the pair sums to two draws.
    CHECK(seen[0] + seen[1] == 2);
    CHECK(seen[1] >= 1);
  }
  SECTION("mismatched lengths") {
    CHECK_THROWS_AS(bootstrap_ratio(sums, ones), Error);
    CHECK_THROWS_AS(bootstrap_ratio(sums, counts, {.confidence = 1.5}), Error);
  }
}
