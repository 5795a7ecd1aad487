#include "eval/likelihood_rows.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <sstream>

#include "base/error.h"
#include "base/statistics.h"
#include "eval/row_divergence.h"

namespace oscar {
namespace {

// One quantity by window: what the bootstrap resamples.
struct Series {
  std::vector<double> sums, counts;
  Sums all;
  size_t infinite = 0;
};

// A range of scored rows.
struct Bucket {
  size_t begin = 0, end = 0;  // scored rows
  std::string name;           // empty = all rows
};

using RowValue =
    std::function<double(const ArmWindow& arm, const ArmWindow& reference, size_t row)>;

Series collect(const LikelihoodRun& run, size_t arm, const Bucket& bucket, const RowValue& value) {
  Series series;
  for (const WindowRecord& record : run.records) {
    Sums window;
    for (size_t row = bucket.begin; row < bucket.end; ++row) {
      const double x = value(record.arms[arm], record.arms[0], row);
      if (std::isfinite(x)) {
        window.add(x);
      } else {
        ++series.infinite;
      }
    }
    series.all.add(window);
    series.sums.push_back(window.sum);
    series.counts.push_back(window.n);
  }
  return series;
}

std::vector<double> values_of(const LikelihoodRun& run, size_t arm,
                              std::vector<float> ArmWindow::*member) {
  std::vector<double> values;
  for (const WindowRecord& record : run.records) {
    for (const float value : record.arms[arm].*member) values.push_back(static_cast<double>(value));
  }
  std::sort(values.begin(), values.end());
  return values;
}

// Means of the windows in order, so that a reader of rows can pair any two arms of one run.
std::string window_means(const Series& series) {
  std::ostringstream text;
  text.precision(9);
  for (size_t window = 0; window < series.sums.size(); ++window) {
    text << (window == 0 ? "" : " ")
         << (series.counts[window] > 0 ? series.sums[window] / series.counts[window] : 0.0);
  }
  return text.str();
}

class RowBuilder {
 public:
  RowBuilder(const LikelihoodRun& run, size_t arm) : run_(run), arm_(arm) {
    null_ = run.null_run && arm == run.arms.size();
    const KvArm& kv_arm = *run.arms[null_ ? 0 : arm];
    summary_ = summarize(kv_arm);
    base_.arm = null_ ? kNullArm : kv_arm.name;
    base_.mode = run.mode;
    base_.labels = run.labels;
    add_labels(kv_arm);
    add_counters();
  }

  void add_all(std::vector<ResultRow>& rows) const {
    const Bucket all{0, run_.targets.size(), ""};
    if (run_.perplexity) add_perplexity(all, rows);
    if (run_.divergence && arm_ > 0) add_divergence(all, rows);
    for (const Bucket& bucket : buckets()) {
      if (run_.perplexity) add_perplexity(bucket, rows);
      if (run_.divergence && arm_ > 0) add_mean("kl", "kl", kl, bucket, rows);
    }
  }

 private:
  static double nll(const ArmWindow& arm, const ArmWindow&, size_t row) {
    return static_cast<double>(arm.nll[row]);
  }
  static double kl(const ArmWindow& arm, const ArmWindow&, size_t row) {
    return static_cast<double>(arm.kl[row]);
  }

  void add_labels(const KvArm& arm) {
    base_.labels["codec"] = summary_.codec;
    base_.labels["windows"] = summary_.quantized ? to_string(summary_.windows) : "";
    const std::string mode = mode_name(summary_.windows.mode);
    if (summary_.quantized && mode != run_.mode && run_.mode != "after-prefill")
      base_.labels["windows"] += " " + mode;
    base_.labels["arm_description"] = describe(arm);
    if (!summary_.group.empty()) base_.labels["group"] = summary_.group;
    if (!summary_.bundle_sha256.empty()) base_.labels["bundle_sha256"] = summary_.bundle_sha256;
    if (summary_.quantized) {
      base_.labels["encoder_k"] = summary_.encoder_k;
      base_.labels["encoder_v"] = summary_.encoder_v;
      base_.labels["centered"] =
          std::string(summary_.centered_k ? "k" : "") + (summary_.centered_v ? "v" : "");
      base_.numbers["meta_bits"] = summary_.meta_bits;
      base_.numbers["clip_k"] = summary_.clip_k;
      base_.numbers["clip_v"] = summary_.clip_v;
    }
    base_.numbers["bpe_nominal"] = summary_.bits_nominal;
    base_.numbers["bpe_used"] = bits_per_element(arm, run_.window_length);
    base_.numbers["bpe_32768"] = bits_per_element(arm, 32768);
    base_.numbers["bpe_131072"] = bits_per_element(arm, 131072);
    base_.numbers["bpe_tokens"] = static_cast<double>(run_.window_length);
  }

