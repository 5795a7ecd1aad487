// Collects the statistics of a batch of layers while a source shows them, calibration and held-out
// tokens apart.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "calib/activation_source.h"
#include "calib/layer_moments.h"

namespace oscar {

using Energies = std::map<size_t, std::shared_ptr<const OutputEnergy>>;  // by layer

class Collector : public LayerObserver {
 public:
  // energies: of every layer where metrics are asked for, else it may be empty.
  Collector(const ActivationSource& source, const std::vector<size_t>& layers,
            const StatisticsOptions& options, const MetricOptions& metric_options,
            const Energies& energies, size_t held_out_from);

  void on_layer(const LayerActivations& activations) override;

  // Sums only; what is read from kept rows (proxy, held-out samples) comes afterwards.
  LayerMoments& layer(size_t layer) { return layers_.at(layer); }
  const std::map<size_t, LayerMoments>& layers() const { return layers_; }
  // Goes on from stored sums of the same kinds.
  void restore(size_t layer, const MomentsLayer& stored, const ContestOptions& windows);

 private:
  void check_heads(const LayerActivations& activations) const;

  HeadGeometry geometry_;
  const std::vector<size_t>& offsets_;
  size_t split_;
  bool with_metrics_;
  std::map<size_t, LayerMoments> layers_;
};

}  // namespace oscar
