#include <catch2/catch.hpp>
#include <cmath>

#include "base/error.h"
#include "base/random.h"
#include "linalg/moments.h"
#include "linalg/rotation.h"
#include "support/compare.h"

using namespace oscar;
using Catch::Contains;

namespace {

TensorD random_covariance(uint64_t seed, size_t dim, size_t rows) {
  Random random(seed);
  std::vector<float> values(rows * dim);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(random.normal() * static_cast<double>(1 + i % dim));
  GramSum gram(dim);
  gram.add({values.data(), rows, dim, 1});
  return gram.mean();
}

TensorD transposed(const TensorD& matrix) {
  TensorD result({matrix.shape[1], matrix.shape[0]});
  for (size_t r = 0; r < matrix.shape[0]; ++r)
    for (size_t c = 0; c < matrix.shape[1]; ++c)
      result.values[c * matrix.shape[0] + r] = matrix.values[r * matrix.shape[1] + c];
  return result;
}

}  // namespace

TEST_CASE("eigenvectors diagonalise, ascend and have canonical signs") {
  for (const size_t dim : {2, 64, 96}) {
    const TensorD matrix = random_covariance(dim, dim, 3 * dim);
    const SymmetricEigen eigen = eigen_symmetric(matrix, "test");
    CHECK(std::is_sorted(eigen.values.begin(), eigen.values.end()));
    TensorD scaled = eigen.vectors;
    for (size_t i = 0; i < scaled.size(); ++i) scaled.values[i] *= eigen.values[i % dim];
    const TensorD back = matrix_product(scaled, transposed(eigen.vectors));
    CHECK_CLOSE(back.data(), matrix.data(), matrix.size(),
                {.absolute = 1e-11 * eigen.values.back()});
    for (size_t c = 0; c < dim; ++c) {
      double largest = 0.0;
      for (size_t r = 0; r < dim; ++r) {
        const double value = eigen.vectors.values[r * dim + c];
        if (std::abs(value) > std::abs(largest)) largest = value;
      }
      CHECK(largest > 0.0);
    }
  }
}

TEST_CASE("rank-deficient matrices are legal, broken ones are refused") {
  const SymmetricEigen eigen = eigen_symmetric(random_covariance(5, 32, 10), "test");
  CHECK(numerical_rank(eigen.values) == 10);
  CHECK(orthogonality_error(eigen.vectors) < 1e-12);
  CHECK(numerical_rank(eigen_symmetric(TensorD({8, 8}), "zero").values) == 0);
  TensorD broken({4, 4});
  broken.values[6] = NAN;
  CHECK_THROWS_WITH(eigen_symmetric(broken, "layer 3 C_Q"),
                    Contains("layer 3 C_Q") && Contains("row 1, column 2"));
  CHECK_THROWS_WITH(eigen_symmetric(TensorD({4, 3}), "x"), Contains("[4, 3]"));
}

TEST_CASE("Hadamard matrices") {
  const TensorD h2 = hadamard_matrix(2);
  const double r = std::sqrt(0.5);
  const std::vector<double> expected{r, r, r, -r};
  CHECK_CLOSE(h2.data(), expected.data(), 4, {.relative = 1e-15});
  for (const size_t dim : {1, 64, 128, 256}) {
    const TensorD h = hadamard_matrix(dim);
    CHECK(orthogonality_error(h) < 1e-13);
    CHECK(h.values == transposed(h).values);
  }
  CHECK_THROWS_WITH(hadamard_matrix(96), Contains("96") && Contains("blocks of 32"));
  const TensorD blocks = hadamard_matrix(96, HadamardForm::kBlock);
  CHECK(orthogonality_error(blocks) < 1e-13);
  CHECK(blocks.values[0 * 96 + 32] == 0.0);
  CHECK(blocks.values[95 * 96 + 94] != 0.0);
}

TEST_CASE("bit reversal as published") {
  CHECK(bit_reversal_permutation(4) == std::vector<size_t>{3, 1, 2, 0});
  CHECK(bit_reversal_permutation(8) == std::vector<size_t>{7, 3, 5, 1, 6, 2, 4, 0});
  CHECK_THROWS_AS(bit_reversal_permutation(12), Error);
}

TEST_CASE("all nine compositions") {
  constexpr size_t kDim = 16;
  const TensorD u = eigen_symmetric(random_covariance(9, kDim, 50), "test").vectors;
  const TensorD h = hadamard_matrix(kDim);
  TensorD p({kDim, kDim});
  const auto perm = bit_reversal_permutation(kDim);
  for (size_t j = 0; j < kDim; ++j) p.values[perm[j] * kDim + j] = 1.0;
  const auto product = [](const TensorD& a, const TensorD& b) { return matrix_product(a, b); };
  const std::pair<const char*, TensorD> expected[] = {{"r_h_pbr", product(product(u, h), p)},
                                                      {"plain", u},
                                                      {"pbr", p},
                                                      {"br", product(u, p)},
                                                      {"br_h128", product(product(u, p), h)},
                                                      {"r_h", product(u, h)},
                                                      {"h_pbr", product(h, p)},
                                                      {"h_r_pbr", product(product(h, u), p)},
                                                      {"h_pbr_r", product(product(h, p), u)}};
  CHECK(composition_names().size() == 9);
  for (const auto& [name, matrix] : expected) {
    INFO(name);
    CHECK(composition_name(parse_composition(name)) == std::string(name));
    const TensorD rotation = compose_rotation(parse_composition(name), u);
    CHECK_CLOSE(rotation.data(), matrix.data(), matrix.size(), {.absolute = 1e-14});
    CHECK(orthogonality_error(rotation) < 1e-12);
  }
  CHECK_THROWS_WITH(parse_composition("rhp"), Contains("h_pbr_r"));
}

TEST_CASE("a sign pattern multiplies the eigenvectors, block form for other widths") {
  constexpr size_t kDim = 12;
  const TensorD u = eigen_symmetric(random_covariance(11, kDim, 50), "test").vectors;
  std::vector<int8_t> signs(kDim, 1);
  signs[3] = -1;
  const TensorD flipped = compose_rotation(Composition::kPlain, u, HadamardForm::kFull, signs);
  for (size_t i = 0; i < u.size(); ++i)
    CHECK(flipped.values[i] == (i % kDim == 3 ? -u.values[i] : u.values[i]));
  CHECK_THROWS_AS(compose_rotation(Composition::kRHPbr, u), Error);
  CHECK(orthogonality_error(compose_rotation(Composition::kRHPbr, u, HadamardForm::kBlock)) <
        1e-12);
}

TEST_CASE("congruence and Cholesky") {
  constexpr size_t kDim = 24;
  const TensorD m = random_covariance(13, kDim, 100);
  const TensorD u = eigen_symmetric(random_covariance(14, kDim, 100), "test").vectors;
  const std::vector<float> r = to_float(u);
  TensorD rounded = u;
  for (size_t i = 0; i < u.size(); ++i) rounded.values[i] = static_cast<double>(r[i]);
  const TensorD expected = matrix_product(matrix_product(transposed(rounded), m), rounded);
  CHECK_CLOSE(congruence(m, r.data()).data(), expected.data(), m.size(),
              {.absolute = 1e-11, .relative = 1e-12});
  const TensorD c = cholesky(m, "m");
  CHECK(c.values[1] == 0.0);
  const TensorD back = matrix_product(c, transposed(c));
  CHECK_CLOSE(back.data(), m.data(), m.size(), {.absolute = 1e-11, .relative = 1e-12});
  CHECK_THROWS_WITH(cholesky(random_covariance(15, kDim, 5), "head 2"), Contains("head 2"));
}