  void add_counters() {
    double written = 0, read = 0, high = 0, seconds = 0, packed = 0, plain = 0;
    for (const WindowRecord& record : run_.records) {
      const ArmWindow& window = record.arms[arm_];
      written += window.tokens_int2_written;
      read += window.tokens_int2_read;
      high += window.tokens_high_precision;
      seconds += window.forward_s;
      packed += window.bytes_packed;
      plain += window.bytes_high_precision;
    }
    const double windows = static_cast<double>(run_.records.size());
    base_.numbers["tokens_int2_written"] = written;
    base_.numbers["tokens_int2_read"] = read;
    base_.numbers["tokens_hp"] = high;
    base_.numbers["cache_bytes"] = (packed + plain) / windows;  // one window, at its end
    base_.numbers["forward_s"] = seconds;
    base_.numbers["num_windows"] = windows;
    if (summary_.quantized && read == 0) base_.labels["status"] = "not quantized";
    const EncodeStats events = encode_events(run_.records, arm_);
    if (events.rows == 0) return;
    base_.numbers["rows_encoded"] = static_cast<double>(events.rows);
    base_.numbers["gains_clamped"] = static_cast<double>(events.gain_clamped);
    base_.numbers["scales_saturated"] = static_cast<double>(events.scale_saturated);
    base_.numbers["meta_fallbacks"] = static_cast<double>(events.meta_fallbacks);
  }

  std::vector<Bucket> buckets() const {
    const size_t width = position_bucket(run_.window_length);
    std::vector<Bucket> found;
    for (size_t row = 0; row < run_.targets.size(); ++row) {
      const size_t index = run_.targets[row] / width;
      if (found.empty() || run_.targets[found.back().begin] / width != index) {
        found.push_back({row, row, cat("@", index * width, "-", (index + 1) * width - 1)});
      }
      found.back().end = row + 1;
    }
    return found;
  }

  ResultRow start(const std::string& suite, const std::string& metric, const Bucket& bucket) const {
    ResultRow row = base_;
    row.suite = suite;
    row.metric = metric;
    row.cell = run_.cell + bucket.name;
    if (arm_ > 0) row.paired_with = run_.arms[0]->name;
    return row;
  }

  // Mean, standard error over windows (at least the one over rows) and, for whole cells,
  // the bootstrap interval over windows.
  void fill(const Series& series, const Bucket& bucket, ResultRow& row) const {
    row.n = series.all.n;
    row.sum = series.all.sum;
    row.sum_sq = series.all.sum_sq;
    if (series.infinite > 0) row.numbers["infinite"] = static_cast<double>(series.infinite);
    if (series.all.n < 1) {
      row.labels["status"] = "no finite row";
      return;
    }
    row.value = *series.all.mean();
    const auto rows_se = series.all.standard_error();
    if (rows_se) row.numbers["se_rows"] = *rows_se;
    const auto error = clustered_mean_error(series.sums, series.counts, series.all);
    row.se = error.value_or(0);
    row.labels["se_method"] = !error ? "none" : series.sums.size() > 1 ? "windows" : "rows";
    if (!bucket.name.empty()) return;
    if (series.sums.size() < kMinIntervalClusters) return;
    const auto interval =
        bootstrap_ratio(series.sums, series.counts, {.seed = run_.bootstrap_seed});
    if (interval) {
      row.ci_lo = interval->lo;
      row.ci_hi = interval->hi;
      row.ci_method = cat("bootstrap over ", series.sums.size(), " windows");
    }
  }

  ResultRow& add_mean(const std::string& suite, const std::string& metric, const RowValue& value,
                      const Bucket& bucket, std::vector<ResultRow>& rows) const {
    ResultRow row = start(suite, metric, bucket);
    fill(collect(run_, arm_, bucket, value), bucket, row);
    rows.push_back(std::move(row));
    return rows.back();
  }

