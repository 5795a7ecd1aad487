// The CPU forward pass: batched chunks of several sequences over their KV caches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "model/kv_cache.h"
#include "model/weight_matmul.h"
#include "model/weights.h"

namespace oscar {

// Attention inputs and outputs of one layer for one sequence's new tokens, as seen after RoPE
// (formats.md 0). Valid during the call only.
struct LayerActivations {
  size_t layer = 0;
  size_t sequence = 0;        // index into the batch
  size_t first_position = 0;  // position of the first of the new tokens
  size_t num_tokens = 0;
  const float* q = nullptr;  // [num_tokens, num_heads, head_dim], not scaled by 1/sqrt(D)
  const float* k = nullptr;  // [num_tokens, num_kv_heads, head_dim], as computed (not rounded, not
                             // centered, not rotated)
  const float* v = nullptr;  // [num_tokens, num_kv_heads, head_dim]
  const float* o = nullptr;  // [num_tokens, num_heads, head_dim] attention outputs before W_O
  const float* lse = nullptr;  // [num_tokens, num_heads] log-sum-exp (nats) of the scaled scores
};

// Called once per layer and sequence, in layer order, from one thread, after attention.
class LayerObserver {
 public:
  virtual ~LayerObserver() = default;
  virtual void on_layer(const LayerActivations& activations) = 0;
};

struct SequenceChunk {
  std::span<const int32_t> tokens;  // new tokens, appended to the cache
  KvCache* cache = nullptr;         // its length is the position of tokens[0]
};

class Transformer {
 public:
  Transformer(std::shared_ptr<const ModelWeights> weights, Compute compute);
  ~Transformer();
  const ModelConfig& config() const;
  const ModelWeights& weights() const;

  // Runs all chunks (different sequences) through the model in one batch; appends their K and V.
  // Returns the final-norm hidden states [sum of chunk lengths, hidden], chunks one after another.
  // observer may be null. Throws Error on token ids outside the vocabulary or non-finite
  // activations.
  std::vector<float> forward(std::span<const SequenceChunk> chunks,
                             LayerObserver* observer = nullptr);

  // The same for what the observer sees alone: nothing behind the last layer's attention is
  // computed.
  void observe(std::span<const SequenceChunk> chunks, LayerObserver& observer);

  // Logits of hidden states: hidden [rows, hidden] -> out [rows, vocab].
  void logits(const float* hidden, size_t rows, float* out);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace oscar
