#include "calib/checkpoint.h"

#include <filesystem>

#include "base/error.h"

namespace oscar {
namespace {

std::string differs(const std::string& what, const std::string& there, const std::string& here) {
  return there == here ? std::string{} : cat(what, ": ", there, " there, ", here, " here");
}

std::string differs_in_hash(const std::string& what, const std::string& there,
                            const std::string& here) {
  constexpr size_t kShown = 16;
  if (there == here) return {};
  return cat(what, " (sha256 ", there.substr(0, kShown), "... there, ", here.substr(0, kShown),
             "... here)");
}

std::string windows_of(const MomentsInfo& info) {
  return cat("--sink ", info.sink, " --recent ", info.recent);
}

int64_t tokens_of(const MomentsInfo& info) {
  return info.calibration_tokens() + info.held_out_tokens();
}

// The first thing that differs between the saved state `a` and this run `b`, or nothing.
std::string difference(const MomentsInfo& a, const MomentsInfo& b, const std::string& collected) {
  for (const std::string& found :
       {differs_in_hash("model", a.model_sha256, b.model_sha256),
        differs_in_hash("tokenizer", a.tokenizer_sha256, b.tokenizer_sha256),
        differs_in_hash("text", a.text_sha256, b.text_sha256),
        differs("--compute", a.compute, b.compute),
        differs("windows", windows_of(a), windows_of(b)),
        differs("number of tokens", cat(tokens_of(a)), cat(tokens_of(b))),
        differs("recipes or targets, which need other sums", a.collected, collected),
        differs("options", a.options_json, b.options_json),
        differs("version of the program", a.tool_version, b.tool_version)})
    if (!found.empty()) return found;
  if (a.sequences != b.sequences || a.token_fingerprints != b.token_fingerprints)
    return "tokens (--seq-len, --skip-tokens, --held-out)";
  return {};
}

}  // namespace

Checkpoint::Checkpoint(const std::string& path, double seconds, const std::string& collected)
    : path_(path),
      collected_(collected),
      seconds_(seconds),
      saved_(std::chrono::steady_clock::now()) {}

void Checkpoint::resume(const MomentsInfo& info, Collector& collector,
                        const ContestOptions& windows, VisitNeeds& needs) {
  if (!enabled() || !std::filesystem::exists(path_)) return;
  const std::string start_anew = cat("delete ", path_, " and ", path_, "-rows to start anew");
  std::string different;
  try {
    const MomentsReader reader(path_);
    different = difference(reader.info(), info, collected_);
    if (different.empty()) {
      for (const auto& [layer, moments] : collector.layers())
        collector.restore(layer, reader.read(static_cast<int64_t>(layer)), windows);
      needs.first_sequence = static_cast<size_t>(reader.info().sequences_complete);
      needs.rows_checksum = reader.info().rows_checksum;
    }
  } catch (const Error& error) {
    fail(path_, ": expected the saved state of an unfinished calibration, got: ", error.what(),
         "; ", start_anew);
  }
  OSCAR_CHECK(different.empty(), path_, ": belongs to an unfinished calibration that differs in ",
              different, "; repeat that command, or ", start_anew);
  done_ = saved_done_ = needs.first_sequence;
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
  MomentsInfo state = info;
  state.collected = collected_;
  state.rows_checksum = source.keep_rows();
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
