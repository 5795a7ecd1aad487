#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "calib/calibrate.h"
#include "support/compare.h"
#include "support/paths.h"
#include "synthetic_capture.h"

using namespace oscar;
using namespace oscar_test;
using Catch::Contains;

namespace {

// A sequence in memory with queries, as contest_data() reads it.
class SyntheticRows : public ActivationRows {
 public:
  SyntheticRows(const HeadGeometry& geometry, size_t tokens, double value_offset)
      : geometry_(geometry) {
    q_ = synthetic_rows(1, tokens, geometry.num_heads, geometry.head_dim);
    k_ = synthetic_rows(2, tokens, geometry.num_kv_heads, geometry.head_dim, 0.3);
    v_ = synthetic_rows(3, tokens, geometry.num_kv_heads, geometry.head_dim, value_offset);
  }
  void read(size_t, CaptureTensor tensor, size_t begin, size_t end, float* out) const override {
    const auto& rows = tensor == CaptureTensor::kQ ? q_ : tensor == CaptureTensor::kK ? k_ : v_;
    const size_t row =
        (tensor == CaptureTensor::kQ ? geometry_.num_heads : geometry_.num_kv_heads) *
        geometry_.head_dim;
    std::copy_n(rows.data() + begin * row, (end - begin) * row, out);
  }
  const std::vector<float>& k() const { return k_; }

 private:
  HeadGeometry geometry_;
  std::vector<float> q_, k_, v_;
};

// Attention outputs of the group of one KV head with given keys and values (already replaced where
// stored), by hand in double.
std::vector<double> outputs_by_hand(const ContestData& data, size_t query, size_t head,
                                    const std::vector<double>& keys,
                                    const std::vector<double>& values) {
  const size_t dim = data.geometry.head_dim, token = data.query_tokens[query];
  std::vector<double> p(token + 1), o(dim, 0.0);
  double total = 0.0;
  for (size_t j = 0; j <= token; ++j) {
    double score = 0.0;
    for (size_t d = 0; d < dim; ++d)
      score += static_cast<double>(data.q[(query * data.geometry.num_heads + head) * dim + d]) *
               keys[j * dim + d];
    total += p[j] = std::exp(score / std::sqrt(static_cast<double>(dim)));
  }
  for (size_t j = 0; j <= token; ++j)
    for (size_t d = 0; d < dim; ++d) o[d] += p[j] / total * values[j * dim + d];
  return o;
}

}  // namespace

