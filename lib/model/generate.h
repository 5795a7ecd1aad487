// The decode loop: prompt through the model in chunks, then one token at a time over the real cache
// of any arm.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/progress.h"
#include "model/kv_cache.h"
#include "model/sampler.h"
#include "model/transformer.h"

namespace oscar {

// Prompt tokens of one forward call: bounds the memory of activations, and is the prefill chunk of
// serving windows.
inline constexpr size_t kPrefillChunk = 2048;

struct GenerateOptions {
  size_t max_tokens = 256;
  SamplingOptions sampling;
  std::vector<int64_t> stop_ids;  // the stop token ends the text and is not part of it
};

struct Generated {
  std::vector<int32_t> tokens;
  std::string finish_reason;  // "stop", "length" (max_tokens) or "context" (model's length reached)
  size_t prompt_tokens = 0;
  double prefill_s = 0.0, decode_s = 0.0;  // decode: all steps after the first token was sampled
  size_t decode_steps = 0;
};

// Called with each token as soon as it is known, stop tokens excluded. May be empty.
using TokenCallback = std::function<void(int32_t)>;

// Appends the prompt and the generated tokens (the last one excluded) to the cache, which may
// already hold a prefix. Throws Error when the prompt is empty or, with the cache's content, longer
// than the model's context; Interrupted when the user asked to stop.
Generated generate(Transformer& model, KvCache& cache, std::span<const int32_t> prompt,
                   const GenerateOptions& options, const TokenCallback& on_token,
                   const Progress& progress);

// Appends tokens in chunks of kPrefillChunk and returns the last hidden state [hidden].
std::vector<float> prefill(Transformer& model, KvCache& cache, std::span<const int32_t> tokens,
                           const Progress& progress);

}  // namespace oscar
