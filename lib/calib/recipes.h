// Named calibration recipes: which rotations are made, which statistics are kept, what is decided
// by held-out data.
#pragma once

#include <string>
#include <vector>

#include "calib/rotation_fit.h"
#include "quant/codec.h"

namespace oscar {

enum class KeyMetric {
  kNone,
  kLogit,    // M_A
  kOutput,   // M_O
  kQueries,  // C_Q: every query counts alike (for comparisons)
};
KeyMetric parse_key_metric(const std::string& name);  // logit, output, queries

enum class ValueCentering { kNever, kDecide, kAlways };  // kDecide: per head, by held-out error
ValueCentering parse_value_centering(const std::string& name);  // never, decide, always

struct RecipeOptions {
  std::string name = "official";
  KeyTarget key_target = KeyTarget::kQqt;
  ValueTarget value_target = ValueTarget::kProxy;
  RotationOptions rotation;
  bool center_keys = false;  // k_mean per head of positions >= sink
  double k_clip = 0.96, v_clip = 0.92;
  // Feedback recipes.
  KeyMetric key_metric = KeyMetric::kNone;
  bool value_metric = false;     // M_V
  bool decide_rotation = false;  // shared, per head or Hadamard, per head by held-out output error
  int sign_patterns = 0;  // decide_rotation also tries each rotation with so many random signs
  ValueCentering value_centering = ValueCentering::kNever;  // v_mean
  bool log8 = false;                                        // constants of the log-8 metadata
  // Factors of the start range that compete, per head, with those of the recipe's arm; for sides
  // with a metric.
  std::vector<std::vector<double>> multiplier_sets;

  bool needs_contest() const {
    return decide_rotation || value_centering == ValueCentering::kDecide || log8 ||
           !multiplier_sets.empty();
  }
};

// official  proxy C_S, one rotation for all heads, R = U H P, clip 0.96 / 0.92 (the published
// recipe) paper     the same with the exact C_S centered  official + key centering hadamard  R = H
// light     centered + M_A for the keys, rotations of keys and values by held-out choice
// lean      light + M_V, values centered by held-out choice
// best      lean with M_O in place of M_A, constants of the log-8 metadata
RecipeOptions recipe_options(const std::string& name);  // throws Error listing the names
std::vector<std::string> recipe_names();

// Storage of one side under a feedback recipe as the held-out contest measures it: that of the arm,
// for `best` the lean encoder, because it ranks rotations and means as the full encoder does at
// a third of its cost. Values of `light`: clip and plain gain.
CodecSpec contest_codec(const RecipeOptions& recipe, bool keys, int head_dim);
// What the arm of the recipe really stores, with fp16 pairs: the form compared with `centered`.
CodecSpec arm_codec(const RecipeOptions& recipe, bool keys, int head_dim);

// Choice of --recipe auto: the best recipe whose bits fit `max_bits` per element (nominal) and
// whose encoder costs at most `max_write_cost` of a forward pass. `why` explains it in one
// sentence.
struct AutoChoice {
  std::string recipe, why;
};
AutoChoice choose_recipe(int head_dim, double max_bits, double max_write_cost);

}  // namespace oscar
