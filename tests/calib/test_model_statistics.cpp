#include <cmath>
#include <fstream>
#include <iterator>

#include "calib/calibrate.h"
#include "calib/capture.h"
#include "calib/text_sequences.h"
#include "io/hdf5_file.h"
#include "model/attention_kernels.h"
#include "model/tokenizer.h"
#include "support/compare.h"
#include "support/paths.h"

using namespace oscar;
using namespace oscar_test;
using Catch::Contains;

namespace {

// Statistics of a few layers over everything the source shows.
struct Statistics : LayerObserver {
  std::map<size_t, LayerStatistics> layers;
  void on_layer(const LayerActivations& a) override {
    const auto found = layers.find(a.layer);
    if (found != layers.end()) found->second.add(a, 0, a.num_tokens);
  }
};

double relative_frobenius(const double* actual, const double* expected, size_t count) {
  double difference = 0.0, square = 0.0;
  for (size_t i = 0; i < count; ++i) {
    difference += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    square += expected[i] * expected[i];
  }
  return std::sqrt(difference / square);
}

void check_heads(const Hdf5File& file, const std::string& name,
                 const std::vector<TensorD>& covariances, double tolerance) {
  const TensorD expected = file.read<double>(name, 3);
  REQUIRE(expected.extent(0) == covariances.size());
  for (size_t h = 0; h < covariances.size(); ++h) {
    INFO(name << " head " << h);
    CHECK(relative_frobenius(covariances[h].data(), expected.at(h), covariances[h].size()) <=
          tolerance);
  }
}

void check_model(const std::string& model_path, const std::string& fixture,
                 const std::vector<size_t>& layers) {
  const Hdf5File file = Hdf5File::open(fixture);
  const auto weights = std::make_shared<const ModelWeights>(load_weights(model_path));
  Transformer model(weights, Compute::kFp32);
  TemporaryFolder folder;
  const std::vector<int32_t> ids = file.read<int32_t>("/ids", 1).values;
  const auto source = model_source(model, {}, {ids}, {Compute::kFp32, folder.path(), 0});
  Statistics statistics;
  for (const size_t layer : layers)
    statistics.layers.emplace(layer,
                              LayerStatistics(source->geometry(), {.mean_from_position = 0}));
  source->visit(source->layer_batches()[0], {.outputs = true}, statistics, Progress{});
  constexpr double kTolerance = 1e-4;  // relative Frobenius, stated with the fixtures
  for (const auto& [layer, moments] : statistics.layers) {
    const std::string group = "/l" + std::to_string(layer) + "/";
    check_heads(file, group + "C_Q_head", key_covariances(moments, KeyTarget::kQqt), kTolerance);
    check_heads(file, group + "C_K_head", key_covariances(moments, KeyTarget::kKtk), kTolerance);
    const auto proxy = proxy_sums(moments, source->rows(), layer, ids.size());
    const auto values = [&](ValueTarget target) {
      return value_covariances(moments, target, proxy);
    };
    check_heads(file, group + "C_V_head", values(ValueTarget::kVtv), kTolerance);
    check_heads(file, group + "C_S_SV_head", values(ValueTarget::kSst), kTolerance);
    check_heads(file, group + "C_S_proxy_head", values(ValueTarget::kProxy), kTolerance);
    for (const auto& [name, mean] : {std::pair{"K_mean", &HeadStatistics::key_mean},
                                     std::pair{"V_mean", &HeadStatistics::value_mean}}) {
      const TensorD expected = file.read<double>(group + name, 2);
      for (size_t h = 0; h < expected.extent(0); ++h)
        CHECK(relative_frobenius((moments.head(h).*mean).mean().data(), expected.at(h),
                                 expected.extent(1)) <= kTolerance);
    }
  }
}

}  // namespace

TEST_CASE("statistics of the demo model agree with the reference activations", "[model]") {
  SKIP_UNLESS(demo_model(), "demo model not fetched");
  SKIP_UNLESS(shared("fixtures/activations/smollm2.h5"), "no reference activations");
  check_model(*demo_model(), *shared("fixtures/activations/smollm2.h5"), {0, 15});
}

TEST_CASE("statistics of a model with key biases agree with the reference activations", "[model]") {
  SKIP_UNLESS(qwen_model(), "second model not fetched");
  SKIP_UNLESS(shared("fixtures/activations/qwen2.5-coder-1.5b.h5"), "no reference activations");
  check_model(*qwen_model(), *shared("fixtures/activations/qwen2.5-coder-1.5b.h5"), {14});
}

