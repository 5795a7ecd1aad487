#include "calib/rotation_fit.h"

#include <algorithm>

#include "base/error.h"
#include "base/parallel.h"
#include "base/random.h"

namespace oscar {
namespace {

constexpr size_t kChunkTokens = 8192;  // keys and values read at once
constexpr size_t kItemTokens = 2048;   // tokens of one work item

TensorD mean_of(const std::vector<TensorD>& matrices) {
  TensorD mean(matrices.at(0).shape);
  for (const TensorD& matrix : matrices)
    for (size_t i = 0; i < mean.size(); ++i) mean.values[i] += matrix.values[i];
  for (double& value : mean.values) value /= static_cast<double>(matrices.size());
  return mean;
}

std::vector<TensorD> means(const LayerStatistics& statistics, GramSum HeadStatistics::*kind) {
  std::vector<TensorD> result;
  for (size_t h = 0; h < statistics.geometry().num_kv_heads; ++h)
    result.push_back((statistics.head(h).*kind).mean());
  return result;
}

TensorD identity(size_t dim) {
  TensorD result({dim, dim});
  for (size_t i = 0; i < dim; ++i) result.values[i * dim + i] = 1.0;
  return result;
}

std::vector<int8_t> sign_pattern(uint64_t seed, size_t dim) {
  std::vector<int8_t> signs;
  if (seed == 0) return signs;
  for (size_t i = 0; i < dim; ++i) signs.push_back(uniform_at(seed, i) < 0.5 ? -1 : 1);
  return signs;
}

}  // namespace

KeyTarget parse_key_target(const std::string& name) {
  if (name == "qqt") return KeyTarget::kQqt;
  if (name == "ktk") return KeyTarget::kKtk;
  fail("unknown key target \"", name, "\", expected qqt or ktk");
}

ValueTarget parse_value_target(const std::string& name) {
  if (name == "sst") return ValueTarget::kSst;
  if (name == "proxy") return ValueTarget::kProxy;
  if (name == "vtv") return ValueTarget::kVtv;
  fail("unknown value target \"", name, "\", expected sst, proxy or vtv");
}

const char* target_name(KeyTarget target) { return target == KeyTarget::kQqt ? "qqt" : "ktk"; }

const char* target_name(ValueTarget target) {
  switch (target) {
    case ValueTarget::kSst:
      return "sst";
    case ValueTarget::kProxy:
      return "proxy";
    case ValueTarget::kVtv:
      return "vtv";
  }
  return "?";
}

std::vector<TensorD> key_covariances(const LayerStatistics& statistics, KeyTarget target) {
  return means(statistics,
               target == KeyTarget::kQqt ? &HeadStatistics::queries : &HeadStatistics::keys);
}

// The published proxy is V^T diag(w) V / sum(w): weights of mean 1, divided by T.
std::vector<TensorD> value_covariances(const LayerStatistics& statistics, ValueTarget target,
                                       const std::vector<GramSum>& proxy) {
  switch (target) {
    case ValueTarget::kSst:
      return means(statistics, &HeadStatistics::outputs);
    case ValueTarget::kVtv:
      return means(statistics, &HeadStatistics::values);
    case ValueTarget::kProxy:
      break;
  }
  std::vector<TensorD> result;
  for (const GramSum& sum : proxy) result.push_back(sum.mean());
  return result;
}

std::vector<GramSum> proxy_sums(const LayerStatistics& statistics, const ActivationRows& rows,
                                size_t layer, size_t num_tokens) {
  const HeadGeometry& geometry = statistics.geometry();
  const size_t num_heads = geometry.num_kv_heads, row = num_heads * geometry.head_dim;
  const std::vector<TensorD> c_q = means(statistics, &HeadStatistics::queries);
  constexpr size_t kItems = kChunkTokens / kItemTokens;
  std::vector<GramSum> grams(num_heads * kItems, GramSum(geometry.head_dim));
  std::vector<double> weight_sums(num_heads * kItems, 0.0);
  std::vector<float> k(std::min(kChunkTokens, num_tokens) * row), v(k.size());
  for (size_t first = 0; first < num_tokens; first += kChunkTokens) {
    const size_t count = std::min(kChunkTokens, num_tokens - first);
    rows.read(layer, CaptureTensor::kK, first, first + count, k.data());
    rows.read(layer, CaptureTensor::kV, first, first + count, v.data());
    parallel_for(num_heads * kItems, [&](size_t item) {
      const size_t h = item / kItems, begin = item % kItems * kItemTokens;
      if (begin >= count) return;
      const size_t tokens = std::min(kItemTokens, count - begin);
      std::vector<double> weights(tokens);
      proxy_weights(geometry, k.data() + begin * row, tokens, h, c_q[h], weights.data());
      for (const double weight : weights) weight_sums[item] += weight;
      grams[item].add(head_rows(geometry, v.data(), h, begin, begin + tokens), weights.data());
    });
  }
  std::vector<GramSum> result;
  for (size_t h = 0; h < num_heads; ++h) {
    double weight_sum = 0.0;
    for (size_t i = 0; i < kItems; ++i) {
      weight_sum += weight_sums[h * kItems + i];
      if (i > 0) grams[h * kItems].merge(grams[h * kItems + i]);
    }
    result.push_back(GramSum::from(grams[h * kItems].sum(), std::max(weight_sum, 1e-12)));
  }
  return result;
}

void proxy_weights(const HeadGeometry& geometry, const float* k, size_t num_tokens, size_t kv_head,
                   const TensorD& c_q, double* weights) {
  quadratic_forms(head_rows(geometry, k, kv_head, 0, num_tokens), c_q, weights);
  for (size_t t = 0; t < num_tokens; ++t) weights[t] = std::max(weights[t], 0.0);
}

FittedRotation fit_rotation(const std::vector<TensorD>& covariances, const RotationOptions& options,
                            const std::string& what) {
  const std::vector<TensorD> matrices =
      options.per_head ? covariances : std::vector<TensorD>{mean_of(covariances)};
  const size_t count = matrices.size(), dim = matrices[0].extent(0);
  FittedRotation fitted{TensorF({count, dim, dim}), TensorD({count, dim}, 1.0),
                        TensorD({count, dim, dim})};
  const std::vector<int8_t> signs = sign_pattern(options.sign_pattern, dim);
  const auto names = [&](size_t h) { return options.per_head ? cat(what, ", head ", h) : what; };
  parallel_for(count, [&](size_t h) {
    TensorD rotation;
    if (options.hadamard) {
      rotation = compose_rotation(Composition::kRH, identity(dim), options.form, signs);
    } else {
      const SymmetricEigen eigen = eigen_symmetric(matrices[h], names(h));
      std::copy(eigen.values.begin(), eigen.values.end(), fitted.eigenvalues.at(h));
      std::copy(eigen.vectors.values.begin(), eigen.vectors.values.end(), fitted.vectors.at(h));
      rotation = compose_rotation(options.composition, eigen.vectors, options.form, signs);
    }
    const std::vector<float> rounded = to_float(rotation);
    std::copy(rounded.begin(), rounded.end(), fitted.rotation.at(h));
  });
  return fitted;
}

}  // namespace oscar
