#include <catch2/catch.hpp>
#include <cmath>

#include "base/error.h"
#include "base/float16.h"
#include "base/parallel.h"
#include "calib/activation_source.h"
#include "calib/attention_metrics.h"
#include "model/attention.h"
#include "model/attention_kernels.h"
#include "support/compare.h"
#include "support/paths.h"
#include "synthetic_capture.h"

using namespace oscar;
using namespace oscar_test;
using Catch::Contains;

namespace {

// One layer's activations with their exact attention outputs.
struct Sample {
  HeadGeometry geometry;
  size_t num_tokens;
  std::vector<float> q, k, v, o, lse;
  OutputEnergy energy;

  Sample(const HeadGeometry& g, size_t tokens, double value_mean = 0.02, bool bf16 = false)
      : geometry(g), num_tokens(tokens) {
    q = synthetic_rows(1, tokens, g.num_heads, g.head_dim);
    k = synthetic_rows(2, tokens, g.num_kv_heads, g.head_dim);
    v = synthetic_rows(3, tokens, g.num_kv_heads, g.head_dim, value_mean);
    for (float& value : q) value *= 3.0F;  // peaked attention
    for (auto* rows : {&q, &k, &v})
      for (float& value : *rows) value = bf16 ? round_to_bf16(value) : value;
    o.resize(q.size());
    lse.resize(tokens * g.num_heads);
    ModelConfig config;
    config.num_layers = 1;
    config.num_heads = g.num_heads;
    config.num_kv_heads = g.num_kv_heads;
    config.head_dim = g.head_dim;
    KvCache cache(config, reference_arm(Compute::kFp32));
    append_and_attend(cache, 0, tokens, q.data(), k.data(), v.data(), o.data(), lse.data());
    for (size_t h = 0; h < g.num_heads; ++h) {
      const auto w_o = synthetic_rows(10 + h, 40, 1, g.head_dim);
      GramSum gram(g.head_dim);
      gram.add({w_o.data(), 40, g.head_dim, 1});
      energy.push_back(gram.sum());
    }
  }
  LayerActivations activations() const {
    return {.num_tokens = num_tokens,
            .q = q.data(),
            .k = k.data(),
            .v = v.data(),
            .o = o.data(),
            .lse = lse.data()};
  }
};

// The definition, straight from the formulas: one row of weights for query token t, head h.
struct Direct {
  double logit, output;
};
Direct direct_weights(const Sample& s, size_t h, size_t t, size_t sink, size_t recent) {
  const size_t dim = s.geometry.head_dim, kv = h / s.geometry.group_size();
  const auto key = [&](const std::vector<float>& x, size_t j, size_t d) {
    return static_cast<double>(x[(j * s.geometry.num_kv_heads + kv) * dim + d]);
  };
  std::vector<double> p(t + 1);
  double total = 0.0;
  for (size_t j = 0; j <= t; ++j) {
    double score = 0.0;
    for (size_t d = 0; d < dim; ++d)
      score += static_cast<double>(s.q[(t * s.geometry.num_heads + h) * dim + d]) * key(s.k, j, d);
    total += p[j] = std::exp(score / std::sqrt(static_cast<double>(dim)));
  }
  // w_t is the energy of sum_j p_j^2 |(v_j - o)|^2 in W: errors of keys independent.
  Direct result{0.0, 0.0};
  for (size_t j = sink; j + recent <= t; ++j) {
    const double square = p[j] / total * (p[j] / total);
    result.logit += square;
    std::vector<double> difference(dim);
    for (size_t d = 0; d < dim; ++d)
      difference[d] =
          key(s.v, j, d) - static_cast<double>(s.o[(t * s.geometry.num_heads + h) * dim + d]);
    for (size_t i = 0; i < dim; ++i)
      for (size_t d = 0; d < dim; ++d)
        result.output += square * difference[i] * s.energy[h].values[i * dim + d] * difference[d];
  }
  return result;
}

}  // namespace

TEST_CASE("metric weights: double agrees with the definition to 1e-8, float32 to its rounding") {
  for (const HeadGeometry& geometry : {HeadGeometry{6, 2, 16}, HeadGeometry{4, 4, 24}}) {
    const Sample sample(geometry, 150);
    const size_t group = geometry.group_size();
    for (const bool in_double : {true, false}) {
      const MetricOptions options{.sink = 10, .recent = 21, .output = true, .in_double = in_double};
      for (size_t kv = 0; kv < geometry.num_kv_heads; ++kv) {
        const MetricWeights weights =
            metric_weights(sample.activations(), geometry, options, &sample.energy, kv, 0, 150);
        std::vector<double> logit, output;
        for (size_t t = 0; t < 150; ++t)
          for (size_t g = 0; g < group; ++g) {
            const Direct direct = direct_weights(sample, kv * group + g, t, 10, 21);
            logit.push_back(direct.logit);
            output.push_back(direct.output);
          }
        CHECK(logit[30 * group] == 0.0);
        CHECK(logit[31 * group] > 0.0);
        // float32: the error of 2 (s - lse), about 4 x 2^-24 x 20; w loses more by cancellation.
        CHECK_CLOSE(weights.logit.data(), logit.data(), logit.size(),
                    {.relative = in_double ? 1e-8 : 1e-5});
        CHECK_CLOSE(weights.output.data(), output.data(), output.size(),
                    {.absolute = in_double ? 1e-12 : 1e-5, .relative = in_double ? 1e-8 : 1e-4});
      }
    }
  }
}

