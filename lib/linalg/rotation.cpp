#include "linalg/rotation.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "linalg/blas.h"

namespace oscar {
namespace {

constexpr std::pair<Composition, const char*> kNames[] = {
    {Composition::kRHPbr, "r_h_pbr"},  {Composition::kPlain, "plain"},
    {Composition::kPbr, "pbr"},        {Composition::kBr, "br"},
    {Composition::kBrH128, "br_h128"}, {Composition::kRH, "r_h"},
    {Composition::kHPbr, "h_pbr"},     {Composition::kHRPbr, "h_r_pbr"},
    {Composition::kHPbrR, "h_pbr_r"}};

TensorD permute_columns(const TensorD& matrix, const std::vector<size_t>& perm) {
  const size_t rows = matrix.extent(0), columns = matrix.extent(1);
  TensorD result(matrix.shape);
  for (size_t r = 0; r < rows; ++r)
    for (size_t c = 0; c < columns; ++c)
      result.values[r * columns + c] = matrix.values[r * columns + perm[c]];
  return result;
}

}  // namespace

TensorD hadamard_matrix(size_t dim, HadamardForm form) {
  OSCAR_CHECK(dim > 0, "a Hadamard matrix needs a positive width");
  const size_t block = dim & (~dim + 1);  // largest power of two that divides dim
  OSCAR_CHECK(
      block == dim || form == HadamardForm::kBlock, "no Sylvester Hadamard matrix of width ", dim,
      ": expected a power of two (the block form, blocks of ", block, ", must be asked for)");
  TensorD matrix({dim, dim});
  const double scale = 1.0 / std::sqrt(static_cast<double>(block));
  for (size_t r = 0; r < dim; ++r)
    for (size_t c = r / block * block; c < (r / block + 1) * block; ++c)
      matrix.values[r * dim + c] =
          std::popcount((r % block) & (c % block)) % 2 == 0 ? scale : -scale;
  return matrix;
}

std::vector<size_t> bit_reversal_permutation(size_t dim) {
  OSCAR_CHECK(std::has_single_bit(dim), "no bit reversal of width ", dim,
              ": expected a power of two");
  const int bits = std::countr_zero(dim);
  std::vector<size_t> perm(dim);
  for (size_t j = 0; j < dim; ++j) {
    size_t reversed = 0;
    for (int b = 0; b < bits; ++b) reversed |= ((j >> b) & 1U) << (bits - 1 - b);
    perm[j] = dim - 1 - reversed;
  }
  return perm;
}

const char* composition_name(Composition composition) {
  for (const auto& [value, name] : kNames)
    if (value == composition) return name;
  return "?";
}

std::vector<std::string> composition_names() {
  std::vector<std::string> names;
  for (const auto& [value, name] : kNames) names.emplace_back(name);
  return names;
}

Composition parse_composition(const std::string& text) {
  std::string known;
  for (const auto& [value, name] : kNames) {
    if (text == name) return value;
    known += std::string(known.empty() ? "" : ", ") + name;
  }
  fail("unknown composition \"", text, "\", expected one of: ", known);
}

TensorD compose_rotation(Composition composition, const TensorD& eigenvectors, HadamardForm form,
                         const std::vector<int8_t>& signs) {
  const size_t dim = eigenvectors.extent(0);
  TensorD u = eigenvectors;
  OSCAR_CHECK(signs.empty() || signs.size() == dim, "sign pattern of ", signs.size(),
              " entries for width ", dim);
  for (size_t i = 0; i < u.size() && !signs.empty(); ++i)
    u.values[i] *= static_cast<double>(signs[i % dim]);
  const auto h = [&] { return hadamard_matrix(dim, form); };
  const auto p = [&](const TensorD& matrix) {
    if (form == HadamardForm::kBlock && !std::has_single_bit(dim)) return matrix;
    return permute_columns(matrix, bit_reversal_permutation(dim));
  };
  const auto identity = [&] {
    TensorD matrix({dim, dim});
    for (size_t i = 0; i < dim; ++i) matrix.values[i * dim + i] = 1.0;
    return matrix;
  };
  switch (composition) {
    case Composition::kRHPbr:
      return p(matrix_product(u, h()));
    case Composition::kPlain:
      return u;
    case Composition::kPbr:
      return p(identity());
    case Composition::kBr:
      return p(u);
    case Composition::kBrH128:
      return matrix_product(p(u), h());
    case Composition::kRH:
      return matrix_product(u, h());
    case Composition::kHPbr:
      return p(h());
    case Composition::kHRPbr:
      return p(matrix_product(h(), u));
    case Composition::kHPbrR:
      return matrix_product(p(h()), u);
  }
  fail("unknown composition");
}

double orthogonality_error(const TensorD& rotation) {
  const size_t dim = rotation.extent(0);
  double worst = 0.0;
  for (size_t i = 0; i < dim; ++i)
    for (size_t j = 0; j <= i; ++j) {
      double dot = i == j ? -1.0 : 0.0;
      for (size_t c = 0; c < dim; ++c)
        dot += rotation.values[i * dim + c] * rotation.values[j * dim + c];
      worst = std::max(worst, std::abs(dot));
    }
  return worst;
}

TensorD matrix_product(const TensorD& a, const TensorD& b) {
  OSCAR_CHECK(a.shape.size() == 2 && b.shape.size() == 2 && a.shape[1] == b.shape[0],
              "cannot multiply ", to_string(a.shape), " and ", to_string(b.shape));
  TensorD result({a.shape[0], b.shape[1]});
  blas::multiply(a.data(), b.data(), a.shape[0], a.shape[1], b.shape[1], result.data());
  return result;
}

std::vector<float> to_float(const TensorD& matrix) {
  std::vector<float> result(matrix.size());
  for (size_t i = 0; i < result.size(); ++i) result[i] = static_cast<float>(matrix.values[i]);
  return result;
}

}  // namespace oscar
