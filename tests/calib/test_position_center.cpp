// The least-squares fit behind position-aware centering, and what the contest makes of it.
#include <cmath>

#include "base/random.h"
#include "calib/calibrate.h"
#include "support/compare.h"
#include "support/paths.h"
#include "synthetic_capture.h"

using namespace oscar;
using namespace oscar_test;

namespace {

constexpr size_t kDim = 16;

// Keys RoPE_t(b) + m + noise of one KV head, sequences of `length` tokens.
struct Planted {
  std::vector<float> b, m, k;
  RopeConfig rope{.theta = 100.0, .rotary_dim = 8};
};

Planted planted_keys(size_t length, float noise) {
  Planted planted;
  Random random(9);
  for (size_t d = 0; d < kDim; ++d) {
    planted.b.push_back(d < 8 ? 2.0F + static_cast<float>(random.normal()) : 0.0F);
    planted.m.push_back(static_cast<float>(random.normal()));
  }
  for (size_t t = 0; t < length; ++t)
    planted.k.insert(planted.k.end(), planted.b.begin(), planted.b.end());
  apply_rope(make_rope_table(planted.rope, 0, length), {.rows = planted.k.data(),
                                                        .num_tokens = length,
                                                        .num_heads = 1,
                                                        .head_dim = kDim,
                                                        .token_stride = kDim});
  for (size_t i = 0; i < planted.k.size(); ++i)
    planted.k[i] += planted.m[i % kDim] + noise * static_cast<float>(random.normal());
  return planted;
}

LayerActivations activations_of(const Planted& planted, size_t length) {
  return {
      .num_tokens = length, .q = planted.k.data(), .k = planted.k.data(), .v = planted.k.data()};
}

}  // namespace

TEST_CASE("the fit finds the turning and the constant part of keys") {
  const size_t length = 1000, sink = 64;
  const Planted planted = planted_keys(length, 0.0F);
  const auto table = std::make_shared<const RopeTable>(make_rope_table(planted.rope, 0, length));
  const HeadGeometry geometry{1, 1, kDim};
  const StatisticsOptions options{.outputs = false, .mean_from_position = sink, .rope = table};
  LayerStatistics whole(geometry, options), first(geometry, options), second(geometry, options);
  const LayerActivations activations = activations_of(planted, length);
  whole.add(activations, 0, length);
  first.add(activations, 0, 300);
  second.add(activations, 300, length);
  first.merge(second);
  for (const LayerStatistics* statistics : {&whole, &first}) {
    TensorF mean, offset;
    fit_position_center(*statistics, mean, offset);
    // Pairs that turn often are found to the ridge of 2 %; what is left is the part of b beyond it.
    for (size_t d = 0; d < kDim; ++d) {
      CAPTURE(d);
      CHECK(mean.values[d] == Approx(planted.b[d]).margin(0.12));
      CHECK(offset.values[d] == Approx(planted.m[d]).margin(0.12));
    }
    // The residual has no mean.
    double residual = 0.0;
    std::vector<float> turned;
    for (size_t t = 0; t < length; ++t)
      turned.insert(turned.end(), mean.values.begin(), mean.values.end());
    apply_rope(*table, {.rows = turned.data(),
                        .num_tokens = length,
                        .num_heads = 1,
                        .head_dim = kDim,
                        .token_stride = kDim});
    for (size_t t = sink; t < length; ++t)
      residual += static_cast<double>(planted.k[t * kDim] - turned[t * kDim] - offset.values[0]);
    CHECK(std::abs(residual) / static_cast<double>(length) <= 1e-4);
  }
}

TEST_CASE("position tensors come with centered keys and a known RoPE only") {
  TemporaryFolder folder;
  write_synthetic_capture(folder / "c.h5", {.lengths = {400, 400, 400}});
  const CaptureReader reader(folder / "c.h5");
  CalibrationOptions options;
  options.recipes = {recipe_options("official"), recipe_options("lean")};
  options.held_out_fraction = 1.0 / 3;
  options.sink = 16;
  options.recent = 32;
  const auto unknown = calibrate(*capture_source(reader), options, Progress{});
  CHECK(unknown.recipes[1].bundle.layers.at(0).k_position_mean.empty());

  SyntheticCapture spec{.lengths = {400, 400, 400}};
  CaptureInfo info = synthetic_info(spec);
  info.rope_json = rope_to_json({.rotary_dim = 16});
  {
    CaptureWriter writer(folder / "known.h5", info);
    for (size_t s = 0; s < 3; ++s) {
      writer.begin_sequence(std::vector<int32_t>(400, 7));
      for (const int64_t layer : spec.layers) {
        const auto q = synthetic_rows(10 * s, 400, 4, 16);
        const auto k = synthetic_rows(10 * s + 1, 400, 2, 16, 0.2);
        writer.append(layer, q.data(), k.data(), k.data(), nullptr);
      }
      writer.end_sequence();
    }
    writer.finish();
  }
  const CaptureReader known(folder / "known.h5");
  const auto result = calibrate(*capture_source(known), options, Progress{});
  CHECK(result.recipes[0].bundle.layers.at(0).k_position_mean.empty());
  const BundleLayer& layer = result.recipes[1].bundle.layers.at(0);
  REQUIRE(layer.k_position_mean.shape == Shape{2, 16});
  // Constant keys after RoPE are no turning part: the contest keeps the plain mean, b = 0, wherever
  // position-aware centering does not measure better.
  const LayerReport& report = result.recipes[1].layers.at(0);
  for (size_t head = 0; head < 2; ++head) {
    const HeadDecision& decision = report.k_decisions[head];
    REQUIRE(decision.position_error >= 0.0);
    const bool zero = layer.k_position_mean.at(head)[0] == 0.0F;
    CHECK(zero == (decision.position_error >= decision.entries[decision.chosen].error));
    if (zero) CHECK(layer.k_position_offset.at(head)[3] == layer.k_mean.at(head)[3]);
  }
}