// The queries' weights of bf16 rows with bf16 products: each squared softmax weight is rounded
// once, and the same for all sums, so that the error of a weight is at most that rounding although
// w is a small difference of large sums (means of the values are up to 100 times their spread).
TEST_CASE("metric weights from bf16 products err by the rounding of the softmax weights") {
  SKIP_UNLESS(pair_kernels() != nullptr, "the processor has no bf16 products");
  for (const HeadGeometry& geometry : {HeadGeometry{6, 2, 16}, HeadGeometry{2, 2, 64}}) {
    const Sample sample(geometry, 300, 0.1, true);
    const auto weights = [&](bool bf16) {
      return metric_weights(
          sample.activations(), geometry,
          {.sink = 10, .recent = 21, .output = true, .bf16_products = bf16, .in_double = !bf16},
          &sample.energy, 1, 0, 300);
    };
    const MetricWeights exact = weights(false), rounded = weights(true);
    CHECK_CLOSE(rounded.logit.data(), exact.logit.data(), exact.logit.size(), {.relative = 1e-5});
    // Half a unit of bf16; float32 sums of terms 100 times larger than their result besides.
    CHECK_CLOSE(rounded.output.data(), exact.output.data(), exact.output.size(),
                {.absolute = 1e-4, .relative = 0.5 * kBf16Epsilon + 1e-3});
    CHECK(rounded.output != exact.output);
  }
}

TEST_CASE("metrics are the weighted second moments of the queries and merge") {
  const HeadGeometry geometry{4, 2, 16};
  const Sample sample(geometry, 200);
  const auto energy = std::make_shared<const OutputEnergy>(sample.energy);
  const MetricOptions options{.sink = 16, .recent = 32, .output = true, .in_double = true};
  LayerMetrics whole(geometry, options, energy), front(geometry, options, energy),
      back(geometry, options, energy);
  whole.add(sample.activations(), 0, 200);
  front.add(sample.activations(), 0, 120);
  back.add(sample.activations(), 120, 200);
  front.merge(back);
  CHECK(whole.rows() == (200 - 48) * 2);
  CHECK(front.rows() == whole.rows());
  for (size_t kv = 0; kv < 2; ++kv) {
    std::vector<double> logit(256, 0.0), output(256, 0.0);
    for (size_t t = 48; t < 200; ++t)
      for (size_t g = 0; g < 2; ++g) {
        const Direct direct = direct_weights(sample, kv * 2 + g, t, 16, 32);
        const float* q = sample.q.data() + (t * 4 + kv * 2 + g) * 16;
        for (size_t i = 0; i < 16; ++i)
          for (size_t j = 0; j < 16; ++j) {
            const double product = static_cast<double>(q[i]) * static_cast<double>(q[j]);
            logit[i * 16 + j] += direct.logit * product / whole.rows();
            output[i * 16 + j] += direct.output * product / whole.rows();
          }
      }
    const double logit_scale = 1e-8 * logit[0], output_scale = 1e-8 * output[0];
    CHECK_CLOSE(whole.logit_metric(kv).data(), logit.data(), 256,
                {.absolute = logit_scale, .relative = 1e-8});
    CHECK_CLOSE(whole.output_metric(kv).data(), output.data(), 256,
                {.absolute = output_scale, .relative = 1e-8});
    const TensorD expected = whole.output_metric(kv);
    CHECK_CLOSE(front.output_metric(kv).data(), expected.data(), 256,
                {.absolute = output_scale, .relative = 1e-10});
  }
}

TEST_CASE("metrics do not depend on the thread count, short sequences leave nothing") {
  const HeadGeometry geometry{4, 2, 64};
  const Sample sample(geometry, 400);
  const auto energy = std::make_shared<const OutputEnergy>(sample.energy);
  const MetricOptions options{.output = true};
  for (const bool bf16 : {false, true}) {
    MetricOptions products = options;
    products.bf16_products = bf16;
    std::vector<TensorD> results;
    for (const int threads : {1, 3}) {
      set_num_threads(threads);
      LayerMetrics metrics(geometry, products, energy);
      metrics.add(sample.activations(), 0, 400);
      results.push_back(metrics.output_metric(1));
    }
    set_num_threads(0);
    CHECK(results[0].values == results[1].values);
  }
  LayerMetrics metrics(geometry, options, energy);
  metrics.add(sample.activations(), 0, 320);
  CHECK(metrics.rows() == 0.0);
  CHECK_THROWS_AS(metrics.logit_metric(0), Error);
  CHECK_THROWS_WITH(LayerMetrics(geometry, options, nullptr), Contains("output projection"));
}