  void add_perplexity(const Bucket& bucket, std::vector<ResultRow>& rows) const {
    ResultRow& ppl = add_mean("ppl", "ppl", nll, bucket, rows);
    ppl.labels["estimator"] = "exp_mean";
    ppl.numbers["nll"] = ppl.value;
    if (ppl.numbers.contains("infinite")) note_infinite(bucket, ppl);
    ppl.value = std::exp(ppl.value);
    ppl.se *= ppl.value;
    if (ppl.numbers.contains("se_rows")) ppl.numbers["se_rows"] *= ppl.value;
    if (!ppl.ci_method.empty()) {
      ppl.ci_lo = std::exp(ppl.ci_lo);
      ppl.ci_hi = std::exp(ppl.ci_hi);
    }
    if (arm_ == 0) return;
    ResultRow& ratio = add_mean(
        "ppl", "ln_ppl_ratio",
        [](const ArmWindow& arm, const ArmWindow& reference, size_t row) {
          return static_cast<double>(arm.nll[row]) - static_cast<double>(reference.nll[row]);
        },
        bucket, rows);
    PairedLosses losses;
    for (const WindowRecord& record : run_.records) {
      for (size_t row = bucket.begin; row < bucket.end; ++row) {
        const double test = static_cast<double>(record.arms[arm_].nll[row]);
        const double reference = static_cast<double>(record.arms[0].nll[row]);
        if (std::isfinite(test) && std::isfinite(reference)) losses.add(reference, test);
      }
    }
    if (losses.n == 0) return;
    const PairedPerplexity paired = paired_perplexity(losses);
    ratio.numbers["ratio"] = paired.ratio;
    if (paired.correlation) ratio.numbers["correlation"] = *paired.correlation;
    ratio.numbers["sum_reference"] = losses.sum_reference;
    ratio.numbers["sum_test"] = losses.sum_test;
    ratio.numbers["sum_product"] = losses.sum_product;
    ratio.numbers["sum_sq_reference"] = losses.sum_sq_reference;
    ratio.numbers["sum_sq_test"] = losses.sum_sq_test;
  }

  // The first target with probability 0, so that the reader can look at it.
  void note_infinite(const Bucket& bucket, ResultRow& row) const {
    for (const WindowRecord& record : run_.records) {
      for (size_t i = bucket.begin; i < bucket.end; ++i) {
        if (std::isfinite(record.arms[arm_].nll[i])) continue;
        row.labels["infinite_at"] = cat("window ", record.window, " position ", run_.targets[i]);
        row.labels["status"] =
            "a target has probability 0: perplexity is infinite; the value "
            "leaves such rows out";
        return;
      }
    }
  }

  void add_divergence(const Bucket& all, std::vector<ResultRow>& rows) const {
    ResultRow& mean = add_mean("kl", "kl", kl, all, rows);
    mean.labels["kl_by_window"] = window_means(collect(run_, arm_, all, kl));
    const std::vector<double> values = values_of(run_, arm_, &ArmWindow::kl);
    const std::pair<const char*, double> fractions[] = {
        {"median", 0.5}, {"p90", 0.9}, {"p95", 0.95}, {"p99", 0.99}, {"p99_9", 0.999}, {"max", 1}};
    for (const auto& [name, fraction] : fractions) {
      const double value = percentile_of_sorted(values, fraction);
      if (std::isfinite(value)) mean.numbers[name] = value;
    }
    ResultRow& top1 = add_mean(
        "kl", "top1",
        [](const ArmWindow& arm, const ArmWindow&, size_t row) {
          return (arm.agreement[row] & kSameTop1) != 0 ? 1.0 : 0.0;
        },
        all, rows);
    if (top1.n > 1) {
      top1.numbers["se_rows"] = std::sqrt(top1.value * (1 - top1.value) / (top1.n - 1));
    }
    add_mean(
        "kl", "top5",
        [](const ArmWindow& arm, const ArmWindow&, size_t row) {
          return static_cast<double>(arm.agreement[row] & ~kSameTop1) /
                 static_cast<double>(kTopAgreement);
        },
        all, rows);
    ResultRow& delta = add_mean(
        "kl", "delta_p",
        [](const ArmWindow& arm, const ArmWindow&, size_t row) {
          return static_cast<double>(arm.delta_p[row]);
        },
        all, rows);
    if (delta.n > 0) delta.numbers["rms"] = std::sqrt(delta.sum_sq / delta.n);
    ResultRow& top = add_mean(
        "kl", "kl50",
        [](const ArmWindow& arm, const ArmWindow&, size_t row) {
          return static_cast<double>(arm.kl_top[row]);
        },
        all, rows);
    const std::vector<double> tops = values_of(run_, arm_, &ArmWindow::kl_top);
    const double last = static_cast<double>(tops.size() - 1);
    // The upstream rule for this quantity: the sorted value at the rounded position.
    const double p95 = tops[static_cast<size_t>(std::lround(0.95 * last))];
    if (std::isfinite(p95)) top.numbers["p95"] = p95;
    if (std::isfinite(tops.back())) top.numbers["max"] = tops.back();
    const double median = percentile_of_sorted(tops, 0.5);
    if (std::isfinite(median)) top.numbers["median"] = median;
  }

