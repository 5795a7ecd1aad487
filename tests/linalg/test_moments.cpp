#include <catch2/catch.hpp>

#include "base/error.h"
#include "base/random.h"
#include "linalg/moments.h"
#include "support/compare.h"

using namespace oscar;

namespace {

std::vector<float> random_rows(uint64_t seed, size_t count) {
  Random random(seed);
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(random.normal());
  return values;
}

}  // namespace

TEST_CASE("Gram sums agree with direct sums, with strides, groups and weights") {
  // 20: BLAS on every machine; 48: the AVX-512 kernels where the processor has them.
  const size_t kDim = GENERATE(size_t{20}, size_t{48});
  constexpr size_t kTokens = 613, kHeads = 6, kGroup = 3;
  const auto q = random_rows(1, kTokens * kHeads * kDim);
  std::vector<double> weights(kTokens * kGroup);
  Random random(2);
  for (double& weight : weights) weight = random.uniform();
  for (const bool weighted : {false, true}) {
    GramSum gram(kDim);
    RowSum row_sum(kDim);
    const RowBlock block{q.data() + kGroup * kDim, kTokens, kHeads * kDim, kGroup};
    gram.add(block, weighted ? weights.data() : nullptr);
    row_sum.add(block);
    std::vector<double> expected(kDim * kDim), expected_sum(kDim);
    for (size_t t = 0; t < kTokens; ++t)
      for (size_t g = 0; g < kGroup; ++g) {
        const float* x = q.data() + (t * kHeads + kGroup + g) * kDim;
        const double w = weighted ? weights[t * kGroup + g] : 1.0;
        for (size_t i = 0; i < kDim; ++i) {
          expected_sum[i] += static_cast<double>(x[i]);
          for (size_t j = 0; j < kDim; ++j)
            expected[i * kDim + j] += w * static_cast<double>(x[i]) * static_cast<double>(x[j]);
        }
      }
    CHECK(gram.count() == kTokens * kGroup);
    CHECK_CLOSE(gram.sum().data(), expected.data(), expected.size(),
                {.absolute = 1e-11, .relative = 1e-12});
    CHECK_CLOSE(row_sum.sum().data(), expected_sum.data(), kDim, {.absolute = 1e-11});
  }
}

TEST_CASE("moments do not depend on how tokens are cut, and merge") {
  constexpr size_t kTokens = 1000, kDim = 32;
  const auto k = random_rows(3, kTokens * kDim);
  GramSum whole(kDim), pieces(kDim), front(kDim), back(kDim);
  whole.add({k.data(), kTokens, kDim, 1});
  for (size_t begin = 0, step = 1; begin < kTokens; begin += step, step = step * 2 + 1)
    pieces.add({k.data() + begin * kDim, std::min(step, kTokens - begin), kDim, 1});
  front.add({k.data(), 400, kDim, 1});
  back.add({k.data() + 400 * kDim, kTokens - 400, kDim, 1});
  front.merge(back);
  const TensorD expected = whole.mean();
  CHECK_CLOSE(pieces.mean().data(), expected.data(), expected.size(),
              {.absolute = 1e-13, .relative = 1e-12});
  CHECK_CLOSE(front.mean().data(), expected.data(), expected.size(),
              {.absolute = 1e-13, .relative = 1e-12});
  CHECK(GramSum::from(whole.sum(), whole.count()).mean().values == expected.values);
  CHECK_THROWS_AS(GramSum(kDim).mean(), Error);
  CHECK_THROWS_AS(front.merge(GramSum(kDim + 1)), Error);
}

TEST_CASE("quadratic forms of rows") {
  constexpr size_t kTokens = 300, kDim = 8;
  const auto k = random_rows(4, kTokens * kDim);
  GramSum gram(kDim);
  gram.add({k.data(), 50, kDim, 1});
  const TensorD matrix = gram.mean();
  std::vector<double> forms(kTokens), expected(kTokens);
  quadratic_forms({k.data(), kTokens, kDim, 1}, matrix, forms.data());
  for (size_t t = 0; t < kTokens; ++t)
    for (size_t i = 0; i < kDim; ++i)
      for (size_t j = 0; j < kDim; ++j)
        expected[t] += static_cast<double>(k[t * kDim + i]) * matrix.values[i * kDim + j] *
                       static_cast<double>(k[t * kDim + j]);
  CHECK_CLOSE(forms.data(), expected.data(), kTokens, {.relative = 1e-12});
}

TEST_CASE("the worked vector of the format description") {
  // T = 3, Hq = 2, Hkv = 1, D = 2.
  const std::vector<float> q{2, 0, 1, 1, 0, 1, 1, -1, 1, 0, 0, 2};
  const std::vector<float> k{1, 0, 1, 1, 0, 2}, v{1, 2, 0, 1, 3, 0};
  GramSum queries(2);
  queries.add({q.data(), 3, 4, 2});
  const TensorD s_k = queries.mean();
  const double seventh = 7.0 / 6.0;
  const std::vector<double> expected_k{seventh, 0, 0, seventh};
  CHECK_CLOSE(s_k.data(), expected_k.data(), 4, {.absolute = 1e-15});
  std::vector<double> w(3);
  quadratic_forms({k.data(), 3, 2, 1}, s_k, w.data());
  const std::vector<double> expected_w{7.0 / 6, 7.0 / 3, 14.0 / 3};
  CHECK_CLOSE(w.data(), expected_w.data(), 3, {.relative = 1e-15});
  const double total = w[0] + w[1] + w[2];
  for (double& weight : w) weight *= 3.0 / total;
  GramSum values(2);
  values.add({v.data(), 3, 2, 1}, w.data());
  const std::vector<double> expected_v{37.0 / 7, 2.0 / 7, 2.0 / 7, 6.0 / 7};
  CHECK_CLOSE(values.mean().data(), expected_v.data(), 4, {.relative = 1e-14});
}