TEST_CASE("contest errors are those of attention over the stored rows") {
  const HeadGeometry geometry{4, 2, 16};
  const SyntheticRows rows(geometry, 120, 0.4);
  const ContestOptions options{.sink = 8, .recent = 16, .num_queries = 20, .max_sequence = 100};
  const ContestData data = contest_data(rows, geometry, 0, {0, 120}, 50, options);
  REQUIRE(data.num_tokens == 100);
  REQUIRE(data.query_tokens.size() == 20);
  CHECK(data.query_tokens.front() >= 50);
  CHECK(data.query_tokens.back() == 99);
  OutputEnergy energy;
  for (size_t h = 0; h < 4; ++h) {
    const auto w_o = synthetic_rows(10 + h, 30, 1, 16);
    GramSum gram(16);
    gram.add({w_o.data(), 30, 16, 1});
    energy.push_back(gram.sum());
  }
  TensorF rotation({1, 16, 16});
  rotation.values = to_float(hadamard_matrix(16));
  const std::vector<float> mean(16, 0.3F);
  CodecSpec codec;
  codec.head_dim = 16;
  const StoredForm form{.rotation = rotation.data(), .mean = mean.data(), .codec = codec};
  const HeadContest contest(data, energy, 1);
  const ContestError key_error = contest.key_error(form), value_error = contest.value_error(form);

  // The stored rows by hand: (x - mean) R -> codec -> R^T + mean.
  const auto stored = [&](const std::vector<float>& x, size_t j) {
    std::vector<float> row(16, 0.0F);
    for (size_t d = 0; d < 16; ++d)
      for (size_t i = 0; i < 16; ++i)
        row[d] += (x[(j * 2 + 1) * 16 + i] - mean[i]) * rotation.values[i * 16 + d];
    std::vector<uint8_t> bytes(make_codec(codec)->bytes_per_block());
    make_codec(codec)->encode(row.data(), 16, 1, bytes.data(), nullptr);
    make_codec(codec)->decode(bytes.data(), 1, row.data(), 16);
    std::vector<double> back(16);
    for (size_t d = 0; d < 16; ++d) {
      back[d] = static_cast<double>(mean[d]);
      for (size_t i = 0; i < 16; ++i)
        back[d] += static_cast<double>(row[i]) * static_cast<double>(rotation.values[d * 16 + i]);
    }
    return back;
  };
  std::vector<double> keys(100 * 16), values(100 * 16);
  for (size_t j = 0; j < 100; ++j)
    for (size_t d = 0; d < 16; ++d) {
      keys[j * 16 + d] = static_cast<double>(data.k[(j * 2 + 1) * 16 + d]);
      values[j * 16 + d] = static_cast<double>(data.v[(j * 2 + 1) * 16 + d]);
    }
  double output_energy = 0.0, largest = 0.0;
  for (size_t query : {size_t{0}, size_t{7}, size_t{19}}) {
    double expected_key = 0.0, expected_value = 0.0;
    auto stored_keys = keys, stored_values = values;
    for (size_t j = 8; j + 16 <= data.query_tokens[query]; ++j) {
      const auto k = stored(data.k, j), v = stored(data.v, j);
      std::copy(k.begin(), k.end(), stored_keys.begin() + static_cast<std::ptrdiff_t>(j * 16));
      std::copy(v.begin(), v.end(), stored_values.begin() + static_cast<std::ptrdiff_t>(j * 16));
    }
    for (size_t head : {size_t{2}, size_t{3}}) {
      const auto exact = outputs_by_hand(data, query, head, keys, values);
      const auto with_keys = outputs_by_hand(data, query, head, stored_keys, values);
      const auto with_values = outputs_by_hand(data, query, head, keys, stored_values);
      for (size_t i = 0; i < 16; ++i)
        for (size_t j = 0; j < 16; ++j) {
          const double w = energy[head].values[i * 16 + j];
          expected_key += (with_keys[i] - exact[i]) * w * (with_keys[j] - exact[j]);
          expected_value += (with_values[i] - exact[i]) * w * (with_values[j] - exact[j]);
          output_energy += exact[i] * w * exact[j];
        }
    }
    CHECK(key_error.per_query[query] == Approx(expected_key).epsilon(1e-3));
    CHECK(value_error.per_query[query] == Approx(expected_value).epsilon(1e-3));
    largest = std::max(largest, expected_value);
  }
  CHECK(largest > 0.0);
  CHECK(contest.output_energy() > output_energy);
  CHECK(key_error.largest_scale > 0.0);
}

TEST_CASE("a sequence without enough quantized held-out queries is no contest") {
  const HeadGeometry geometry{4, 2, 16};
  const SyntheticRows rows(geometry, 120, 0.0);
  CHECK(contest_data(rows, geometry, 0, {0, 120}, 0, {.sink = 64, .recent = 256}).num_tokens == 0);
  CHECK(contest_data(rows, geometry, 0, {0, 120}, 110, {.sink = 8, .recent = 8}).num_tokens == 0);
}

