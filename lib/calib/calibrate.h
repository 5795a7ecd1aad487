// Calibration: activations in, rotations (and what the recipe needs besides) out, with the error on
// held-out tokens.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/progress.h"
#include "calib/activation_source.h"
#include "calib/held_out.h"
#include "calib/rotation_fit.h"
#include "io/bundle_file.h"

namespace oscar {

// How rotations are made and rows are stored; a named recipe is a set of these.
struct RecipeOptions {
  std::string name = "official";
  KeyTarget key_target = KeyTarget::kQqt;
  ValueTarget value_target = ValueTarget::kProxy;
  RotationOptions rotation;
  bool center_keys = false;  // k_mean per head of positions >= sink
  double k_clip = 0.96, v_clip = 0.92;
};

// official  proxy C_S, one rotation for all heads, R = U H P, clip 0.96 / 0.92 (the published
// recipe) paper     the same with the exact C_S centered  official + key centering hadamard  R = H
RecipeOptions recipe_options(const std::string& name);  // throws Error listing the names
std::vector<std::string> recipe_names();

struct CalibrationOptions {
  std::vector<RecipeOptions> recipes;  // one bundle each, from one pass over the activations
  double held_out_fraction = 0.2;      // of the tokens, the last ones; 0 = none
  size_t held_out_max_tokens = 1024;   // of them measured per layer
  int group = 0;                       // quantization group of the comparison, 0 = head_dim
  size_t sink = 64;                    // tokens before it do not enter the means
  std::string options_json = "{}";     // recorded
};

// First held-out token: the last `fraction` of the tokens, moved to the nearest sequence boundary
// that leaves both parts non-empty; inside the last sequence when there is only one. Equal to the
// number of tokens when the fraction is 0.
size_t held_out_begin(const std::vector<size_t>& sequence_offsets, double fraction);

// One side of one layer on held-out tokens: error relative to the energy (keys: in the metric of
// the held-out C_Q, about the mean; values: weighted by the proxy weights), mean over heads.
struct SideReport {
  RelativeError calibrated, hadamard, identity;
  PairedDifference minus_hadamard;  // calibrated - hadamard
  bool beats_hadamard() const { return minus_hadamard.value < 0.0; }
};
struct LayerReport {
  size_t layer = 0;
  bool measured = false;  // false without held-out tokens
  SideReport k, v;
};
struct RecipeResult {
  Bundle bundle;
  std::vector<LayerReport> layers;
};
struct CalibrationResult {
  std::vector<RecipeResult> recipes;  // as in CalibrationOptions
  size_t tokens = 0, held_out_tokens = 0;
  std::vector<std::string> warnings;
};

CalibrationResult calibrate(ActivationSource& source, const CalibrationOptions& options,
                            const Progress& progress);

}  // namespace oscar
