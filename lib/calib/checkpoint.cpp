#include "calib/checkpoint.h"

#include <filesystem>

#include "base/error.h"

namespace oscar {
namespace {

// The first thing that differs between two descriptions of a run, or nothing.
std::string difference(const MomentsInfo& a, const MomentsInfo& b) {
  if (a.model_sha256 != b.model_sha256) return "model";
  if (a.tokenizer_sha256 != b.tokenizer_sha256) return "tokenizer";
  if (a.text_sha256 != b.text_sha256) return "text";
  if (a.compute != b.compute) return "--compute";
  if (a.sink != b.sink || a.recent != b.recent) return "windows (--sink, --recent)";
  if (a.sequences != b.sequences || a.token_fingerprints != b.token_fingerprints)
    return "tokens (--tokens, --seq-len, --held-out)";
  if (a.options_json != b.options_json) return "options";
  if (a.tool_version != b.tool_version) return "version of the program";
  return {};
}

}  // namespace

Checkpoint::Checkpoint(const std::string& path, double seconds)
    : path_(path), seconds_(seconds), saved_(std::chrono::steady_clock::now()) {}

size_t Checkpoint::resume(const MomentsInfo& info, Collector& collector,
                          const ContestOptions& windows) {
  if (!enabled() || !std::filesystem::exists(path_)) return 0;
  const MomentsReader reader(path_);
  const std::string different = difference(reader.info(), info);
  OSCAR_CHECK(different.empty(), path_, ": belongs to an unfinished calibration of another ",
              different, "; repeat that command, or delete the file to start anew");
  for (const auto& [layer, moments] : collector.layers())
    collector.restore(layer, reader.read(static_cast<int64_t>(layer)), windows);
  done_ = saved_done_ = static_cast<size_t>(reader.info().sequences_complete);
  return done_;
}

void Checkpoint::sequence_done(const MomentsInfo& info, const Collector& collector,
                               size_t sequences_done, ActivationSource& source) {
  done_ = sequences_done;
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - saved_;
  if (elapsed.count() >= seconds_) save_now(info, collector, source);
}

void Checkpoint::save_now(const MomentsInfo& info, const Collector& collector,
                          ActivationSource& source) {
  if (!enabled() || done_ == saved_done_) return;
  source.keep_rows();
  MomentsInfo state = info;
  state.sequences_complete = static_cast<int64_t>(done_);
  MomentsWriter writer(path_, state);
  for (const auto& [layer, moments] : collector.layers()) {
    MomentsLayer stored = to_moments(moments);
    stored.output_energy = {};  // of the model, not of the tokens
    writer.write(static_cast<int64_t>(layer), stored);
  }
  writer.finish();
  saved_done_ = done_;
  saved_ = std::chrono::steady_clock::now();
}

void Checkpoint::remove() {
  std::error_code ignored;
  if (enabled()) std::filesystem::remove(path_, ignored);
}

}  // namespace oscar
