#include <vector>

#include "calib/layer_fit.h"

namespace oscar {
namespace {

// Weight on |b|^2 relative to the energy of a turning unit vector: a pair that turns by less than
// about half a radian over the positions seen counts as constant.
constexpr double kRidge = 0.02;

}  // namespace

// For one pair as complex numbers, with T_t = a e^(i t f) (a = attention factor), c = mean T,
// K = mean k, B = mean of k before RoPE: the normal equations
//   a^2 B = a^2 b + conj(c) m,   K = c b + m
// give b = (a^2 B - conj(c) K) / (a^2 - |c|^2), m = K - c b.
void fit_position_center(const LayerStatistics& statistics, TensorF& mean, TensorF& offset) {
  const HeadGeometry& geometry = statistics.geometry();
  const std::vector<double> rope = statistics.mean_rope();
  const size_t dim = geometry.head_dim, half = rope.size() / 2;
  const double energy = statistics.rope_energy();
  mean = TensorF({geometry.num_kv_heads, dim}, 0.0F);
  offset = TensorF({geometry.num_kv_heads, dim}, 0.0F);
  for (size_t h = 0; h < geometry.num_kv_heads; ++h) {
    const std::vector<double> k = statistics.head(h).key_mean.mean();
    const std::vector<double> before = statistics.head(h).key_position_mean.mean();
    for (size_t i = 0; i < half; ++i) {
      const size_t j = i + half;
      const double re = rope[i], im = rope[j];
      const double scale = 1.0 / (energy * (1.0 + kRidge) - re * re - im * im);
      const double b_re = (energy * before[i] - (re * k[i] + im * k[j])) * scale;
      const double b_im = (energy * before[j] - (re * k[j] - im * k[i])) * scale;
      mean.at(h)[i] = static_cast<float>(b_re);
      mean.at(h)[j] = static_cast<float>(b_im);
      offset.at(h)[i] = static_cast<float>(k[i] - (re * b_re - im * b_im));
      offset.at(h)[j] = static_cast<float>(k[j] - (re * b_im + im * b_re));
    }
    for (size_t d = 2 * half; d < dim; ++d) offset.at(h)[d] = static_cast<float>(k[d]);
  }
}

}  // namespace oscar
