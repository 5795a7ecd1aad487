// bundle.h5: what calibration decided for a model. Read by simulate, eval, compare, generate and
// the exporters.
//
// Schema (format "oscar-bundle", version 1):
//   /                attributes: format, format_version, recipe, model_architecture, model_sha256,
//   tokenizer_sha256, text_sha256, tool_version, options (JSON text),
//                    head_dim, value_head_dim, num_layers, num_heads, num_kv_heads, rope_theta,
//                    tokens, sequence_length, approximate
//   /token_fingerprints  int64 [m], ascending: passages of the calibration text, held-out part
//                    included (base/token_fingerprint.h); may be absent
//   /layers/<id>/    one group a layer, <id> the decimal global layer index
//     k_rotation, v_rotation     float32 [1 or num_kv_heads, D, D]; row-vector convention x' = x R;
//                                absent = identity
//     k_eigenvalues, v_eigenvalues  float64 [1 or num_kv_heads, D], ascending; may be absent
//     k_mean, v_mean             float32 [num_kv_heads, D]; absent = not centered
//     k_position_mean, k_position_offset  float32 [num_kv_heads, D]: b and m of position-aware
//                                centering, keys k_t minus RoPE_t(b) + m; both or none
//     k_metric, v_metric         float32 [num_kv_heads, D, D]: M_A or M_O, and M_V, in unrotated
//                                coordinates; absent = no feedback encoder
//     k_scale_max, v_scale_max   float32 [num_kv_heads]: log-8 scale constants; may be absent
//     k_multipliers, v_multipliers  float32 [num_kv_heads, n]: factors of the start range decided
//     for
//                                the feedback encoder of the recipe's arm, shorter sets padded with
//                                0; absent = those of the arm
//     attributes k_clip, v_clip (float64), policy (JSON text: decisions of the contest), held_out
//                                (JSON text: its numbers)
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/tensor.h"

namespace oscar {

struct BundleLayer {
  TensorF k_rotation, v_rotation;  // [1 or Hkv, D, D], empty = identity
  TensorD k_eigenvalues, v_eigenvalues;
  TensorF k_mean, v_mean;      // [Hkv, D], empty = not centered
  TensorF k_metric, v_metric;  // [Hkv, D, D], empty = none
  TensorF k_scale_max, v_scale_max;
  TensorF k_multipliers, v_multipliers;        // [Hkv, n], empty = those of the arm
  TensorF k_position_mean, k_position_offset;  // [Hkv, D], empty = none
  double k_clip = 0.0, v_clip = 0.0;
  std::string policy_json = "{}";
  std::string held_out_json = "{}";
};

struct BundleInfo {
  std::string recipe;  // official, paper, centered, light, lean, best, hadamard, ...
  std::string model_architecture, model_sha256, tokenizer_sha256, text_sha256, tool_version;
  std::string options_json = "{}";
  int64_t head_dim = 0, value_head_dim = 0, num_layers = 0, num_heads = 0, num_kv_heads = 0;
  double rope_theta = 0.0;
  int64_t tokens = 0;           // tokens behind the statistics
  int64_t sequence_length = 0;  // length of the calibration sequences
  bool approximate = false;
  std::vector<int64_t> token_fingerprints;  // of the calibration text; empty = not known
};

struct Bundle {
  BundleInfo info;
  std::map<int64_t, BundleLayer> layers;  // by global layer index
};

// Throws Error naming file, layer and tensor: wrong format or version, shapes that disagree with
// the attributes, non-finite values, rotation not orthogonal (max |R R^T - I| > 1e-3).
Bundle read_bundle(const std::string& path);
// Written to a temporary name in the same folder and renamed.
void write_bundle(const Bundle& bundle, const std::string& path);

}  // namespace oscar
