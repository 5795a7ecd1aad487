// Scores windows of text under a reference cache and several test caches in lock-step, and keeps
// what every row said.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/progress.h"
#include "eval/text_windows.h"
#include "model/kv_arm.h"
#include "model/transformer.h"

namespace oscar {

// What one arm did on one window. Arrays are indexed by scored row; float32 so that a record kept
// in a file resumes to the same bits.
struct ArmWindow {
  std::vector<float> nll;          // nats
  std::vector<float> kl;           // KL(reference || arm), nats; 0 for the reference
  std::vector<float> kl_top;       // the same over the teacher's top 50 and a rest bucket
  std::vector<float> delta_p;      // q(target) - p(target)
  std::vector<uint8_t> agreement;  // bit 7: same most likely token; bits 0-6: common ids in top 5
  double tokens_int2_written = 0;  // per layer
  double tokens_int2_read = 0;     // per layer, summed over the queries
  double tokens_high_precision = 0;
  double bytes_packed = 0, bytes_high_precision = 0;  // held at the end, all layers and heads
  double rows_encoded = 0, gains_clamped = 0, scales_saturated = 0, meta_fallbacks = 0;
  double forward_s = 0;  // wall time of the forward pass, shared evenly by the windows of a batch
};

inline constexpr uint8_t kSameTop1 = 0x80;

struct WindowRecord {
  size_t window = 0;            // index into TextWindows::windows
  std::vector<ArmWindow> arms;  // [0] = reference, then the test arms, then the null run if any
};

// What the encoder of one arm met in all windows.
EncodeStats encode_events(const std::vector<WindowRecord>& records, size_t arm);

struct LikelihoodOptions {
  std::vector<size_t> targets;  // scored target positions, ascending
  bool with_bos = false;        // one beginning-of-sequence token before each window
  // Serving windows: tokens of the prefill chunk; the rest is decoded token by token. 0 = sink +
  // recent of the arm. after_prefill: tokens of the shared prefill. 0 = up to the first scored row.
  size_t prefill = 0;
  // The reference's prefill serves all arms: its cache is quantized once, and every arm goes on
  // from there (mode "after-prefill"). Only rows behind the prefill can be scored.
  bool after_prefill = false;
  bool null_run = true;           // the reference again, with other batches and chunks: noise floor
  size_t max_call_tokens = 2048;  // tokens of one forward call
  size_t max_logit_bytes = 192 << 20;  // of all arms together
};

// Runs the windows whose index is not in `done` and hands each finished record to `sink`, in order.
// arms[0] is the reference (not quantized). All arms see the same tokens at the same positions.
// Throws Error when an arm is missing or the model's vocabulary does not hold a token; Interrupted
// after the record being worked on was dropped.
void run_likelihood(Transformer& transformer, const std::vector<EvalText>& texts,
                    const TextWindows& windows,
                    const std::vector<std::shared_ptr<const KvArm>>& arms,
                    const LikelihoodOptions& options, const std::vector<size_t>& done,
                    const Progress& progress, const std::function<void(WindowRecord)>& sink);

}  // namespace oscar
