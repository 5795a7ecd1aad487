// Position-aware centering: stored rows lack RoPE_t(b), scores get it back, for every RoPE variant,
// chunking and position.
#include <catch2/catch.hpp>

#include "io/bundle_file.h"
#include "model/cache_fixture.h"
#include "support/compare.h"

using namespace oscar_test;
using Catch::Contains;

namespace {

const Geometry kShape{.num_kv_heads = 2, .group = 3, .head_dim = 64};

std::vector<RopeConfig> rope_variants() {
  RopeConfig partial{.theta = 1e6, .rotary_dim = 32};
  RopeConfig linear{.rotary_dim = 64, .scaling = "linear", .factor = 4.0};
  RopeConfig llama3{.theta = 5e5, .rotary_dim = 64, .scaling = "llama3", .factor = 32.0};
  llama3.original_context_length = 8192;
  RopeConfig yarn{.theta = 1e6, .rotary_dim = 64, .scaling = "yarn", .factor = 4.0};
  yarn.original_context_length = 512;
  yarn.attention_factor = 1.1386294;
  RopeConfig divided{.rotary_dim = 48};
  divided.frequency_divisors.assign(24, 1.7F);
  return {RopeConfig{.rotary_dim = 64}, partial, linear, llama3, yarn, divided};
}

std::shared_ptr<KvArm> position_arm(const RopeConfig& rope, const ArmShape& shape) {
  const std::shared_ptr<KvArm> arm = make_test_arm(kShape, shape);
  arm->rope = rope;
  SideArm& keys = arm->layers[0].k;
  keys.position_mean = TensorF({kShape.num_kv_heads, kShape.head_dim});
  keys.position_mean.values = random_values(keys.position_mean.size(), 77, 2.0F);
  return arm;
}

}  // namespace

TEST_CASE("scores over rows centered by position equal float64 attention", "[kv_position]") {
  const Rows rows = random_rows(kShape, 391, 11);
  for (const RopeConfig& rope : rope_variants()) {
    for (const bool transformed : {false, true}) {
      CAPTURE(rope.scaling, rope.rotary_dim, transformed);
      const auto arm = position_arm(rope, {.windows = {.sink = 5, .recent = 65},
                                           .rotated = transformed,
                                           .per_head = transformed,
                                           .centered = transformed});
      KvCache cache(kShape.config(), arm);
      const Outputs actual = run(cache, kShape, rows, 0, 391, {1, 64, 1, 33, 2});
      const ReferenceOutputs expected = reference_attention(kShape, rows, *arm);
      // Scores reach 50; their rounding (3e-6) is the relative error of a weight, outputs reach 10.
      const Tolerance tolerance{.absolute = 6e-5, .relative = 2e-5};
      CHECK_CLOSE(actual.o.data(), expected.o.data(), actual.o.size(), tolerance);
      CHECK_CLOSE(actual.lse.data(), expected.lse.data(), actual.lse.size(), tolerance);
    }
  }
}

TEST_CASE("rows kept in high precision give the reference, at position 0 and far out",
          "[kv_position]") {
  const size_t tokens = 2000;
  const Rows rows = random_rows(kShape, tokens, 5);
  KvCache reference(kShape.config(), make_reference_arm(HighPrecision::kFp32));
  const Outputs expected = run(reference, kShape, rows, 0, tokens, {});
  for (const RopeConfig& rope : rope_variants()) {
    CAPTURE(rope.scaling, rope.rotary_dim);
    const auto arm = position_arm(rope, {.windows = {.sink = tokens, .recent = 0},
                                         .rotated = true,
                                         .high_precision = HighPrecision::kFp32});
    KvCache cache(kShape.config(), arm);
    const Outputs actual = run(cache, kShape, rows, 0, tokens, {1, 500});
    CHECK_CLOSE(actual.o.data(), expected.o.data(), actual.o.size(), Tolerance{.absolute = 3e-5});
    CHECK_CLOSE(actual.lse.data(), expected.lse.data(), actual.lse.size(),
                Tolerance{.absolute = 3e-5});
  }
}

TEST_CASE("position-aware results have the same bits for every chunking and for forks",
          "[kv_position]") {
  const auto arm = position_arm(rope_variants()[0], {.windows = {.sink = 8, .recent = 70}});
  const Rows rows = random_rows(kShape, 300, 3);
  KvCache whole(kShape.config(), arm);
  const Outputs expected = run(whole, kShape, rows, 0, 300, {});
  KvCache cache(kShape.config(), arm);
  run(cache, kShape, rows, 0, 150, {});
  KvCache fork = cache.fork();
  for (KvCache* each : {&cache, &fork}) {
    const Outputs rest = run(*each, kShape, rows, 150, 300, {1, 1, 40});
    CHECK(std::equal(rest.o.begin(), rest.o.end(),
                     expected.o.end() - static_cast<ptrdiff_t>(rest.o.size())));
  }
}

TEST_CASE("k.position needs its tensors, a known RoPE and keys", "[kv_position]") {
  ModelConfig config = kShape.config();
  config.rope.rotary_dim = 64;
  Bundle bundle;
  bundle.info.model_architecture = "llama";
  bundle.info.num_layers = 1;
  bundle.info.num_heads = 6;
  bundle.info.num_kv_heads = 2;
  bundle.info.head_dim = bundle.info.value_head_dim = 64;
  bundle.info.rope_theta = config.rope.theta;
  BundleLayer& layer = bundle.layers[0];
  layer.k_mean = TensorF({2, 64}, 1.0F);
  const auto build = [&](const std::string& name) { return make_arm(name, config, {}, &bundle); };
  CHECK_THROWS_WITH(build("int8:k.position"),
                    Contains("no key mean before RoPE") && Contains("layer 0"));
  layer.k_position_mean = TensorF({2, 64}, 2.0F);
  layer.k_position_offset = TensorF({2, 64}, 3.0F);
  const KvArm arm = build("int8:k.position");
  CHECK(arm.layers[0].k.position_mean.values[5] == 2.0F);
  CHECK(arm.layers[0].k.mean.values[5] == 3.0F);
  CHECK(arm.layers[0].v.mean.empty());
  CHECK(arm.rope.rotary_dim == 64);
  CHECK_THAT(describe(arm), Contains("centered by position"));
  CHECK(build("int8:k.centered").layers[0].k.position_mean.empty());
  CHECK_THROWS_WITH(build("int8:position"), Contains("values have no position"));
  config.rope.rotary_dim = 0;
  CHECK_THROWS_WITH(build("int8:k.position"), Contains("RoPE of the model is not known"));
  KvArm broken = arm;
  broken.rope.rotary_dim = 66;
  config.rope.rotary_dim = 64;
  CHECK_THROWS_WITH(check(broken, config), Contains("rotary width of 66"));
}
