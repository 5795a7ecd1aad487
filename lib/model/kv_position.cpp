#include "model/kv_position.h"

#include <algorithm>

#include "model/attention_kernels.h"
#include "model/rope.h"

namespace oscar {

void RopePanels::extend(const RopeConfig& rope, size_t num_positions) {
  const size_t half = rope.rotary_dim / 2;
  for (size_t block = panels_.size(); block * kKeyBlock < num_positions; ++block) {
    const RopeTable table = make_rope_table(rope, block * kKeyBlock, kKeyBlock);
    auto panel = std::make_shared<std::vector<float>>(rope.rotary_dim * kKeyBlock);
    for (size_t t = 0; t < kKeyBlock; ++t) {
      for (size_t i = 0; i < half; ++i) {
        (*panel)[i * kKeyBlock + t] = table.cos[t * half + i];
        (*panel)[(half + i) * kKeyBlock + t] = table.sin[t * half + i];
      }
    }
    panels_.push_back(std::move(panel));
  }
}

void subtract_position_mean(const float* panel, size_t rotary_dim, size_t position,
                            const float* rows, size_t row_stride, size_t num_rows, size_t head_dim,
                            const float* mean, float* out) {
  const size_t half = rotary_dim / 2;
  for (size_t r = 0; r < num_rows; ++r) {
    const float* row = rows + r * row_stride;
    float* target = out + r * head_dim;
    const float* at = panel + (position + r) % kKeyBlock;
    for (size_t i = 0; i < half; ++i) {
      const float cos = at[i * kKeyBlock], sin = at[(half + i) * kKeyBlock];
      target[i] = row[i] - (mean[i] * cos - mean[half + i] * sin);
      target[half + i] = row[half + i] - (mean[half + i] * cos + mean[i] * sin);
    }
    for (size_t d = rotary_dim; d < head_dim; ++d) target[d] = row[d] - mean[d];
  }
}

void position_query(const float* query, const float* mean, size_t rotary_dim, float scale,
                    float* out) {
  const size_t half = rotary_dim / 2;
  for (size_t i = 0; i < half; ++i) {
    const size_t j = i + half;
    out[i] = (query[i] * mean[i] + query[j] * mean[j]) * scale;
    out[j] = (query[j] * mean[i] - query[i] * mean[j]) * scale;
  }
}

double unrotated_product(const float* query, const float* mean, size_t rotary_dim,
                         size_t head_dim) {
  double product = 0.0;
  for (size_t d = rotary_dim; d < head_dim; ++d) product += static_cast<double>(query[d]) * mean[d];
  return product;
}

}  // namespace oscar
