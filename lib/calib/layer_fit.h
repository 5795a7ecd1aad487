// From one layer's statistics to its part of the bundles.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "calib/layer_moments.h"
#include "calib/recipes.h"
#include "io/bundle_file.h"

namespace oscar {

// One side of one layer on held-out tokens: error relative to the energy (keys: in the metric of
// the held-out C_Q, about the mean; values: weighted by the proxy weights), mean over heads.
struct SideReport {
  RelativeError calibrated, hadamard, identity;
  PairedDifference minus_hadamard;  // calibrated - hadamard
  bool beats_hadamard() const { return minus_hadamard.value < 0.0; }
};

// One candidate of the contest: attention-output error relative to the output energy.
struct ContestEntry {
  // "shared", "per-head", "hadamard", with "~N" for sign pattern N and "+mean" where centered
  std::string name;
  double error = 0.0;                  // relative
  double minus_first = 0.0, se = 0.0;  // paired difference to the first candidate, by query token
};
// Decision for one side of one KV head.
struct HeadDecision {
  std::vector<ContestEntry> entries;  // the first is the default
  size_t chosen = 0;
  // Sets of multipliers under the chosen form; the first is the arm's. Empty: no choice was given.
  std::vector<ContestEntry> multipliers;
  size_t chosen_multipliers = 0;
  double error = 0.0;           // the chosen form with the encoder of the recipe's arm
  double centered_error = 0.0;  // recipe `centered` (rounding to nearest) on the same rows
  double centered_difference = 0.0, centered_se = 0.0;  // error - centered_error, paired
  // Keys: the chosen form centered by position; negative = not measured.
  double position_error = -1.0;
};

// One side of one layer against the recipe `centered`: mean over heads; the error takes the heads
// as independent, which makes it the stricter bound where they are alike.
struct LayerComparison {
  double difference = 0.0, standard_error = 0.0;
  bool worse() const { return difference > standard_error; }
};
LayerComparison minus_centered(const std::vector<HeadDecision>& decisions);
// Both sides of a layer: their errors add up to first order.
LayerComparison sum(const LayerComparison& keys, const LayerComparison& values);

struct LayerReport {
  size_t layer = 0;
  bool measured = false;  // false without held-out tokens
  SideReport k, v;
  std::vector<HeadDecision> k_decisions, v_decisions;  // [Hkv] or empty: no contest
};

struct LayerFitOptions {
  int group = 0;
  ContestOptions contest;
};

struct LayerInputs {
  size_t layer = 0;
  const LayerMoments* moments = nullptr;
  bool energy_known = false;  // false: W_O is the identity, weights not given
};

// A rotation that competes with the layer's own, [1 or Hkv, D, D].
struct RotationCandidate {
  std::string name;
  TensorF k, v;
};

// Fits recipes; what several of them share is computed once. Throws Error naming layer and
// statistic when a recipe needs one that was not collected.
class LayerFit {
 public:
  LayerFit(const LayerInputs& inputs, const LayerFitOptions& options);  // of a live LayerMoments
  BundleLayer fit(const RecipeOptions& recipe, LayerReport& report,
                  std::vector<std::string>& warnings);

 private:
  struct HeldOut {
    std::vector<TensorD> c_q;                  // [Hkv] of [D, D]
    std::vector<std::vector<double>> weights;  // [Hkv] of [num_tokens], mean 1
  };
  void prepare_held_out();
  void require(bool collected, const char* what) const;
  const std::vector<TensorD>& keys(KeyTarget target);
  const std::vector<TensorD>& values(ValueTarget target);
  TensorD key_metric(KeyMetric kind, size_t head) const;
  void add_metrics(const RecipeOptions& recipe, BundleLayer& layer,
                   std::vector<std::string>& warnings) const;
  std::vector<RotationCandidate> rotation_candidates(const RecipeOptions& recipe);
  void decide(const RecipeOptions& recipe, BundleLayer& layer, LayerReport& report,
              std::vector<std::string>& warnings);
  void warn_about_rank(const RecipeOptions& recipe, const BundleLayer& layer,
                       std::vector<std::string>& warnings) const;
  void measure(const RecipeOptions& recipe, const BundleLayer& layer, LayerReport& report) const;
  SideReport measure_side(const std::vector<float>& x, const TensorF& rotation, const TensorF& mean,
                          double clip, HadamardForm form, const ErrorWeights& weights,
                          bool centered_energy) const;

  const LayerInputs inputs_;
  const LayerFitOptions options_;
  HeadGeometry geometry_;
  std::optional<HeldOut> held_out_;
  std::map<KeyTarget, std::vector<TensorD>> keys_;
  std::map<ValueTarget, std::vector<TensorD>> values_;
};

// Means [Hkv, D] of one kind as stored.
TensorF mean_rows(const LayerStatistics& statistics, RowSum HeadStatistics::*kind);

// Position-aware centering: b and m [Hkv, D] of every head, the least-squares fit of k_t =
// RoPE_t(b)
// + m with a small weight on |b|^2, so that dims which hardly turn over the positions seen keep
// their constant in m. Needs LayerStatistics::has_position_means().
void fit_position_center(const LayerStatistics& statistics, TensorF& mean, TensorF& offset);

// The contest of one layer: candidate rotations and means of every head, measured and chosen; fills
// in rotations, value means, scale constants and the decisions.
struct DecisionInputs {
  const ContestData* contest = nullptr;
  const OutputEnergy* energy = nullptr;
  const RecipeOptions* recipe = nullptr;
  std::vector<RotationCandidate> rotations;
  TensorF v_mean;                   // [Hkv, D]
  const RopeTable* rope = nullptr;  // where the layer has position means
};
// Heads whose keys position-aware centering does not help get b = 0 and the plain mean as m.
void decide_by_contest(const DecisionInputs& inputs, BundleLayer& layer, LayerReport& report);

}  // namespace oscar