TEST_CASE("feedback recipes write metrics, means, constants and their decisions") {
  TemporaryFolder folder;
  write_synthetic_capture(folder / "c.h5", {.lengths = {400, 400, 400}, .key_mean = 0.5});
  const CaptureReader reader(folder / "c.h5");
  const auto source = capture_source(reader);
  CalibrationOptions options;
  options.recipes = {recipe_options("light"), recipe_options("lean"), recipe_options("best")};
  options.held_out_fraction = 1.0 / 3;
  options.sink = 16;
  options.recent = 32;
  const CalibrationResult result = calibrate(*source, options, Progress{});
  CHECK_THAT(result.warnings.at(0), Contains("only 800 tokens"));
  CHECK_THAT(result.warnings.at(1), Contains("W_O is taken as the identity"));
  const BundleLayer& light = result.recipes[0].bundle.layers.at(0);
  const BundleLayer& lean = result.recipes[1].bundle.layers.at(0);
  const BundleLayer& best = result.recipes[2].bundle.layers.at(0);
  CHECK(light.v_mean.empty());
  CHECK(light.k_metric.shape == Shape{2, 16, 16});
  CHECK(light.k_metric.values == lean.k_metric.values);
  CHECK(light.k_metric.values != best.k_metric.values);
  CHECK(lean.k_scale_max.empty());
  REQUIRE(best.k_scale_max.size() == 2);
  CHECK(best.k_scale_max.values[0] > 0.0F);
  CHECK(best.v_scale_max.values[1] > 0.0F);
  double trace = 0.0;
  for (size_t i = 0; i < 16; ++i) trace += static_cast<double>(best.k_metric.at(1)[i * 17]);
  CHECK(trace == Approx(16.0).epsilon(1e-6));
  for (const RecipeResult& recipe : result.recipes) {
    write_bundle(recipe.bundle, folder / "b.h5");
    CHECK(read_bundle(folder / "b.h5").layers.size() == 2);
  }
  const LayerReport& report = result.recipes[2].layers[0];
  REQUIRE(report.k_decisions.size() == 2);
  CHECK(report.k_decisions[0].entries.size() == 9);
  // Shared with and without the mean, then the other eight of the kind that won.
  CHECK(report.v_decisions[0].entries.size() == 10);
  for (const auto* decisions : {&report.k_decisions, &report.v_decisions})
    for (const HeadDecision& decision : *decisions) CHECK(decision.error < decision.centered_error);
  for (const RecipeResult& recipe : result.recipes)
    for (const LayerReport& layer : recipe.layers) {
      REQUIRE(layer.k_decisions.size() == 2);
      CHECK_FALSE(minus_centered(layer.k_decisions).worse());
      CHECK_FALSE(minus_centered(layer.v_decisions).worse());
    }
  CHECK(result.recipes[0].layers[0].k_decisions[0].entries.size() == 9);
  CHECK(result.recipes[0].layers[0].v_decisions[0].entries.size() == 9);
  // The encoder of `best` is better than the one that ranks, on keys as on values together.
  double ranked = 0.0, stored = 0.0;
  for (const LayerReport& layer : result.recipes[2].layers)
    for (const HeadDecision& decision : layer.k_decisions) {
      ranked += decision.entries[decision.chosen].error;
      stored += decision.error;
    }
  CHECK(stored < ranked);
}

TEST_CASE("a layer is worse than centered when the difference exceeds its error") {
  std::vector<HeadDecision> heads(2);
  heads[0].centered_difference = 0.3;
  heads[1].centered_difference = -0.1;
  heads[0].centered_se = 0.12;
  heads[1].centered_se = 0.16;
  const LayerComparison comparison = minus_centered(heads);
  CHECK(comparison.difference == Approx(0.1));
  CHECK(comparison.standard_error == Approx(0.1));
  const LayerComparison both = sum(comparison, {-0.05, 0.0});
  CHECK(both.difference == Approx(0.05));
  CHECK_FALSE(both.worse());
  CHECK(sum(comparison, {0.1, 0.1}).worse());
  heads[1].centered_difference = -0.05;
  CHECK(minus_centered(heads).worse());
  heads[1].centered_difference = -0.15;
  CHECK_FALSE(minus_centered(heads).worse());
}

