#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "base/random.h"
#include "eval/arm_summary.h"
#include "eval/simulate_head.h"

namespace {

using namespace oscar;

// Keeps float32 values and adds a constant when it decodes: the smallest codec with a known error.
class ShiftCodec : public Codec {
 public:
  ShiftCodec(int head_dim, float shift, int block) : shift_(shift), block_(block) {
    spec_.head_dim = head_dim;
  }
  const CodecSpec& spec() const override { return spec_; }
  int token_block() const override { return block_; }
  size_t bytes_per_block() const override {
    return static_cast<size_t>(block_ * spec_.head_dim) * sizeof(float);
  }
  void encode(const float* rows, size_t stride, size_t num_blocks, uint8_t* out,
              EncodeStats*) const override {
    CHECK(stride == static_cast<size_t>(spec_.head_dim));
    std::memcpy(out, rows, num_blocks * bytes_per_block());
  }
  void decode(const uint8_t* encoded, size_t num_blocks, float* rows, size_t) const override {
    std::memcpy(rows, encoded, num_blocks * bytes_per_block());
    const size_t count = num_blocks * bytes_per_block() / sizeof(float);
    for (size_t i = 0; i < count; ++i) rows[i] += shift_;
  }

 private:
  CodecSpec spec_;
  float shift_;
  int block_;
};

constexpr size_t kTokens = 500, kDim = 8, kGroup = 2;

struct Case {
  std::vector<float> q, k, v;
  HeadInput input;
};

Case random_case() {
  Case c;
  Random random(11);
  const auto fill = [&](std::vector<float>& values, size_t count) {
    for (size_t i = 0; i < count; ++i) values.push_back(static_cast<float>(random.normal()));
  };
  fill(c.k, kTokens * kDim);
  fill(c.v, kTokens * kDim);
  c.input.queries = {380, 441, 499};
  fill(c.q, c.input.queries.size() * kGroup * kDim);
  c.input.num_tokens = kTokens;
  c.input.head_dim = kDim;
  c.input.group = kGroup;
  c.input.k = c.k.data();
  c.input.v = c.v.data();
  c.input.q = c.q.data();
  return c;
}

KvArm shift_arm(float k_shift, float v_shift, WindowSpec windows, int block = 1) {
  KvArm arm;
  arm.name = "shift";
  arm.quantized = true;
  arm.high_precision = HighPrecision::kFp32;
  arm.windows = windows;
  arm.layers.resize(1);
  arm.layers[0].k.codecs = {std::make_shared<ShiftCodec>(static_cast<int>(kDim), k_shift, block)};
  arm.layers[0].v.codecs = {std::make_shared<ShiftCodec>(static_cast<int>(kDim), v_shift, 1)};
  return arm;
}

HeadErrors run(const Case& c, const KvArm& arm) { return simulate_head(c.input, {&arm}, 0)[0]; }

double sum(const std::vector<double>& values) {
  double total = 0;
  for (const double value : values) total += value;
  return total;
}

}  // namespace

TEST_CASE("a codec without error changes nothing") {
  const Case c = random_case();
  const HeadErrors errors = run(c, shift_arm(0, 0, {.sink = 64, .recent = 256}));
  CHECK(errors.output_signal.size() == c.input.queries.size() * kGroup);
  CHECK(sum(errors.output_error) <= 1e-10 * sum(errors.output_signal));
  for (const ClassErrors& sums : errors.classes) {
    CHECK(sums.k_error == 0);
    CHECK(sums.logit_error <= 1e-8 * sums.pairs);
  }
}

TEST_CASE("every token and pair is counted once, and the softmax mass is one a query") {
  const HeadErrors errors = run(random_case(), shift_arm(0, 0, {.sink = 0, .recent = 0}));
  double elements = 0, pairs = 0, mass = 0;
  for (const ClassErrors& sums : errors.classes) {
    elements += sums.elements;
    pairs += sums.pairs;
    mass += sums.mass;
  }
  CHECK(elements == kTokens * kDim);
  CHECK(pairs == kGroup * (381 + 442 + 500));
  CHECK(mass == Approx(kGroup * 3).epsilon(1e-5));
  CHECK(errors.classes[kSink].elements == 64 * kDim);
  CHECK(errors.classes[kRecent].elements == 256 * kDim);
}

