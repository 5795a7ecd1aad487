#include "eval/likelihood.h"

#include <algorithm>
#include <chrono>
#include <span>

#include "base/error.h"
#include "base/parallel.h"
#include "eval/row_divergence.h"
#include "model/attention.h"
#include "model/kv_cache.h"

namespace oscar {
namespace {

// Tokens of one window as the model sees them: an optional BOS, then the window.
std::vector<int32_t> window_tokens(const EvalText& text, const TextWindow& window, size_t length,
                                   bool with_bos, int64_t bos_id) {
  std::vector<int32_t> tokens;
  if (with_bos) tokens.push_back(static_cast<int32_t>(bos_id));
  const auto begin = text.tokens.begin() + static_cast<ptrdiff_t>(window.first_token);
  tokens.insert(tokens.end(), begin, begin + static_cast<ptrdiff_t>(length));
  return tokens;
}

// One arm over a batch of equally long sequences.
class ArmPass {
 public:
  ArmPass(Transformer& transformer, std::shared_ptr<const KvArm> arm,
          const std::vector<std::vector<int32_t>>& sequences, const std::vector<size_t>& rows)
      : transformer_(transformer), arm_(std::move(arm)), sequences_(sequences), rows_(rows) {
    hidden_size_ = transformer.config().hidden_size;
    for (size_t i = 0; i < sequences.size(); ++i) caches_.emplace_back(transformer.config(), arm_);
    hidden_.resize(sequences.size() * rows.size() * hidden_size_);
  }

  // Feeds all sequences in calls of at most `call_tokens` tokens a sequence. serving_prefill: see
  // LikelihoodOptions.
  void run(size_t serving_prefill, size_t call_tokens, const Progress& progress) {
    const KvArm& arm = *arm_;
    if (arm.quantized && arm.windows.mode == WindowMode::kServing) {
      const size_t windows = arm.windows.sink + arm.windows.recent;
      const size_t prefill = serving_prefill == 0 ? windows : serving_prefill;
      run_to(std::max<size_t>(1, prefill), length(), progress);
      for (KvCache& cache : caches_) cache.set_append_as_decode(true);
    }
    run_to(length(), call_tokens, progress);
  }