TEST_CASE("a bundle that is worse than centered in a layer says so") {
  // Values forced about a foreign mean.
  const HeadGeometry geometry{2, 1, 16};
  const SyntheticRows rows(geometry, 400, 0.0);
  const ContestData data =
      contest_data(rows, geometry, 0, {0, 400}, 200, {.sink = 16, .recent = 32});
  BundleLayer layer;
  layer.k_rotation = layer.v_rotation = TensorF({1, 16, 16});
  layer.k_rotation.values = layer.v_rotation.values = to_float(hadamard_matrix(16));
  layer.k_metric = TensorF({1, 16, 16}, 0.0F);
  for (size_t i = 0; i < 16; ++i) layer.k_metric.values[i * 17] = 1.0F;
  layer.v_metric = layer.k_metric;
  layer.k_mean = TensorF({1, 16}, 0.0F);
  layer.k_clip = 0.96;
  layer.v_clip = 0.92;
  RecipeOptions recipe = recipe_options("lean");
  recipe.value_centering = ValueCentering::kAlways;
  DecisionInputs inputs{&data, nullptr, &recipe, {}, TensorF({1, 16})};
  for (size_t d = 0; d < 16; ++d) inputs.v_mean.values[d] = 0.8F * static_cast<float>(1 + d);
  const auto energy = identity_energy(2, 16);
  inputs.energy = energy.get();
  LayerReport report;
  decide_by_contest(inputs, layer, report);
  CHECK(minus_centered(report.v_decisions).worse());
}

TEST_CASE("sign patterns give other rotations of the same space and enter the contest") {
  const TensorD covariance = [] {
    const auto x = synthetic_rows(5, 60, 1, 16);
    GramSum gram(16);
    gram.add({x.data(), 60, 16, 1});
    return gram.sum();
  }();
  RotationOptions options;
  const TensorF plain = fit_rotation({covariance}, options, "c").rotation;
  options.hadamard = true;
  const TensorF hadamard = fit_rotation({covariance}, options, "c").rotation;
  CHECK(hadamard.values == to_float(hadamard_matrix(16)));
  for (const bool on_hadamard : {false, true})
    for (const uint64_t pattern : {1U, 2U}) {
      options.hadamard = on_hadamard;
      options.sign_pattern = pattern;
      const TensorF signed_rotation = fit_rotation({covariance}, options, "c").rotation;
      CHECK(signed_rotation.values != (on_hadamard ? hadamard : plain).values);
      TensorD wide({16, 16});
      std::copy(signed_rotation.values.begin(), signed_rotation.values.end(), wide.values.begin());
      CHECK(orthogonality_error(wide) < 1e-5);
    }
  TemporaryFolder folder;
  write_synthetic_capture(folder / "c.h5", {.lengths = {400, 400, 400}, .key_mean = 0.5});
  const CaptureReader reader(folder / "c.h5");
  const auto source = capture_source(reader);
  CalibrationOptions calibration;
  calibration.recipes = {recipe_options("lean")};
  calibration.recipes[0].sign_patterns = 1;
  calibration.held_out_fraction = 1.0 / 3;
  calibration.sink = 16;
  calibration.recent = 32;
  const CalibrationResult result = calibrate(*source, calibration, Progress{});
  const HeadDecision& decision = result.recipes[0].layers[0].k_decisions[0];
  REQUIRE(decision.entries.size() == 6);
  CHECK(decision.entries[3].name == "shared~1");
  CHECK(decision.entries[5].name == "hadamard~1");
  CHECK(decision.entries[3].error != decision.entries[0].error);
}

