#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <vector>

#include "base/error.h"
#include "base/random.h"
#include "model/sampler.h"

using namespace oscar;

namespace {

int32_t draw(const std::vector<float>& logits, const SamplingOptions& options, uint64_t index) {
  return sample_token(logits.data(), logits.size(), options, index);
}

// Smallest index of the stream whose uniform number lies in [low, high).
uint64_t index_with_uniform(uint64_t seed, double low, double high) {
  uint64_t index = 0;
  while (uniform_at(seed, index) < low || uniform_at(seed, index) >= high) ++index;
  return index;
}

}  // namespace

TEST_CASE("the uniform stream and the request seeds are those of the protocol") {
  CHECK(uniform_at(0, 0) == Approx(0.88331080821364).epsilon(1e-14));
  const uint64_t seed = request_seed(42, "gsm8k", "17", 0);
  CHECK(seed == 0xedc9a7f31a87b7feULL);
  CHECK(uniform_at(seed, 0) == Approx(0.507909820839).epsilon(1e-11));
  CHECK(uniform_at(seed, 1) == Approx(0.241515526983).epsilon(1e-11));
}

TEST_CASE("temperature 0 takes the largest logit, the lowest id on ties") {
  CHECK(draw({1.0F, 3.0F, 3.0F, 2.0F}, {.temperature = 0.0}, 0) == 1);
  CHECK(draw({-HUGE_VALF, -5.0F}, {.temperature = 0.0}, 0) == 1);
}

TEST_CASE("inverse CDF over the candidates in falling order of logit") {
  // Probabilities 0.2, 0.5, 0.3: candidates 1 (to 0.5), 2 (to 0.8), 0 (to 1).
  const std::vector<float> logits = {std::log(0.2F), std::log(0.5F), std::log(0.3F)};
  const SamplingOptions options{.temperature = 1.0, .top_k = 0, .top_p = 1.0, .seed = 9};
  CHECK(draw(logits, options, index_with_uniform(9, 0.0, 0.49)) == 1);
  CHECK(draw(logits, options, index_with_uniform(9, 0.51, 0.79)) == 2);
  CHECK(draw(logits, options, index_with_uniform(9, 0.81, 1.0)) == 0);
}

TEST_CASE("equal logits are ordered by id") {
  const std::vector<float> logits(4, 0.0F);
  const SamplingOptions options{.temperature = 1.0, .top_k = 2, .top_p = 1.0, .seed = 1};
  CHECK(draw(logits, options, index_with_uniform(1, 0.0, 0.49)) == 0);
  CHECK(draw(logits, options, index_with_uniform(1, 0.51, 1.0)) == 1);
}

TEST_CASE("top-p keeps the smallest prefix with enough mass and renormalizes") {
  const std::vector<float> logits = {std::log(0.5F), std::log(0.3F), std::log(0.2F)};
  SamplingOptions options{.temperature = 1.0, .top_k = 0, .top_p = 0.6, .seed = 2};
  // Kept: 0.5 and 0.3, renormalized to 0.625 and 0.375.
  CHECK(draw(logits, options, index_with_uniform(2, 0.55, 0.62)) == 0);
  CHECK(draw(logits, options, index_with_uniform(2, 0.63, 0.7)) == 1);
  CHECK(draw(logits, options, index_with_uniform(2, 0.95, 1.0)) == 1);
  options.top_p = 0.01;  // at least one is kept
  CHECK(draw(logits, options, index_with_uniform(2, 0.95, 1.0)) == 0);
}

TEST_CASE("temperature sharpens and flattens") {
  const std::vector<float> logits = {std::log(0.8F), std::log(0.2F)};
  SamplingOptions options{.temperature = 2.0, .top_k = 0, .top_p = 1.0, .seed = 3};
  // sqrt(0.8) : sqrt(0.2) = 2 : 1
  CHECK(draw(logits, options, index_with_uniform(3, 0.6, 0.66)) == 0);
  CHECK(draw(logits, options, index_with_uniform(3, 0.67, 0.75)) == 1);
  options.temperature = 0.5;  // 16 : 1
  CHECK(draw(logits, options, index_with_uniform(3, 0.85, 0.94)) == 0);
  CHECK(draw(logits, options, index_with_uniform(3, 0.945, 1.0)) == 1);
}

TEST_CASE("bad logits and options are refused") {
  CHECK_THROWS_WITH(draw({0.0F, NAN}, {}, 0), Catch::Contains("token 1"));
  CHECK_THROWS_AS(draw({0.0F, HUGE_VALF}, {}, 0), Error);
  CHECK_THROWS_AS(draw({-HUGE_VALF, -HUGE_VALF}, {.temperature = 0.0}, 0), Error);
  CHECK_THROWS_WITH(draw({0.0F}, {.temperature = -1.0}, 0), Catch::Contains("--temperature"));
  CHECK_THROWS_WITH(draw({0.0F}, {.temperature = NAN}, 0), Catch::Contains("--temperature"));
  CHECK_THROWS_WITH(draw({0.0F}, {.top_p = 0.0}, 0), Catch::Contains("--top-p"));
  CHECK_THROWS_WITH(draw({0.0F}, {.top_p = 1.5}, 0), Catch::Contains("--top-p"));
}
