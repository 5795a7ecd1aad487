// Arms by name: what each one is, what it refuses, and that the cache really behaves like it.
#include <catch2/catch.hpp>

#include "model/cache_fixture.h"
#include "support/compare.h"

using namespace oscar_test;
using Catch::Contains;

namespace {

const Geometry kModel{.num_kv_heads = 2, .group = 3, .head_dim = 64, .num_layers = 2};

ModelConfig model_config() {
  ModelConfig config = kModel.config();
  config.name = "toy";
  config.rope.theta = 10000.0;
  return config;
}

// Statistics of a model whose keys have a large constant part; metrics are random Gram matrices.
Bundle toy_bundle() {
  Bundle bundle;
  bundle.info.recipe = "best";
  bundle.info.model_architecture = "llama";
  bundle.info.model_sha256 = std::string(64, 'a');
  bundle.info.head_dim = bundle.info.value_head_dim = 64;
  bundle.info.num_layers = 2;
  bundle.info.num_heads = 6;
  bundle.info.num_kv_heads = 2;
  bundle.info.rope_theta = 10000.0;
  for (int64_t id = 0; id < 2; ++id) {
    BundleLayer layer;
    const auto seed = static_cast<uint64_t>(id) * 10;
    layer.k_rotation = random_rotation(2, 64, 500 + seed);
    layer.v_rotation = random_rotation(1, 64, 600 + seed);
    layer.k_mean = TensorF({2, 64});
    layer.k_mean.values = random_values(128, 700 + seed, 4.0F);
    layer.v_mean = TensorF({2, 64});
    layer.v_mean.values = random_values(128, 800 + seed);
    for (TensorF* metric : {&layer.k_metric, &layer.v_metric}) {
      *metric = TensorF({2, 64, 64});
      for (size_t head = 0; head < 2; ++head) {
        const std::vector<float> rows = random_values(200 * 64, 900 + seed + head);
        for (size_t t = 0; t < 200; ++t) {
          for (size_t i = 0; i < 64; ++i) {
            for (size_t j = 0; j < 64; ++j) {
              metric->at(head)[i * 64 + j] += rows[t * 64 + i] * rows[t * 64 + j];
            }
          }
        }
      }
    }
    layer.k_clip = 0.96;
    layer.v_clip = 0.92;
    bundle.layers[id] = std::move(layer);
  }
  return bundle;
}

// Rows whose keys are the bundle's mean plus noise.
Rows toy_rows(const Bundle& bundle, size_t num_tokens) {
  Rows rows = random_rows(kModel, num_tokens, 77);
  for (size_t t = 0; t < num_tokens; ++t) {
    for (size_t i = 0; i < 128; ++i) {
      rows.k[t * 128 + i] += bundle.layers.at(0).k_mean.values[i];
      rows.v[t * 128 + i] += bundle.layers.at(0).v_mean.values[i];
    }
  }
  return rows;
}

// Root of the mean squared difference to the FP32 reference, relative to the reference.
double output_error(const std::string& name, const Bundle& bundle, const Rows& rows) {
  ArmOptions options;
  options.windows = {16, 32, WindowMode::kExact};
  const size_t n = rows.num_tokens;
  const auto arm = std::make_shared<const KvArm>(make_arm(name, model_config(), options, &bundle));
  KvCache cache(model_config(), arm);
  KvCache reference(model_config(), make_reference_arm(HighPrecision::kFp32));
  const Outputs actual = run(cache, kModel, rows, 0, n, {});
  const Outputs expected = run(reference, kModel, rows, 0, n, {});
  double difference = 0.0;
  double square = 0.0;
  for (size_t i = 0; i < actual.o.size(); ++i) {
    difference += std::pow(static_cast<double>(actual.o[i]) - expected.o[i], 2);
    square += std::pow(static_cast<double>(expected.o[i]), 2);
  }
  if (arm->quantized) CHECK(cache.counters().tokens_int2_read > 0);
  return std::sqrt(difference / square);
}

}  // namespace