TEST_CASE("value centering and the key metric can be forced") {
  TemporaryFolder folder;
  write_synthetic_capture(folder / "c.h5", {.lengths = {400, 400, 400}});
  const CaptureReader reader(folder / "c.h5");
  const auto source = capture_source(reader);
  CalibrationOptions options;
  options.recipes = std::vector<RecipeOptions>(4, recipe_options("lean"));
  options.recipes[0].value_centering = parse_value_centering("always");
  options.recipes[1].value_centering = parse_value_centering("never");
  options.recipes[2].key_metric = parse_key_metric("queries");
  options.recipes[3].decide_rotation = false;
  options.held_out_fraction = 1.0 / 3;
  options.sink = 16;
  options.recent = 32;
  const CalibrationResult result = calibrate(*source, options, Progress{});
  const auto layer = [&](size_t recipe) -> const BundleLayer& {
    return result.recipes[recipe].bundle.layers.at(0);
  };
  REQUIRE(layer(0).v_mean.shape == Shape{2, 16});
  for (size_t head = 0; head < 2; ++head)
    CHECK(std::any_of(layer(0).v_mean.at(head), layer(0).v_mean.at(head) + 16,
                      [](float value) { return value != 0.0F; }));
  CHECK(layer(1).v_mean.empty());
  CHECK(result.recipes[1].layers[0].v_decisions[0].entries.size() == 9);
  CHECK(result.recipes[3].layers[0].v_decisions[0].entries.size() == 2);
  CHECK(layer(3).k_rotation.shape == Shape{1, 16, 16});
  // C_Q of the head, scaled to a mean diagonal of 1.
  const std::vector<float> q = reader.read(0, CaptureTensor::kQ, 0, 800);
  const size_t heads = reader.num_heads(CaptureTensor::kQ);
  double trace = 0.0, entry = 0.0;
  for (size_t row = 0; row < 800 * heads; ++row) {
    if (row % heads >= heads / 2) continue;  // query heads of KV head 0
    for (size_t d = 0; d < 16; ++d) trace += double{q[row * 16 + d]} * double{q[row * 16 + d]};
    entry += double{q[row * 16]} * double{q[row * 16 + 1]};
  }
  CHECK(layer(2).k_metric.at(0)[1] == Approx(16.0 * entry / trace).epsilon(1e-5));
  CHECK_THROWS_AS(parse_key_metric("M_A"), Error);
  CHECK_THROWS_AS(parse_value_centering("yes"), Error);
}

TEST_CASE("values are centered where the mean is theirs, and not where it is foreign") {
  const HeadGeometry geometry{2, 1, 16};
  for (const bool constant : {true, false}) {
    const SyntheticRows rows(geometry, 400, constant ? 0.8 : 0.0);
    const ContestData data =
        contest_data(rows, geometry, 0, {0, 400}, 200, {.sink = 16, .recent = 32});
    BundleLayer layer;
    layer.k_rotation = layer.v_rotation = TensorF({1, 16, 16});
    layer.k_rotation.values = layer.v_rotation.values = to_float(hadamard_matrix(16));
    TensorF identity({1, 16, 16});
    for (size_t i = 0; i < 16; ++i) identity.values[i * 17] = 1.0F;
    layer.k_metric = layer.v_metric = identity;
    layer.k_mean = TensorF({1, 16}, 0.0F);
    RecipeOptions recipe = recipe_options("lean");
    recipe.decide_rotation = false;
    DecisionInputs inputs{&data, nullptr, &recipe, {}, TensorF({1, 16})};
    const auto energy = identity_energy(2, 16);
    inputs.energy = energy.get();
    for (size_t d = 0; d < 16; ++d) inputs.v_mean.values[d] = 0.8F * static_cast<float>(1 + d);
    LayerReport report;
    decide_by_contest(inputs, layer, report);
    CHECK(layer.v_mean.empty() != constant);
    CHECK(layer.v_rotation.shape == Shape{1, 16, 16});
  }
}

TEST_CASE("metrics need sequences longer than the windows") {
  TemporaryFolder folder;
  write_synthetic_capture(folder / "c.h5", {.lengths = {300, 300, 300}});
  const CaptureReader reader(folder / "c.h5");
  const auto source = capture_source(reader);
  CalibrationOptions options;
  options.recipes = {recipe_options("lean")};
  CHECK_THROWS_WITH(calibrate(*source, options, Progress{}),
                    Contains("longer than sink + recent = 320") && Contains("300"));
}

TEST_CASE("the recipe auto explains what fits the budgets") {
  CHECK(choose_recipe(128, 3.0, 0.2).recipe == "best");
  CHECK(choose_recipe(128, 2.25, 0.1).recipe == "lean");
  CHECK(choose_recipe(128, 2.25, 0.01).recipe == "centered");
  CHECK_THAT(choose_recipe(128, 2.125, 0.1).why, Contains("meta=log8"));
  CHECK_THROWS_WITH(choose_recipe(128, 2.0, 1.0), Contains("2.125"));
  CHECK_THROWS_WITH(choose_recipe(128, 2.2, 0.01), Contains("--write-cost"));
}