  // Feeds the tokens up to `position`.
  void run_to(size_t position, size_t call_tokens, const Progress& progress) {
    const auto start = std::chrono::steady_clock::now();
    position = std::min(position, length());
    while (position_ < position) {
      progress.check();
      const size_t end = std::min(position, position_ + call_tokens);
      feed(position_, end);
      position_ = end;
    }
    elapsed_s_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  // Goes on from another pass's prefill, quantized now.
  void start_from(const std::vector<KvCache>& prefilled) {
    const auto start = std::chrono::steady_clock::now();
    for (size_t i = 0; i < caches_.size(); ++i) {
      caches_[i] = quantize_after_prefill(prefilled[i], transformer_.config(), arm_);
    }
    position_ = caches_[0].length();
    elapsed_s_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  std::vector<KvCache> fork_caches() const {
    std::vector<KvCache> forks;
    for (const KvCache& cache : caches_) forks.push_back(cache.fork());
    return forks;
  }

  // Final hidden state of a scored row.
  const float* hidden(size_t sequence, size_t row) const {
    return hidden_.data() + (sequence * rows_.size() + row) * hidden_size_;
  }
  CacheCounters counters(size_t sequence) const { return caches_[sequence].counters(); }
  double elapsed_s() const { return elapsed_s_; }
  void release_caches() { caches_.clear(); }

 private:
  size_t length() const { return sequences_[0].size(); }

  void feed(size_t begin, size_t end) {
    std::vector<SequenceChunk> chunks;
    for (size_t i = 0; i < sequences_.size(); ++i) {
      chunks.push_back({std::span(sequences_[i]).subspan(begin, end - begin), &caches_[i]});
    }
    const std::vector<float> states = transformer_.forward(chunks);
    for (size_t i = 0; i < sequences_.size(); ++i) {
      for (size_t row = 0; row < rows_.size(); ++row) {
        if (rows_[row] < begin || rows_[row] >= end) continue;
        const float* source =
            states.data() + (i * (end - begin) + rows_[row] - begin) * hidden_size_;
        std::copy_n(source, hidden_size_, hidden_.data() + (i * rows_.size() + row) * hidden_size_);
      }
    }
  }

  Transformer& transformer_;
  std::shared_ptr<const KvArm> arm_;
  const std::vector<std::vector<int32_t>>& sequences_;
  const std::vector<size_t>& rows_;  // positions in the sequence whose states are kept
  std::vector<KvCache> caches_;
  std::vector<float> hidden_;  // [sequences, rows, hidden]
  size_t hidden_size_ = 0;
  size_t position_ = 0;  // tokens fed so far
  double elapsed_s_ = 0;
};

ArmWindow empty_arm_window(const CacheCounters& counters, size_t rows, double forward_s) {
  ArmWindow window;
  window.nll.resize(rows);
  window.kl.resize(rows);
  window.kl_top.resize(rows);
  window.delta_p.resize(rows);
  window.agreement.resize(rows);
  window.tokens_int2_written = static_cast<double>(counters.tokens_int2_written);
  window.tokens_int2_read = static_cast<double>(counters.tokens_int2_read);
  window.tokens_high_precision = static_cast<double>(counters.tokens_high_precision);
  window.bytes_packed = static_cast<double>(counters.bytes_packed);
  window.bytes_high_precision = static_cast<double>(counters.bytes_high_precision);
  window.rows_encoded = static_cast<double>(counters.encode.rows);
  window.gains_clamped = static_cast<double>(counters.encode.gain_clamped);
  window.scales_saturated = static_cast<double>(counters.encode.scale_saturated);
  window.meta_fallbacks = static_cast<double>(counters.encode.meta_fallbacks);
  window.forward_s = forward_s;
  return window;
}

void store_scores(const RowScores& scores, const RowScores& reference, size_t row,
                  ArmWindow& window) {
  window.nll[row] = static_cast<float>(scores.nll);
  window.kl[row] = static_cast<float>(scores.kl);
  window.kl_top[row] = static_cast<float>(scores.kl_top);
  window.delta_p[row] = static_cast<float>(scores.probability - reference.probability);
  window.agreement[row] =
      static_cast<uint8_t>((scores.same_top1 ? kSameTop1 : 0) | scores.top5_overlap);
}

// Logits of all arms for the scored rows of one sequence, in chunks of bounded memory.
void score_sequence(Transformer& transformer, const std::vector<ArmPass>& passes, size_t sequence,
                    const std::vector<int32_t>& targets, size_t max_logit_bytes,
                    WindowRecord& record) {
  const size_t num_arms = passes.size();
  const size_t hidden_size = transformer.config().hidden_size;
  const size_t vocab = transformer.config().vocab_size;
  const size_t chunk_rows =
      std::clamp<size_t>(max_logit_bytes / (vocab * sizeof(float) * num_arms), 1, targets.size());
  std::vector<float> states(num_arms * chunk_rows * hidden_size);
  std::vector<float> logits(num_arms * chunk_rows * vocab);
  for (size_t begin = 0; begin < targets.size(); begin += chunk_rows) {
    const size_t rows = std::min(chunk_rows, targets.size() - begin);
    for (size_t arm = 0; arm < num_arms; ++arm) {
      std::copy_n(passes[arm].hidden(sequence, begin), rows * hidden_size,
                  states.data() + arm * rows * hidden_size);
    }
    transformer.logits(states.data(), num_arms * rows, logits.data());
    parallel_for(rows, [&](size_t row) {
      std::vector<const float*> students;
      for (size_t arm = 1; arm < num_arms; ++arm) {
        students.push_back(logits.data() + (arm * rows + row) * vocab);
      }
      std::vector<RowScores> scores(num_arms);
      score_row(logits.data() + row * vocab, students, vocab, targets[begin + row], scores.data());
      for (size_t arm = 0; arm < num_arms; ++arm) {
        store_scores(scores[arm], scores[0], begin + row, record.arms[arm]);
      }
    });
  }
}

void check_arms(const std::vector<std::shared_ptr<const KvArm>>& arms) {
  OSCAR_CHECK(!arms.empty(), "likelihood: no reference arm was given");
  for (const auto& arm : arms) OSCAR_CHECK(arm != nullptr, "likelihood: an arm is missing");
  OSCAR_CHECK(!arms[0]->quantized, "likelihood: the reference arm must not be quantized, got \"",
              arms[0]->name, "\"");
}

}  // namespace

void run_likelihood(Transformer& transformer, const std::vector<EvalText>& texts,
                    const TextWindows& windows,
                    const std::vector<std::shared_ptr<const KvArm>>& arms,
                    const LikelihoodOptions& options, const std::vector<size_t>& done,
                    const Progress& progress, const std::function<void(WindowRecord)>& sink) {
  check_arms(arms);
  OSCAR_CHECK(!options.targets.empty(), "likelihood: no row is scored");
  const ModelConfig& config = transformer.config();
  OSCAR_CHECK(!options.with_bos || config.bos_token_id >= 0,
              "--bos: the model has no beginning-of-sequence token");
  const size_t sequence_length = windows.length + (options.with_bos ? 1 : 0);
  OSCAR_CHECK(config.context_length == 0 || sequence_length <= config.context_length, "--length ",
              windows.length, ": the model's context is ", config.context_length, " tokens");
  // Row positions inside the fed sequence: the row before its target.
  std::vector<size_t> rows;
  for (const size_t target : options.targets) {
    rows.push_back(target + (options.with_bos ? 1 : 0) - 1);
  }
  std::vector<size_t> pending;
  for (size_t i = 0; i < windows.windows.size(); ++i) {
    if (std::find(done.begin(), done.end(), i) == done.end()) pending.push_back(i);
  }
  const size_t prefill = options.prefill == 0 ? rows.front() : options.prefill;
  OSCAR_CHECK(!options.after_prefill || (prefill > 0 && prefill <= rows.front()), "--prefill ",
              prefill, ": after-prefill scores only rows behind the prefill, the first ",
              "scored row is ", rows.front(), " (--rows)");
  const size_t batch = std::max<size_t>(1, options.max_call_tokens / sequence_length);
  const size_t num_passes = arms.size() + (options.null_run ? 1 : 0);
  const size_t total_units = windows.windows.size() * num_passes;
  size_t units = done.size() * num_passes;
  for (size_t begin = 0; begin < pending.size(); begin += batch) {
    const size_t count = std::min(batch, pending.size() - begin);
    std::vector<std::vector<int32_t>> sequences;
    for (size_t i = 0; i < count; ++i) {
      const TextWindow& window = windows.windows[pending[begin + i]];
      sequences.push_back(window_tokens(texts[window.text], window, windows.length,
                                        options.with_bos, config.bos_token_id));
    }
    std::vector<WindowRecord> records(count);
    std::vector<ArmPass> passes;
    passes.reserve(num_passes);
    std::vector<KvCache> prefilled;
    for (size_t pass = 0; pass < num_passes; ++pass) {
      const bool null_run = pass == arms.size();
      const auto& arm = arms[null_run ? 0 : pass];
      progress.step({"eval", units, total_units, "passes"});
      passes.emplace_back(transformer, arm, sequences, rows);
      const size_t per_sequence = std::max<size_t>(1, options.max_call_tokens / count);
      if (options.after_prefill && pass == 0) {
        passes.back().run_to(prefill, per_sequence, progress);
        prefilled = passes.back().fork_caches();
      } else if (options.after_prefill && !null_run) {
        passes.back().start_from(prefilled);
      }
      // The null run cuts the same tokens elsewhere, so that other tiles do the same sums.
      const size_t null_tokens = std::max<size_t>(1, sequence_length * 3 / 8 + 1);
      passes.back().run(options.prefill, null_run ? null_tokens : per_sequence, progress);
      for (size_t i = 0; i < count; ++i) {
        records[i].arms.push_back(
            empty_arm_window(passes.back().counters(i), rows.size(),
                             passes.back().elapsed_s() / static_cast<double>(count)));
      }
      passes.back().release_caches();
      units += count;
    }
    for (size_t i = 0; i < count; ++i) {
      records[i].window = pending[begin + i];
      std::vector<int32_t> targets;
      for (const size_t row : rows) targets.push_back(sequences[i][row + 1]);
      score_sequence(transformer, passes, i, targets, options.max_logit_bytes, records[i]);
      progress.check();
      sink(std::move(records[i]));
    }
  }
  progress.step({"eval", units, total_units, "passes"});
}

EncodeStats encode_events(const std::vector<WindowRecord>& records, size_t arm) {
  EncodeStats sum;
  for (const WindowRecord& record : records) {
    const ArmWindow& window = record.arms[arm];
    sum.add({static_cast<size_t>(window.rows_encoded), static_cast<size_t>(window.meta_fallbacks),
             static_cast<size_t>(window.gains_clamped),
             static_cast<size_t>(window.scales_saturated)});
  }
  return sum;
}

}  // namespace oscar
