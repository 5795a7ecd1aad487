// What an arm's name asks for, before it is applied to a model and a bundle.
#pragma once

#include <string>
#include <vector>

#include "model/kv_arm.h"

namespace oscar {

enum class RotationKind { kIdentity, kHadamard, kBundle };

struct SideRecipe {
  RotationKind rotation = RotationKind::kIdentity;
  bool block_hadamard = false;  // allow I (x) H_b for a width that is not a power of two
  // Subtract the bundle's mean: always (refused when absent), or where the bundle has decided so.
  // kPosition: keys only, the mean before RoPE, turned to each position.
  enum class Centering { kNever, kWhereDecided, kAlways, kPosition };
  Centering centering = Centering::kNever;
  bool clip_from_bundle = false;
  bool identity_metric = false;  // M = I in place of the bundle's metric
  double damping = 0.01;
  bool log8_where_known = false;  // metadata kLog8 when the bundle has the scale constants
  // The bundle's factors of the start range, where it has decided them for the same start.
  bool multipliers_where_decided = false;
  CodecSpec codec;  // head_dim and (where 0) group are filled in for the model

  bool needs_metric() const {
    return codec.encoder == Encoder::kFeedback || codec.gain == GainRule::kMetric;
  }
};

struct ArmRecipe {
  bool quantized = true;
  HighPrecision high_precision = HighPrecision::kBf16;
  WindowSpec windows;
  SideRecipe k, v;

  bool needs_bundle() const;
};

// Throws Error naming the arm and the suffix that is not understood.
ArmRecipe parse_arm(const std::string& name, const ArmOptions& options);

}  // namespace oscar
