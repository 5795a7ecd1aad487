#include "calib/output_projection.h"

#include <algorithm>

#include "base/error.h"
#include "base/parallel.h"
#include "linalg/moments.h"

namespace oscar {

std::shared_ptr<const OutputEnergy> output_energy(const ModelWeights& weights, size_t layer) {
  const WeightMatrix& w_o = weights.layers.at(layer).o;
  const size_t num_heads = weights.config.num_heads, dim = weights.config.head_dim;
  OSCAR_CHECK(w_o.present() && w_o.columns == num_heads * dim, weights.source_path, ": layer ",
              layer, ": output projection [", w_o.rows, ", ", w_o.columns, "], expected ",
              num_heads * dim, " columns");
  std::vector<GramSum> grams(num_heads, GramSum(dim));
  constexpr size_t kBlockRows = 256;
  std::vector<float> rows(kBlockRows * w_o.columns);
  for (size_t first = 0; first < w_o.rows; first += kBlockRows) {
    const size_t count = std::min(kBlockRows, w_o.rows - first);
    parallel_for(count, [&](size_t r) {
      dequantize_row(w_o.type, w_o.row(first + r), w_o.columns, rows.data() + r * w_o.columns);
    });
    parallel_for(num_heads, [&](size_t head) {
      grams[head].add({rows.data() + head * dim, count, w_o.columns, 1});
    });
  }
  auto energy = std::make_shared<OutputEnergy>();
  for (const GramSum& gram : grams) energy->push_back(gram.sum());
  return energy;
}

std::shared_ptr<const OutputEnergy> identity_energy(size_t num_heads, size_t head_dim) {
  TensorD identity({head_dim, head_dim});
  for (size_t i = 0; i < head_dim; ++i) identity.values[i * head_dim + i] = 1.0;
  return std::make_shared<const OutputEnergy>(num_heads, identity);
}

std::vector<TensorD> value_metrics(const OutputEnergy& energy, size_t num_kv_heads) {
  const size_t group = energy.size() / num_kv_heads;
  std::vector<TensorD> metrics;
  for (size_t h = 0; h < num_kv_heads; ++h) {
    metrics.push_back(energy[h * group]);
    for (size_t g = 1; g < group; ++g)
      for (size_t i = 0; i < metrics[h].size(); ++i)
        metrics[h].values[i] += energy[h * group + g].values[i];
  }
  return metrics;
}

}  // namespace oscar
