// W_O as the attention heads see it: W_q = W_O,q^T W_O,q for the [hidden, D] slice of every query
// head, the energy an error of that head's output has after the projection.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "base/tensor.h"
#include "model/weights.h"

namespace oscar {

// Per query head [D, D], double; e W_q e^T is the energy of output error e [1, D].
using OutputEnergy = std::vector<TensorD>;

// Of one layer; expanded from the stored type by blocks of rows.
std::shared_ptr<const OutputEnergy> output_energy(const ModelWeights& weights, size_t layer);
// W_q = I for every head: used where the weights are not at hand.
std::shared_ptr<const OutputEnergy> identity_energy(size_t num_heads, size_t head_dim);

// M_V of every KV head [Hkv] of [D, D]: sum of W_q over its query group.
std::vector<TensorD> value_metrics(const OutputEnergy& energy, size_t num_kv_heads);

}  // namespace oscar