  const LikelihoodRun& run_;
  size_t arm_;
  bool null_ = false;
  ArmSummary summary_;
  ResultRow base_;
};

void check_run(const LikelihoodRun& run) {
  OSCAR_CHECK(!run.records.empty(), "no window was scored");
  OSCAR_CHECK(!run.targets.empty(), "no row was scored");
  const size_t expected = run.arms.size() + (run.null_run ? 1 : 0);
  for (const WindowRecord& record : run.records) {
    OSCAR_CHECK(record.arms.size() == expected, "window ", record.window, " holds ",
                record.arms.size(), " arms, expected ", expected);
    for (const ArmWindow& arm : record.arms) {
      OSCAR_CHECK(arm.nll.size() == run.targets.size(), "window ", record.window, " holds ",
                  arm.nll.size(), " rows, expected ", run.targets.size());
    }
  }
}

}  // namespace

std::vector<ResultRow> likelihood_rows(const LikelihoodRun& run) {
  check_run(run);
  std::vector<ResultRow> rows;
  const size_t arms = run.arms.size() + (run.null_run ? 1 : 0);
  for (size_t arm = 0; arm < arms; ++arm) RowBuilder(run, arm).add_all(rows);
  return rows;
}

std::vector<ResultRow> paired_divergence_rows(const LikelihoodRun& run,
                                              const std::string& baseline) {
  check_run(run);
  size_t base = 0;
  for (size_t arm = 1; arm < run.arms.size(); ++arm) {
    if (run.arms[arm]->name == baseline) base = arm;
  }
  std::vector<ResultRow> rows;
  if (base == 0) return rows;
  for (size_t arm = 1; arm < run.arms.size(); ++arm) {
    if (arm == base) continue;
    std::vector<double> sums, counts;
    Sums all;
    for (const WindowRecord& record : run.records) {
      Sums window;
      for (size_t row = 0; row < run.targets.size(); ++row) {
        const double difference = static_cast<double>(record.arms[arm].kl[row]) -
                                  static_cast<double>(record.arms[base].kl[row]);
        if (std::isfinite(difference)) window.add(difference);
      }
      all.add(window);
      sums.push_back(window.sum);
      counts.push_back(window.n);
    }
    ResultRow row;
    row.suite = "kl";
    row.metric = "kl_difference";
    row.cell = run.cell;
    row.mode = run.mode;
    row.arm = run.arms[arm]->name;
    row.paired_with = baseline;
    row.labels = run.labels;
    if (all.n < 1) continue;
    row.n = all.n;
    row.sum = all.sum;
    row.sum_sq = all.sum_sq;
    row.value = *all.mean();
    const auto error = clustered_mean_error(sums, counts, all);
    row.se = error.value_or(0);
    row.labels["se_method"] = !error ? "none" : sums.size() > 1 ? "windows" : "rows";
    const auto interval = bootstrap_ratio(sums, counts, {.seed = run.bootstrap_seed});
    if (interval && sums.size() >= kMinIntervalClusters) {
      row.ci_lo = interval->lo;
      row.ci_hi = interval->hi;
      row.ci_method = cat("bootstrap over ", sums.size(), " windows");
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace oscar
