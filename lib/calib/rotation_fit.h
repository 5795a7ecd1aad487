// From second moments to rotations: the targets and compositions of formats.md 1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "calib/activation_rows.h"
#include "calib/statistics.h"
#include "linalg/rotation.h"

namespace oscar {

enum class KeyTarget {
  kQqt,  // C_Q = mean of q^T q over the query group
  kKtk,  // mean of k^T k
};
enum class ValueTarget {
  kSst,    // exact C_S: mean of o^T o of the attention outputs over the query group
  kProxy,  // the published weights w_t = k_t C_Q k_t^T, mean 1 per head
  kVtv,    // mean of v^T v
};
KeyTarget parse_key_target(const std::string& name);      // qqt, ktk
ValueTarget parse_value_target(const std::string& name);  // sst, proxy, vtv
const char* target_name(KeyTarget target);
const char* target_name(ValueTarget target);

// Covariances [D, D] of every KV head, all in double.
std::vector<TensorD> key_covariances(const LayerStatistics& statistics, KeyTarget target);
// proxy: proxy_sums(), read for that target only.
std::vector<TensorD> value_covariances(const LayerStatistics& statistics, ValueTarget target,
                                       const std::vector<GramSum>& proxy);

// V^T diag(w) V of every KV head [Hkv] with count = sum of w, over tokens [0, num_tokens) of
// `rows`, which are those behind `statistics`: w needs C_Q first, so keys and values are visited
// twice.
std::vector<GramSum> proxy_sums(const LayerStatistics& statistics, const ActivationRows& rows,
                                size_t layer, size_t num_tokens);

// Weights w_t = k_t C_Q,h k_t^T (not normalised) of tokens [0, num_tokens) of k [num_tokens, Hkv,
// D] for one head; tiny negative rounding is set to 0.
void proxy_weights(const HeadGeometry& geometry, const float* k, size_t num_tokens, size_t kv_head,
                   const TensorD& c_q, double* weights);

struct RotationOptions {
  bool hadamard = false;  // R = H, eigenvalues 1, whatever the covariances are
  Composition composition = Composition::kRHPbr;
  HadamardForm form = HadamardForm::kFull;
  bool per_head = false;
  // R = U S H P with a diagonal S of random signs: pattern 0 has none, each other number is a seed.
  uint64_t sign_pattern = 0;
};

struct FittedRotation {
  TensorF rotation;     // [1 or Hkv, D, D]
  TensorD eigenvalues;  // [1 or Hkv, D], ascending
  TensorD vectors;      // [1 or Hkv, D, D], columns, canonical signs
};

// `what` names layer and covariance in messages. Shared rotation: of the mean over heads.
FittedRotation fit_rotation(const std::vector<TensorD>& covariances, const RotationOptions& options,
                            const std::string& what);

}  // namespace oscar