TEST_CASE("every named arm has the parts its name promises", "[kv_arm]") {
  const Bundle bundle = toy_bundle();
  for (const std::string& name : arm_names()) {
    CAPTURE(name);
    const KvArm arm = make_arm(name, model_config(), {}, &bundle);
    CHECK(arm.name == name);
    CHECK(arm.quantized == (name != "bf16" && name != "fp32"));
    CHECK(arm_needs_bundle(name) == name.starts_with("oscar"));
    CHECK_THAT(describe(arm), Contains(name));
    if (!arm.quantized) continue;
    const bool windowless = name == "naive" || name == "quarot";
    CHECK(arm.windows.sink == (windowless ? 0 : 64));
    CHECK(arm.windows.recent == (windowless ? 0 : 256));
    const LayerArm& layer = arm.layers[1];
    const bool rotated = !name.starts_with("naive") && name != "kivi";
    CHECK(layer.k.rotation.empty() != rotated);
    CHECK(layer.v.rotation.empty() != rotated);
    const bool centered = name.starts_with("oscar-");
    CHECK(layer.k.mean.empty() != centered);
    const bool decided = name == "oscar-lean" || name == "oscar-best";
    CHECK(layer.v.mean.empty() != decided);
    const CodecSpec& k = layer.k.codec(1).spec();
    const CodecSpec& v = layer.v.codec(1).spec();
    CHECK(k.bits == (name == "int4" ? 4 : name == "int8" ? 8 : 2));
    const bool feedback = decided || name == "oscar-light";
    CHECK((k.encoder == Encoder::kFeedback) == feedback);
    CHECK((k.gain == GainRule::kMetric) == feedback);
    CHECK((v.encoder == Encoder::kFeedback) == decided);
    CHECK(layer.k.codecs.size() == (feedback ? 2 : 1));
    CHECK((k.feedback.start == StartRange::kGrid) == (name == "oscar-best"));
    CHECK(k.feedback.multipliers.size() == (name == "oscar-best" ? 4 : 5));
    CHECK(k.feedback.sweeps == (name == "oscar-best" ? 2 : 0));
    const bool clipped = name == "hadamard" || name == "oscar" || name == "oscar-centered";
    CHECK(k.clip_ratio == (clipped ? 0.96 : 0.0));
    CHECK(v.clip_ratio == (clipped || name == "oscar-light" ? 0.92 : 0.0));
  }
  const KvArm light = make_arm("oscar-light", model_config(), {}, &bundle);
  CHECK(light.layers[0].v.codec(0).spec().gain == GainRule::kPlain);
  CHECK(light.layers[0].k.rotation.values == bundle.layers.at(0).k_rotation.values);
  CHECK(make_arm("naive", model_config(), {}, nullptr).bits_nominal == 2.5);
  CHECK(make_arm("kivi", model_config(), {}, nullptr).bits_nominal == 3.0);
  CHECK(make_arm("kivi", model_config(), {}, nullptr).layers[0].k.codec(0).token_block() == 32);
}

TEST_CASE("log-8 metadata is taken where the bundle has its constants", "[kv_arm]") {
  Bundle bundle = toy_bundle();
  const auto meta = [&](const std::string& name) {
    return make_arm(name, model_config(), {}, &bundle).layers[0].k.codec(1).spec();
  };
  CHECK(meta("oscar-best").meta == MetaFormat::kScaleMinFp16);
  CHECK_THROWS_WITH(meta("oscar-best:meta=log8"),
                    Contains("layer") && Contains("no scale constants"));
  for (auto& [id, layer] : bundle.layers) {
    layer.k_scale_max = layer.v_scale_max = TensorF({2}, 2.0F);
    layer.k_scale_max.values[1] = 3.0F;
  }
  CHECK(meta("oscar-best").meta == MetaFormat::kLog8);
  CHECK(meta("oscar-best").log8_scale_max == 3.0F);
  CHECK(meta("oscar-best:meta=fp16").meta == MetaFormat::kScaleMinFp16);
  CHECK(meta("oscar-lean").meta == MetaFormat::kScaleMinFp16);
  CHECK(make_arm("oscar-best", model_config(), {}, &bundle).bits_nominal == 2.25);
}

TEST_CASE("multipliers decided by calibration are those of the arm with the same start",
          "[kv_arm]") {
  Bundle bundle = toy_bundle();
  for (auto& [id, layer] : bundle.layers) {
    layer.k_multipliers = TensorF({2, 3}, 0.0F);
    layer.k_multipliers.values = {0.5F, 0.75F, 2.0F, 1.5F, 0.0F, 0.0F};
  }
  using Factors = std::vector<double>;
  const auto k = [&](const std::string& name, size_t head) {
    return make_arm(name, model_config(), {}, &bundle)
        .layers[0]
        .k.codec(head)
        .spec()
        .feedback.multipliers;
  };
  for (const std::string recipe : {"best", "lean", "light"}) {
    bundle.info.recipe = recipe;
    for (const std::string arm : {"best", "lean", "light"}) {
      const bool same_start = (arm == "best") == (recipe == "best");
      const Factors own =
          arm == "best" ? best_feedback().multipliers : Factors{FeedbackOptions{}.multipliers};
      CHECK(k("oscar-" + arm, 0) == (same_start ? Factors{0.5, 0.75, 2.0} : own));
      CHECK(k("oscar-" + arm, 1) == (same_start ? Factors{1.5} : own));
      CHECK(k("oscar-" + arm + ":multipliers=1", 0) == Factors{1.0});
    }
    CHECK(k("oscar-lean:k.trellis", 0) == FeedbackOptions{}.multipliers);
    const KvArm arm = make_arm("oscar-" + recipe, model_config(), {}, &bundle);
    CHECK_THAT(describe(arm), Contains("decided multipliers"));
    if (recipe != "light") CHECK(arm.layers[0].v.codec(0).spec().feedback.multipliers.size() > 1);
  }
}