TEST_CASE("calibration from a capture equals calibration from the model", "[model]") {
  SKIP_UNLESS(demo_model() && demo_text("emma"), "demo model or text not fetched");
  TemporaryFolder folder;
  const auto tokenizer = Tokenizer::load(*demo_model());
  const TextSequences text =
      load_text_sequences({*demo_text("emma")}, *tokenizer, {.num_tokens = 384, .lengths = {128}});
  REQUIRE(text.sequences.size() == 3);
  const auto weights = std::make_shared<const ModelWeights>(load_weights(*demo_model()));
  Transformer model(weights, Compute::kFp32);
  CaptureInfo info;
  info.bf16 = false;
  info.has_outputs = true;
  capture(model, Compute::kFp32, text.sequences, info, {}, folder / "c.h5", Progress{});
  const CaptureReader reader(folder / "c.h5");
  const auto from_capture = capture_source(reader);
  Provenance provenance;
  provenance.rope = weights->config.rope;
  const auto from_model =
      model_source(model, provenance, text.sequences, {Compute::kFp32, folder.path(), 256});
  CalibrationOptions options;
  options.recipes = {recipe_options("official"), recipe_options("paper"),
                     recipe_options("centered")};
  options.held_out_fraction = 1.0 / 3;
  const CalibrationResult a = calibrate(*from_capture, options, Progress{});
  const CalibrationResult b = calibrate(*from_model, options, Progress{});
  for (size_t r = 0; r < 3; ++r)
    for (const int64_t layer : {0, 17, 29}) {
      const BundleLayer& x = a.recipes[r].bundle.layers.at(layer);
      const BundleLayer& y = b.recipes[r].bundle.layers.at(layer);
      CHECK(x.k_rotation.values == y.k_rotation.values);
      CHECK(x.v_rotation.values == y.v_rotation.values);
      CHECK(x.k_mean.values == y.k_mean.values);
      CHECK(x.k_position_mean.values == y.k_position_mean.values);
      CHECK(x.k_position_mean.empty() == (r < 2));
      CHECK(x.held_out_json == y.held_out_json);
    }
}

TEST_CASE("outputs recomputed from a capture with bf16 products", "[model]") {
  SKIP_UNLESS(demo_model() && demo_text("emma"), "demo model or text not fetched");
  SKIP_UNLESS(pair_kernels() != nullptr, "no bf16 products on this CPU");
  struct Outputs : LayerObserver {
    std::vector<float> o, lse;
    void on_layer(const LayerActivations& a) override {
      o.assign(a.o, a.o + a.num_tokens * 9 * 64);
      lse.assign(a.lse, a.lse + a.num_tokens * 9);
    }
  };
  TemporaryFolder folder;
  const auto tokenizer = Tokenizer::load(*demo_model());
  const TextSequences text =
      load_text_sequences({*demo_text("emma")}, *tokenizer, {.num_tokens = 200, .lengths = {200}});
  Transformer model(std::make_shared<const ModelWeights>(load_weights(*demo_model())),
                    Compute::kFp32);
  capture(model, Compute::kFp32, text.sequences, {}, {}, folder / "c.h5", Progress{});
  const CaptureReader reader(folder / "c.h5");
  for (const size_t layer : {0, 15}) {
    Outputs exact, rounded;
    const VisitNeeds needs{.outputs = true, .log_sum_exp = true};
    capture_source(reader)->visit({layer}, needs, exact, Progress{});
    capture_source(reader, 0, Compute::kBf16)->visit({layer}, needs, rounded, Progress{});
    // Captured rows are bf16 already: scores are the same, weights are off by half a bf16 step.
    CHECK_CLOSE(rounded.lse.data(), exact.lse.data(), exact.lse.size(),
                {.absolute = 1e-5, .relative = 1e-5});
    CHECK_CLOSE(rounded.o.data(), exact.o.data(), exact.o.size(),
                {.absolute = 0.02, .relative = 0.02, .min_cosine = 0.99999});
    CHECK(rounded.o != exact.o);
  }
}

TEST_CASE("text becomes sequences of the wanted lengths", "[model]") {
  SKIP_UNLESS(demo_model() && demo_text("emma"), "demo model or text not fetched");
  const auto tokenizer = Tokenizer::load(*demo_model());
  const TextSequences pooled = load_text_sequences({*demo_text("emma")}, *tokenizer,
                                                   {.num_tokens = 4096, .lengths = {512, 1024}});
  std::vector<size_t> lengths;
  for (const auto& sequence : pooled.sequences) lengths.push_back(sequence.size());
  CHECK(lengths == std::vector<size_t>{512, 1024, 512, 512, 1024, 512});
  CHECK(pooled.text_sha256.substr(0, 16) == "dd08b340a56ad4a0");
  const TextSequences twice = load_text_sequences(
      {*demo_text("emma"), *demo_text("emma")}, *tokenizer, {.num_tokens = 1024, .lengths = {512}});
  CHECK(twice.text_sha256 == pooled.text_sha256 + "," + pooled.text_sha256);
  CHECK(twice.sequences.size() == 2);
  CHECK(twice.sequences[0] == twice.sequences[1]);
  TemporaryFolder folder;
  std::ofstream(folder / "short.txt") << "It was a fine day.";
  std::ofstream(folder / "empty.txt").flush();
  const TextSequences brief = load_text_sequences({folder / "short.txt"}, *tokenizer, {});
  REQUIRE(brief.sequences.size() == 1);
  CHECK(brief.warnings.size() == 1);
  CHECK_THROWS_WITH(load_text_sequences({folder / "empty.txt"}, *tokenizer, {}),
                    Contains("empty.txt"));
  CHECK_THROWS_WITH(load_text_sequences({folder / "none.txt"}, *tokenizer, {}),
                    Contains("none.txt"));
}
