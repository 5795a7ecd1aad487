// Causal attention over a KV cache that is filled by the same call: one code path for every arm,
// for prefill and for decode.
#pragma once

#include <cstddef>
#include <memory>

#include "model/kv_cache.h"
#include "model/weight_matmul.h"

namespace oscar {

// Appends the keys and values of `num_tokens` (>= 1) new tokens to `layer` of the cache, packs what
// leaves the high-precision windows, and attends causally with the new queries. The position of the
// first new token is the number of tokens that were appended to this layer before.
//   q    [num_tokens, num_heads, D] after RoPE, not scaled (the softmax scale D^-0.5 is applied
//   here)
//   k, v [num_tokens, num_kv_heads, D]
//   o    [num_tokens, num_heads, D] attention outputs before W_O, in the model's own coordinates
//        (rotation undone, value mean added)
//   lse  [num_tokens, num_heads] log-sum-exp (nats) of the scaled scores; may be null
// Accumulates in float32. With exact windows each output row has the same bits however the tokens
// were split into calls, and for any thread count. Serving windows: a call with several tokens is a
// prefill chunk, a call with one token is a decode step (see KvCache::set_append_as_decode).
// With Compute::kBf16, on a processor with bf16 products (pair_kernels()), rows that the cache
// holds in bf16 are multiplied as bf16: queries and softmax weights are rounded, sums stay in
// float32. Dequantized rows are multiplied in float32 always. Throws Error naming layer, head and
// token when a key or value is not finite.
void append_and_attend(KvCache& cache, size_t layer, size_t num_tokens, const float* q,
                       const float* k, const float* v, float* o, float* lse,
                       Compute compute = Compute::kFp32);

// The cache of `arm` as if its prefill had attended in high precision: takes the rows of a
// reference arm's cache, packs what lies outside the windows and continues from there (mode
// "after-prefill": one prefill serves all arms). Throws Error when `reference` is quantized.
KvCache quantize_after_prefill(const KvCache& reference, const ModelConfig& config,
                               std::shared_ptr<const KvArm> arm);

}  // namespace oscar
