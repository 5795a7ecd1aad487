// The reference dumps and rotations of the published script (shared fixtures), as calibration
// input.
#pragma once

#include <string>
#include <vector>

#include "base/float16.h"
#include "calib/activation_rows.h"
#include "calib/statistics.h"
#include "io/hdf5_file.h"
#include "support/paths.h"

namespace oscar_test {

struct OfficialLayer {
  oscar::HeadGeometry geometry;
  std::vector<float> q, k, v;  // [T, heads, D]
  size_t num_tokens = 0;
};

inline std::vector<float> bf16_dataset(const oscar::Hdf5File& file, const std::string& name,
                                       oscar::Shape* shape) {
  const auto bits = file.read<uint16_t>(name, 3);
  *shape = bits.shape;
  std::vector<float> values(bits.size());
  oscar::bf16_to_float(bits.data(), bits.size(), values.data());
  return values;
}

inline OfficialLayer official_layer(const oscar::Hdf5File& file, const std::string& id) {
  OfficialLayer layer;
  oscar::Shape q_shape, k_shape;
  layer.q = bf16_dataset(file, "/layers/" + id + "/q", &q_shape);
  layer.k = bf16_dataset(file, "/layers/" + id + "/k", &k_shape);
  layer.v = bf16_dataset(file, "/layers/" + id + "/v", &k_shape);
  layer.geometry = {q_shape[1], k_shape[1], q_shape[2]};
  layer.num_tokens = q_shape[0];
  return layer;
}

// Rows of one layer in memory.
class MemoryRows : public oscar::ActivationRows {
 public:
  explicit MemoryRows(const OfficialLayer& layer) : layer_(layer) {}
  void read(size_t, oscar::CaptureTensor tensor, size_t begin, size_t end,
            float* destination) const override {
    const bool is_q = tensor == oscar::CaptureTensor::kQ;
    const std::vector<float>& rows = is_q                                 ? layer_.q
                                     : tensor == oscar::CaptureTensor::kK ? layer_.k
                                                                          : layer_.v;
    const size_t row = (is_q ? layer_.geometry.num_heads : layer_.geometry.num_kv_heads) *
                       layer_.geometry.head_dim;
    std::copy(rows.begin() + static_cast<std::ptrdiff_t>(begin * row),
              rows.begin() + static_cast<std::ptrdiff_t>(end * row), destination);
  }

 private:
  const OfficialLayer& layer_;
};

}  // namespace oscar_test
