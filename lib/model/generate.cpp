#include "model/generate.h"

#include <algorithm>
#include <chrono>

#include "base/error.h"

namespace oscar {
namespace {

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace

std::vector<float> prefill(Transformer& model, KvCache& cache, std::span<const int32_t> tokens,
                           const Progress& progress) {
  OSCAR_CHECK(!tokens.empty(), "the prompt has no tokens");
  const size_t context = model.config().context_length;
  OSCAR_CHECK(context == 0 || cache.length() + tokens.size() <= context, "the prompt has ",
              cache.length() + tokens.size(), " tokens, the model's context length is ", context);
  std::vector<float> last;
  for (size_t begin = 0; begin < tokens.size(); begin += kPrefillChunk) {
    const size_t count = std::min(kPrefillChunk, tokens.size() - begin);
    const SequenceChunk chunk{tokens.subspan(begin, count), &cache};
    const std::vector<float> states = model.forward({&chunk, 1});
    last.assign(states.end() - static_cast<std::ptrdiff_t>(model.config().hidden_size),
                states.end());
    progress.step({"prefill", begin + count, tokens.size(), "tokens"});
  }
  return last;
}

Generated generate(Transformer& model, KvCache& cache, std::span<const int32_t> prompt,
                   const GenerateOptions& options, const TokenCallback& on_token,
                   const Progress& progress) {
  check_sampling_options(options.sampling);
  Generated result;
  result.prompt_tokens = prompt.size();
  const Stopwatch prefill_watch;
  std::vector<float> state = prefill(model, cache, prompt, progress);
  std::vector<float> logits(model.config().vocab_size);
  model.logits(state.data(), 1, logits.data());
  result.prefill_s = prefill_watch.seconds();

  const size_t context = model.config().context_length;
  result.finish_reason = "length";
  const Stopwatch decode_watch;
  while (result.tokens.size() < options.max_tokens) {
    const int32_t token =
        sample_token(logits.data(), logits.size(), options.sampling, result.tokens.size());
    if (std::find(options.stop_ids.begin(), options.stop_ids.end(), token) !=
        options.stop_ids.end()) {
      result.finish_reason = "stop";
      break;
    }
    result.tokens.push_back(token);
    if (on_token) on_token(token);
    progress.check();
    if (result.tokens.size() == options.max_tokens) break;
    if (context != 0 && cache.length() >= context) {
      result.finish_reason = "context";
      break;
    }
    const SequenceChunk chunk{{&token, 1}, &cache};
    state = model.forward({&chunk, 1});
    model.logits(state.data(), 1, logits.data());
    ++result.decode_steps;
  }
  result.decode_s = decode_watch.seconds();
  return result;
}

}  // namespace oscar
