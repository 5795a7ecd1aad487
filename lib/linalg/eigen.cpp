#include "linalg/eigen.h"

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace oscar {
namespace {

using RowMajor = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using ConstMap = Eigen::Map<const RowMajor>;

constexpr double kMaxOrthogonalityError = 1e-10;

Eigen::Index square_size(const TensorD& matrix, const std::string& what) {
  OSCAR_CHECK(matrix.shape.size() == 2 && matrix.shape[0] == matrix.shape[1] && matrix.shape[0] > 0,
              what, ": expected a square matrix, got ", to_string(matrix.shape));
  for (size_t i = 0; i < matrix.size(); ++i)
    OSCAR_CHECK(std::isfinite(matrix.values[i]), what, ": non-finite value at row ",
                i / matrix.shape[1], ", column ", i % matrix.shape[1]);
  return static_cast<Eigen::Index>(matrix.shape[0]);
}

}  // namespace

void canonicalise_signs(TensorD& columns) {
  const size_t rows = columns.extent(0), count = columns.extent(1);
  for (size_t c = 0; c < count; ++c) {
    size_t largest = 0;
    for (size_t r = 1; r < rows; ++r)
      if (std::abs(columns.values[r * count + c]) > std::abs(columns.values[largest * count + c]))
        largest = r;
    if (columns.values[largest * count + c] < 0.0)
      for (size_t r = 0; r < rows; ++r) columns.values[r * count + c] *= -1.0;
  }
}

SymmetricEigen eigen_symmetric(const TensorD& matrix, const std::string& what) {
  const Eigen::Index dim = square_size(matrix, what);
  const ConstMap stored(matrix.data(), dim, dim);
  const Eigen::MatrixXd symmetric = 0.5 * (stored + stored.transpose());
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(symmetric);
  OSCAR_CHECK(solver.info() == Eigen::Success, what, ": the eigen-solver did not converge");
  // The status does not report non-finite or non-orthogonal results.
  const Eigen::MatrixXd& vectors = solver.eigenvectors();
  OSCAR_CHECK(solver.eigenvalues().allFinite() && vectors.allFinite(), what,
              ": the eigen-solver returned non-finite values");
  const double error =
      (vectors.transpose() * vectors - Eigen::MatrixXd::Identity(dim, dim)).cwiseAbs().maxCoeff();
  OSCAR_CHECK(error <= kMaxOrthogonalityError, what,
              ": eigenvectors are not orthogonal, max |U^T U - I| = ", error);
  SymmetricEigen result;
  result.values.assign(solver.eigenvalues().data(), solver.eigenvalues().data() + dim);
  result.vectors = TensorD(matrix.shape);
  Eigen::Map<RowMajor>(result.vectors.data(), dim, dim) = vectors;
  canonicalise_signs(result.vectors);
  return result;
}

size_t numerical_rank(const std::vector<double>& eigenvalues, double tolerance) {
  const double largest =
      eigenvalues.empty() ? 0.0 : *std::max_element(eigenvalues.begin(), eigenvalues.end());
  return static_cast<size_t>(std::count_if(eigenvalues.begin(), eigenvalues.end(), [&](double l) {
    return largest > 0.0 && l > tolerance * largest;
  }));
}

TensorD congruence(const TensorD& matrix, const float* rotation) {
  const Eigen::Index dim = square_size(matrix, "metric");
  const ConstMap m(matrix.data(), dim, dim);
  const RowMajor r =
      Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>(
          rotation, dim, dim)
          .cast<double>();
  TensorD result(matrix.shape);
  Eigen::Map<RowMajor>(result.data(), dim, dim) = r.transpose() * m * r;
  return result;
}

TensorD cholesky(const TensorD& matrix, const std::string& what) {
  const Eigen::Index dim = square_size(matrix, what);
  const Eigen::LLT<Eigen::MatrixXd> solver(Eigen::MatrixXd(ConstMap(matrix.data(), dim, dim)));
  const Eigen::MatrixXd lower = solver.matrixL();
  OSCAR_CHECK(solver.info() == Eigen::Success && lower.allFinite(), what,
              ": not positive definite");
  TensorD result(matrix.shape);
  Eigen::Map<RowMajor>(result.data(), dim, dim) = lower;
  return result;
}

}  // namespace oscar
