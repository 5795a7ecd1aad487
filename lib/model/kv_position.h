// Position-aware centering: what the keys of a head share before RoPE is taken out of the stored
// rows and put back into the scores, at no stored byte.
//   stored (k_t - m - RoPE_t(b)) R,   score q' . stored + q . RoPE_t(b)
// with the side's plain mean m, which softmax ignores.
// With pairs i, j = i + rotary_dim / 2 and frequencies f_i
//   q . RoPE_t(b) = sum_i cos(t f_i) u_i + sin(t f_i) w_i,
//   u_i = q_i b_i + q_j b_j,  w_i = q_j b_i - q_i b_j,
// so one table of cosines and sines serves all layers and heads. Dims beyond the rotary width are
// constant over t: centered, and nothing is added back (softmax ignores a constant).
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "model/config.h"

namespace oscar {

// cos and sin of the positions of a cache, times the attention factor, in blocks of 64 keys. Grows
// with the cache; copies share what is there.
class RopePanels {
 public:
  // Makes sure that positions [0, num_positions) are covered.
  void extend(const RopeConfig& rope, size_t num_positions);
  // Block of 64 positions: [rotary_dim, 64], rows of cosines, then rows of sines.
  const float* panel(size_t block) const { return panels_[block]->data(); }

 private:
  std::vector<std::shared_ptr<const std::vector<float>>> panels_;
};

// out [num_rows, head_dim] = rows - RoPE_t(b) for t = position, position + 1, ... within one block.
//   rows    row_stride floats apart
//   panel   of the block, [rotary_dim, 64]
//   mean    b, [head_dim]
void subtract_position_mean(const float* panel, size_t rotary_dim, size_t position,
                            const float* rows, size_t row_stride, size_t num_rows, size_t head_dim,
                            const float* mean, float* out);

// One row of u, then w [rotary_dim] for a query [head_dim] in the model's coordinates, times scale.
void position_query(const float* query, const float* mean, size_t rotary_dim, float scale,
                    float* out);

// q . b over the dims beyond the rotary width: the constant that scores lack.
double unrotated_product(const float* query, const float* mean, size_t rotary_dim, size_t head_dim);

}  // namespace oscar