TEST_CASE("a constant value error of every token moves the output by that constant") {
  const HeadErrors errors = run(random_case(), shift_arm(0, 0.5F, {.sink = 0, .recent = 0}));
  for (const double error : errors.output_error) CHECK(error == Approx(kDim * 0.25).epsilon(1e-4));
  CHECK(sum(errors.output_error_k) <= 1e-8);
  for (size_t i = 0; i < errors.output_error.size(); ++i) {
    CHECK(errors.output_error_v[i] == Approx(errors.output_error[i]).epsilon(1e-4));
  }
  CHECK(errors.classes[kHistory].v_error ==
        Approx(errors.classes[kHistory].elements * 0.25).epsilon(1e-4));
  CHECK(errors.classes[kSink].v_error > 0);
}

TEST_CASE("a constant key error of every token moves logits but not the output") {
  const HeadErrors errors = run(random_case(), shift_arm(0.5F, 0, {.sink = 0, .recent = 0}));
  CHECK(sum(errors.output_error) <= 1e-9 * sum(errors.output_signal));
  CHECK(errors.classes[kHistory].logit_error > 0);
  CHECK(errors.classes[kHistory].k_error > 0);
}

TEST_CASE("windows protect sink and recent tokens, per query") {
  const Case c = random_case();
  const HeadErrors errors = run(c, shift_arm(0.5F, 0.5F, {.sink = 64, .recent = 256}));
  CHECK(errors.classes[kSink].k_error == 0);
  CHECK(errors.classes[kRecent].k_error == 0);
  CHECK(errors.classes[kSink].logit_error <= 1e-8 * errors.classes[kSink].pairs);
  CHECK(errors.classes[kRecent].logit_error <= 1e-8 * errors.classes[kRecent].pairs);
  CHECK(errors.classes[kHistory].logit_error > 0);
  CHECK(errors.classes[kHistory].v_output_error > 0);
  CHECK(errors.classes[kRecent].v_output_error <= 1e-9);
  // Only history is off: the output moves by the attention it gets, in every dimension.
  const double expected = errors.classes[kHistory].v_output_error;
  CHECK(sum(errors.output_error_v) == Approx(expected).epsilon(1e-4));
  // Windows wider than the sequence: nothing is quantized.
  CHECK(sum(run(c, shift_arm(9, 9, {.sink = 64, .recent = 436})).output_error) <= 1e-9);
}

TEST_CASE("token blocks leave the last, incomplete block of keys in high precision") {
  const Case c = random_case();
  // 180 tokens behind the windows: one whole block of 128.
  const KvArm arm = shift_arm(0.5F, 0, {.sink = 64, .recent = 256}, 128);
  const HeadErrors errors = run(c, arm);
  CHECK(errors.classes[kHistory].k_error == Approx(128 * kDim * 0.25).epsilon(1e-4));
  CHECK(quantized_tokens(arm.windows, kTokens, 128) == 128);
  CHECK(quantized_tokens(arm.windows, kTokens, 1) == 180);
  CHECK(quantized_tokens(arm.windows, 320, 1) == 0);
  CHECK(quantized_tokens(arm.windows, 10, 1) == 0);
}

TEST_CASE("rotation and mean are undone") {
  const Case c = random_case();
  KvArm arm = shift_arm(0, 0, {.sink = 0, .recent = 0});
  for (SideArm* side : {&arm.layers[0].k, &arm.layers[0].v}) {
    side->rotation = TensorF({1, kDim, kDim});
    // A cyclic shift of the dims: orthogonal and not symmetric.
    for (size_t i = 0; i < kDim; ++i) side->rotation.data()[i * kDim + (i + 1) % kDim] = 1;
    side->mean = TensorF({1, kDim}, 0.75F);
  }
  arm.layers[0].k.position_mean = TensorF({1, kDim}, 0.5F);
  arm.rope.rotary_dim = kDim / 2;
  CHECK(sum(run(c, arm).output_error) <= 1e-9);
  CHECK(run(c, arm).classes[kHistory].k_error <= 1e-7);
  // The codec's error arrives rotated back: a shift of one rotated dim only.
  HeadErrors both = run(c, arm);
  both.add(run(c, arm));
  CHECK(both.output_signal.size() == 2 * c.input.queries.size() * kGroup);
}

TEST_CASE("queries outside the sequence are refused") {
  Case c = random_case();
  const KvArm arm = shift_arm(0, 0, {});
  c.input.queries = {500};
  CHECK_THROWS_AS(run(c, arm), Error);
  c.input.queries = {};
  CHECK_THROWS_AS(run(c, arm), Error);
}
