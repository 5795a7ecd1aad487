// What quantizing K and V does to one KV head: errors of rows, logits and attention outputs with
// the head's real queries and real softmax.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "model/kv_arm.h"

namespace oscar {

// Classes of keys relative to a query at position t, the same for every arm: sink j < 64, recent
// j > t - 256, history = the rest.
enum TokenClass : size_t { kSink, kRecent, kHistory, kNumClasses };
inline constexpr size_t kClassSink = 64, kClassRecent = 256;
const char* class_name(size_t token_class);

struct ClassErrors {
  // Rows as they are stored when the sequence ends; sums over tokens and dims.
  double elements = 0, k_error = 0, k_signal = 0, v_error = 0, v_signal = 0;
  // Over (query, key) pairs, logits scaled by D^-0.5, errors e (nats).
  double pairs = 0, logit_error = 0;          // sum e^2
  double mass = 0, logit_error_weighted = 0;  // sum p, sum p e^2 (p = real softmax)
  double v_output_error = 0;  // sum over queries of |sum over the class of p (v^ - v)|^2
  void add(const ClassErrors& other);
};

struct HeadErrors {
  std::array<ClassErrors, kNumClasses> classes;
  // Squared errors of attention outputs by query row: both sides quantized, keys only, values only;
  // and the squared output itself.
  std::vector<double> output_error, output_error_k, output_error_v, output_signal;
  void add(const HeadErrors& other);
};

// One KV head of one sequence.
struct HeadInput {
  size_t num_tokens = 0, head_dim = 0;
  size_t group = 1;             // query heads of this KV head
  size_t kv_head = 0;           // index into per-head rotations, means and codecs
  const float* k = nullptr;     // [num_tokens, head_dim] after RoPE
  const float* v = nullptr;     // [num_tokens, head_dim]
  const float* q = nullptr;     // [queries.size(), group, head_dim] after RoPE, not scaled
  std::vector<size_t> queries;  // their positions, ascending
};

// layer_arm may be null: a high-precision arm. Exact windows, whatever the arm says. One result an
// arm, in order. Throws Error when a row cannot be encoded (not finite).
std::vector<HeadErrors> simulate_head(const HeadInput& input, const std::vector<const KvArm*>& arms,
                                      size_t layer);

}  // namespace oscar
