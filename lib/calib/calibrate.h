// Calibration: activations in, rotations (and what the recipe needs besides) out, with the error on
// held-out tokens.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/progress.h"
#include "calib/activation_source.h"
#include "calib/layer_fit.h"
#include "io/bundle_file.h"

namespace oscar {

struct CalibrationOptions {
  std::vector<RecipeOptions> recipes;  // one bundle each, from one pass over the activations
  double held_out_fraction = 0.2;      // of the tokens, the last ones; 0 = none
  size_t held_out_max_tokens = 1024;   // of them measured per layer
  int group = 0;                       // quantization group of the comparison, 0 = head_dim
  // Windows of the deployment: tokens before the sink do not enter the means, keys in a window do
  // not enter the attention metrics.
  size_t sink = 64, recent = 256;
  // Of the model; null = not at hand, then W_O is taken as the identity where a recipe needs it.
  std::shared_ptr<const ModelWeights> weights;
  std::string options_json = "{}";  // recorded

  // moments.h5 to write, empty = none: every statistic, so that any recipe can be fitted from it.
  // Then there may be no recipes.
  std::string moments_out;
  bool moments_rows = false;  // with the keys and values of all tokens
  // A source that holds the KV heads of one tensor-parallel rank only: its first head and how many
  // the model has (0: the source has all). Recipes need all heads.
  size_t first_kv_head = 0, model_kv_heads = 0;
  // Resumable sources: where an unfinished run is saved, and how often (0: after every sequence).
  std::string checkpoint_path;
  double checkpoint_seconds = 60.0;
};

// First held-out token: the last `fraction` of the tokens, moved to the nearest sequence boundary
// that leaves both parts non-empty; inside the last sequence when there is only one. Equal to the
// number of tokens when the fraction is 0.
size_t held_out_begin(const std::vector<size_t>& sequence_offsets, double fraction);

struct RecipeResult {
  Bundle bundle;
  std::vector<LayerReport> layers;
};
struct CalibrationResult {
  std::vector<RecipeResult> recipes;  // as in CalibrationOptions
  size_t tokens = 0, held_out_tokens = 0;
  size_t sequences_resumed = 0;  // found in the checkpoint of an interrupted run
  std::vector<std::string> warnings;
};

CalibrationResult calibrate(ActivationSource& source, const CalibrationOptions& options,
                            const Progress& progress);

// The same from moments files: shards of text are added, tensor-parallel ranks set side by side
// (moments_merge.h). Held-out fraction, windows and weights are those of the files.
CalibrationResult calibrate_moments(const std::vector<std::string>& paths,
                                    const CalibrationOptions& options, const Progress& progress);

}  // namespace oscar