TEST_CASE("suffixes change one step each", "[kv_arm]") {
  const Bundle bundle = toy_bundle();
  const auto arm = [&](const std::string& name) {
    return make_arm(name, model_config(), {}, &bundle);
  };
  const auto k = [&](const std::string& name) { return arm(name).layers[0].k.codec(0).spec(); };
  const auto v = [&](const std::string& name) { return arm(name).layers[0].v.codec(0).spec(); };
  CHECK(k("oscar-best:no-gain").gain == GainRule::kNone);
  CHECK(k("oscar-best:v.no-gain").gain == GainRule::kMetric);
  CHECK(v("oscar-best:v.no-gain").gain == GainRule::kNone);
  CHECK_FALSE(k("oscar-best:no-feedback").feedback.feedback);
  CHECK(k("oscar-best:rtn:plain-gain").encoder == Encoder::kRtn);
  CHECK(k("oscar-best:rtn:plain-gain").clip_ratio == 0.96);
  CHECK(k("oscar-best:rtn:no-clip").clip_ratio == 0.0);
  CHECK(k("hadamard:feedback:identity-metric").clip_ratio == 0.0);
  CHECK(k("oscar-best:rtn:plain-gain").gain == GainRule::kPlain);
  CHECK(k("oscar-best:multipliers=1").feedback.multipliers == std::vector<double>{1.0});
  CHECK(k("oscar-best:metric-grid-start").feedback.start == StartRange::kMetricGrid);
  CHECK(k("oscar-best:clip-start").feedback.start == StartRange::kClip);
  CHECK(k("oscar-lean:v.metric-grid-start").feedback.start == StartRange::kClip);
  CHECK(v("oscar-lean:v.metric-grid-start").feedback.start == StartRange::kMetricGrid);
  CHECK(v("oscar-light:v.grid-clip").clip_rule == ClipRule::kRangeGrid);
  CHECK(v("oscar-light:v.grid-clip").clip_ratio == 0.0);
  CHECK(v("oscar-light:v.grid-clip:v.feedback").clip_rule == ClipRule::kOrderStatistic);
  CHECK(k("oscar-best:multipliers=0.9/1.25").feedback.multipliers ==
        std::vector<double>{0.9, 1.25});
  CHECK(k("oscar-best:refit-multipliers=1.0").feedback.refit_multipliers ==
        std::vector<double>{1.0});
  CHECK(k("oscar-lean:k.trellis").levels == Levels::kTrellis);
  CHECK(k("oscar-lean:k.trellis").feedback.start == StartRange::kClip);
  CHECK(k("oscar-best:sweeps=0:refits=3").feedback.refits == 3);
  CHECK(k("oscar-best:sweeps=0").feedback.sweeps == 0);
  CHECK(k("hadamard:no-clip").clip_ratio == 0.0);
  CHECK(k("hadamard:k.clip=0.9").clip_ratio == 0.9);
  CHECK(v("hadamard:k.clip=0.9").clip_ratio == 0.92);
  CHECK(k("naive:bits=4:group=32").group == 32);
  CHECK(k("naive:meta=scale-zero-fp32").meta == MetaFormat::kScaleZeroFp32);
  CHECK(arm("oscar-best:no-centering").layers[0].k.mean.empty());
  CHECK(arm("oscar-best:no-centering").layers[0].v.mean.empty());
  CHECK(arm("oscar-best:no-v-centering").layers[0].v.mean.empty());
  CHECK_FALSE(arm("oscar-best:no-v-centering").layers[0].k.mean.empty());
  CHECK(arm("oscar-best:h-only").layers[0].k.rotation.values[1] == 0.125F);
  CHECK(arm("oscar-best:no-rotation").layers[0].k.rotation.empty());
  CHECK(arm("oscar:sink=8:recent=16:serving").windows.recent == 16);
  CHECK(arm("oscar:serving").windows.mode == WindowMode::kServing);
  CHECK(arm("oscar:no-windows").windows.sink == 0);
  CHECK(arm("oscar:fp32-windows").high_precision == HighPrecision::kFp32);
  CHECK_THROWS_WITH(arm("oscar:nonsense"), Contains("\"nonsense\"") && Contains("no-gain"));
  CHECK_THROWS_WITH(arm("oscar:clip=2"), Contains("clip=number from 0 to 1"));
  CHECK_THROWS_WITH(arm("oscar:clip"), Contains("clip=number"));
  CHECK_THROWS_WITH(arm("oscar:sweeps=1.5"), Contains("sweeps=integer"));
  CHECK_THROWS_WITH(arm("oscar:k.serving"), Contains("k.serving"));
  CHECK_THROWS_WITH(arm("bf16:bits=4"), Contains("reference arm"));
  CHECK_THROWS_WITH(arm("nothing"), Contains("unknown") && Contains("oscar-best"));
  CHECK_THROWS_WITH(arm("naive:group=48"), Contains("group"));
  CHECK_THROWS_WITH(arm("oscar:serving:sink=60"), Contains("multiple of 8"));
}

