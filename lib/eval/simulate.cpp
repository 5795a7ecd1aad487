#include "eval/simulate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "base/parallel.h"
#include "base/statistics.h"
#include "eval/arm_summary.h"
#include "model/rope.h"

namespace oscar {
namespace {

double ratio(double top, double bottom) { return bottom > 0 ? top / bottom : 0; }

double total(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

std::vector<size_t> query_positions(size_t num_tokens, const SimulateOptions& options,
                                    const std::vector<std::shared_ptr<const KvArm>>& arms) {
  size_t first = options.first_query;
  if (first == 0) {
    first = std::max(num_tokens / 2, kClassSink + kClassRecent + 64);
    for (const auto& arm : arms) {
      if (arm->quantized) first = std::max(first, arm->windows.sink + arm->windows.recent + 64);
    }
  }
  std::vector<size_t> positions;
  for (size_t t = first; t < num_tokens; t += options.query_stride) positions.push_back(t);
  return positions;
}

// [T, heads, D] -> [T, D] of one head.
std::vector<float> head_rows(const std::vector<float>& tensor, size_t tokens, size_t heads,
                             size_t head, size_t dim) {
  std::vector<float> rows(tokens * dim);
  for (size_t t = 0; t < tokens; ++t) {
    std::copy_n(tensor.data() + (t * heads + head) * dim, dim, rows.data() + t * dim);
  }
  return rows;
}

void check_finite(const std::vector<float>& values, const std::string& file, int64_t layer,
                  const char* tensor, size_t heads, size_t dim) {
  for (size_t i = 0; i < values.size(); ++i) {
    OSCAR_CHECK(std::isfinite(values[i]), file, ": layer ", layer, " tensor ", tensor, " token ",
                i / (heads * dim), " head ", i / dim % heads, ": value ", values[i],
                ", expected a finite number");
  }
}

void fill_numbers(const HeadErrors& errors, std::map<std::string, double>& numbers) {
  const double signal = total(errors.output_signal);
  numbers["output_error_k"] = ratio(total(errors.output_error_k), signal);
  numbers["output_error_v"] = ratio(total(errors.output_error_v), signal);
  numbers["output_signal"] = signal;
  for (size_t c = 0; c < kNumClasses; ++c) {
    const ClassErrors& sums = errors.classes[c];
    const std::string suffix = std::string("_") + class_name(c);
    if (sums.elements == 0 || sums.pairs == 0) continue;  // undefined values are left out
    numbers["k_mse" + suffix] = sums.k_error / sums.elements;
    numbers["v_mse" + suffix] = sums.v_error / sums.elements;
    numbers["k_relative" + suffix] = ratio(sums.k_error, sums.k_signal);
    numbers["v_relative" + suffix] = ratio(sums.v_error, sums.v_signal);
    numbers["logit_rms" + suffix] = std::sqrt(sums.logit_error / sums.pairs);
    numbers["logit_rms_attended" + suffix] = std::sqrt(ratio(sums.logit_error_weighted, sums.mass));
    numbers["attention" + suffix] = sums.mass / static_cast<double>(errors.output_signal.size());
    numbers["output_error_v" + suffix] = ratio(sums.v_output_error, signal);
  }
}

ResultRow make_row(const KvArm& arm, const std::string& cell, const HeadErrors& errors,
                   const SimulateOptions& options) {
  ResultRow row;
  row.suite = "simulate";
  row.cell = cell;
  row.metric = "output_error";
  row.arm = arm.name;
  row.mode = "exact";
  row.labels = options.labels;
  row.labels["windows"] = arm.quantized ? to_string(arm.windows) : "";
  row.labels["codec"] = summarize(arm).codec;
  if (!arm.bundle_sha256.empty()) row.labels["bundle_sha256"] = arm.bundle_sha256;
  row.n = static_cast<double>(errors.output_error.size());
  row.sum = total(errors.output_error);
  for (const double error : errors.output_error) row.sum_sq += error * error;
  row.value = ratio(row.sum, total(errors.output_signal));
  row.se = cluster_standard_error(errors.output_error, errors.output_signal).value_or(0);
  fill_numbers(errors, row.numbers);
  row.numbers["bpe_nominal"] = summarize(arm).bits_nominal;
  return row;
}

// Mean over layers and heads of every number, so that no single layer with large outputs decides.
ResultRow mean_row(const std::vector<ResultRow>& rows, const std::string& arm) {
  ResultRow mean;
  Sums errors;
  std::map<std::string, Sums> numbers;
  for (const ResultRow& row : rows) {
    if (row.arm != arm) continue;
    if (errors.n == 0) mean = row;
    errors.add(row.value);
    for (const auto& [name, value] : row.numbers) numbers[name].add(value);
  }
  mean.cell = "all";
  mean.n = errors.n;
  mean.sum = errors.sum;
  mean.sum_sq = errors.sum_sq;
  mean.value = errors.mean().value_or(0);
  mean.se = errors.standard_error().value_or(0);
  mean.labels["se_method"] = "over layers and heads";
  mean.numbers.clear();
  for (const auto& [name, sums] : numbers) mean.numbers[name] = *sums.mean();
  return mean;
}

// All heads of one layer in one sequence; adds to errors [arm][head].
void simulate_layer(const CaptureReader& capture, int64_t layer, int64_t begin, int64_t end,
                    const std::vector<const KvArm*>& arms, const std::vector<size_t>& positions,
                    std::vector<std::vector<HeadErrors>>& errors) {
  const CaptureInfo& info = capture.info();
  const size_t tokens = static_cast<size_t>(end - begin), dim = static_cast<size_t>(info.head_dim);
  const size_t heads = static_cast<size_t>(info.num_heads);
  const size_t kv_heads = static_cast<size_t>(info.num_kv_heads), group = heads / kv_heads;
  const std::vector<float> q = capture.read(layer, "q", begin, end);
  const std::vector<float> k = capture.read(layer, "k", begin, end);
  const std::vector<float> v = capture.read(layer, "v", begin, end);
  check_finite(q, capture.path(), layer, "q", heads, dim);
  check_finite(k, capture.path(), layer, "k", kv_heads, dim);
  check_finite(v, capture.path(), layer, "v", kv_heads, dim);
  parallel_for(kv_heads, [&](size_t kv_head) {
    const std::vector<float> head_k = head_rows(k, tokens, kv_heads, kv_head, dim);
    const std::vector<float> head_v = head_rows(v, tokens, kv_heads, kv_head, dim);
    std::vector<float> head_q(positions.size() * group * dim);
    for (size_t i = 0; i < positions.size(); ++i) {
      std::copy_n(q.data() + (positions[i] * heads + kv_head * group) * dim, group * dim,
                  head_q.data() + i * group * dim);
    }
    const std::vector<HeadErrors> found = simulate_head({.num_tokens = tokens,
                                                         .head_dim = dim,
                                                         .group = group,
                                                         .kv_head = kv_head,
                                                         .k = head_k.data(),
                                                         .v = head_v.data(),
                                                         .q = head_q.data(),
                                                         .queries = positions},
                                                        arms, static_cast<size_t>(layer));
    for (size_t arm = 0; arm < arms.size(); ++arm) errors[arm][kv_head].add(found[arm]);
  });
}

std::vector<int64_t> chosen_layers(const CaptureReader& capture, const SimulateOptions& options) {
  const std::vector<int64_t> present = capture.layers();
  if (options.layers.empty()) return present;
  for (const int64_t layer : options.layers) {
    OSCAR_CHECK(std::find(present.begin(), present.end(), layer) != present.end(), capture.path(),
                ": has no layer ", layer, " (--layers)");
  }
  return options.layers;
}

}  // namespace

ModelConfig config_of(const CaptureInfo& info) {
  ModelConfig config;
  config.architecture = info.model_architecture;
  config.num_layers = static_cast<size_t>(info.num_layers);
  config.num_heads = static_cast<size_t>(info.num_heads);
  config.num_kv_heads = static_cast<size_t>(info.num_kv_heads);
  config.head_dim = static_cast<size_t>(info.head_dim);
  config.hidden_size = config.num_heads * config.head_dim;
  config.rope = rope_from_json(info.rope_json, "capture, attribute rope");
  config.rope.theta = info.rope_theta;
  return config;
}

std::vector<ResultRow> simulate(const CaptureReader& capture,
                                const std::vector<std::shared_ptr<const KvArm>>& arms,
                                const SimulateOptions& options, const Progress& progress) {
  OSCAR_CHECK(!arms.empty(), "simulate: no arm was given (--arm)");
  OSCAR_CHECK(options.query_stride > 0, "--query-stride must be at least 1");
  const std::vector<int64_t> layers = chosen_layers(capture, options);
  std::vector<const KvArm*> plain_arms;
  for (const auto& arm : arms) {
    plain_arms.push_back(arm.get());
    for (const int64_t layer : layers) {
      OSCAR_CHECK(!arm->quantized || static_cast<size_t>(layer) < arm->layers.size(), "arm ",
                  arm->name, ": has ", arm->layers.size(), " layers, but the capture holds layer ",
                  layer);
    }
  }
  const std::vector<int64_t>& offsets = capture.sequence_offsets();
  size_t sequences = offsets.empty() ? 0 : offsets.size() - 1;
  if (options.max_sequences > 0) sequences = std::min(sequences, options.max_sequences);
  size_t longest = 0;
  for (size_t i = 0; i < sequences; ++i) {
    longest = std::max(longest, static_cast<size_t>(offsets[i + 1] - offsets[i]));
  }
  OSCAR_CHECK(longest > 0 && !query_positions(longest, options, arms).empty(), capture.path(),
              ": no sequence is long enough: the longest has ", longest,
              " tokens, and queries are taken from behind the windows (--from)");
  std::vector<ResultRow> rows;
  const size_t kv_heads = static_cast<size_t>(capture.info().num_kv_heads);
  for (size_t i = 0; i < layers.size(); ++i) {
    progress.step({"simulate", i, layers.size(), "layers"});
    std::vector<std::vector<HeadErrors>> errors(arms.size(), std::vector<HeadErrors>(kv_heads));
    for (size_t sequence = 0; sequence < sequences; ++sequence) {
      progress.check();
      const std::vector<size_t> positions = query_positions(
          static_cast<size_t>(offsets[sequence + 1] - offsets[sequence]), options, arms);
      if (positions.empty()) continue;
      simulate_layer(capture, layers[i], offsets[sequence], offsets[sequence + 1], plain_arms,
                     positions, errors);
    }
    for (size_t arm = 0; arm < arms.size(); ++arm) {
      for (size_t head = 0; head < kv_heads; ++head) {
        rows.push_back(make_row(*arms[arm], cat("layer ", layers[i], " head ", head),
                                errors[arm][head], options));
        rows.back().numbers["layer"] = static_cast<double>(layers[i]);
        rows.back().numbers["head"] = static_cast<double>(head);
      }
    }
  }
  progress.step({"simulate", layers.size(), layers.size(), "layers"});
  std::vector<ResultRow> means;
  for (const auto& arm : arms) means.push_back(mean_row(rows, arm->name));
  rows.insert(rows.end(), means.begin(), means.end());
  return rows;
}

}  // namespace oscar