TEST_CASE("bundles that do not fit are refused with both sides named", "[kv_arm]") {
  const Bundle good = toy_bundle();
  ArmOptions options;
  options.model_sha256 = std::string(64, 'b');
  options.bundle_path = "x.h5";
  CHECK_THROWS_WITH(make_arm("oscar", model_config(), {}, nullptr),
                    Contains("needs a calibration"));
  CHECK_THROWS_WITH(make_arm("oscar", model_config(), options, &good),
                    Contains("x.h5") && Contains("aaaaaaaa") && Contains("bbbbbbbb"));
  CHECK_NOTHROW(make_arm("hadamard", model_config(), options, &good));
  const auto refused = [&](const std::string& arm, const std::string& part, auto change) {
    Bundle bundle = toy_bundle();
    change(bundle);
    CHECK_THROWS_WITH(make_arm(arm, model_config(), {}, &bundle), Contains(part));
  };
  refused("oscar", "rope_theta 500000", [](Bundle& b) { b.info.rope_theta = 500000.0; });
  refused("oscar", "num_kv_heads 3", [](Bundle& b) { b.info.num_kv_heads = 3; });
  refused("oscar", "head_dim 128", [](Bundle& b) { b.info.head_dim = 128; });
  refused("oscar", "architecture", [](Bundle& b) { b.info.model_architecture = "qwen2"; });
  refused("oscar", "has no layer 1", [](Bundle& b) { b.layers.erase(1); });
  refused("oscar-centered", "layer 1, keys: the bundle has no mean",
          [](Bundle& b) { b.layers[1].k_mean = {}; });
  refused("oscar-best", "layer 0, values: the bundle has no attention metric",
          [](Bundle& b) { b.layers[0].v_metric = {}; });
  refused("oscar-best", "layer 1, keys, KV head 1",
          [](Bundle& b) { std::fill_n(b.layers[1].k_metric.at(1), 64 * 64, 0.0F); });
  Bundle undecided = toy_bundle();
  undecided.layers[1].v_mean = {};
  const KvArm lean = make_arm("oscar-lean", model_config(), {}, &undecided);
  CHECK(lean.layers[1].v.mean.empty());
  CHECK_FALSE(lean.layers[0].v.mean.empty());
}

TEST_CASE("a width without a Hadamard matrix is refused unless the block form is asked for",
          "[kv_arm]") {
  ModelConfig config = Geometry{.num_kv_heads = 1, .group = 1, .head_dim = 80}.config();
  CHECK_THROWS_WITH(make_arm("hadamard", config, {}, nullptr),
                    Contains("80") && Contains("block-hadamard"));
  CHECK_NOTHROW(make_arm("hadamard:block-hadamard", config, {}, nullptr));
}

TEST_CASE("arms order by what they cost", "[kv_arm]") {
  const Bundle bundle = toy_bundle();
  const Rows rows = toy_rows(bundle, 400);
  const double bf16 = output_error("bf16", bundle, rows);
  const double int8 = output_error("int8", bundle, rows);
  const double int4 = output_error("int4", bundle, rows);
  const double naive = output_error("naive", bundle, rows);
  const double published = output_error("oscar", bundle, rows);
  const double centered = output_error("oscar-centered", bundle, rows);
  CAPTURE(bf16, int8, int4, naive, published, centered);
  CHECK(bf16 < 5e-3);
  CHECK(int8 < 3e-2);
  CHECK(int4 < 0.5 * naive);
  CHECK(naive > 0.2);
  CHECK(centered < published);  // the keys have a large constant part
  // Without INT2 tokens the arm is the reference up to the rounding of its windows.
  CHECK(output_error("fp32", bundle, rows) == 0.0);
  for (const char* name : {"oscar-light", "oscar-lean", "oscar-best", "kivi"}) {
    CAPTURE(name);
    CHECK(output_error(name, bundle, rows) < naive);
  }
}
