// One evaluation from files to rows: loads model, texts, bundle and arms, checks that they fit,
// runs the likelihood sets and resumes an interrupted run.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/progress.h"
#include "base/statistics.h"
#include "eval/text_windows.h"
#include "io/results.h"
#include "model/kv_arm.h"
#include "model/tokenizer.h"
#include "model/transformer.h"

namespace oscar {

class PartialFile;

struct EvalRequest {
  std::string model_path;
  std::vector<std::string> text_paths;
  std::string reference = "bf16";     // arm every other one is compared with
  std::vector<std::string> arms;      // NAME[:SUFFIX...][@BUNDLE.h5], see make_arm
  bool skip_impossible_arms = false;  // true: an arm that the bundle cannot give becomes a note
  std::string bundle_path;            // for arms without their own; may be empty
  bool allow_overlap = false;         // score the calibration text all the same, labelled
  bool whole_texts = false;           // parts outside the windows are used too (recall tasks)
  bool perplexity = true, divergence = true;
  size_t length = 2048;
  size_t max_windows = 0;  // per text; 0 = all
  std::string rows = "auto";
  bool with_bos = false;
  bool null_run = true;
  size_t prefill = 0;          // see LikelihoodOptions
  bool after_prefill = false;  // instead of the windows' own mode
  ArmOptions arm_options;
  Compute compute = Compute::kFp32;
  uint64_t seed = kBootstrapSeed;
  std::string partial_path;  // finished windows; empty = not kept
  std::string baseline;      // arm for paired divergence differences; empty = none
  bool baseline_optional =
      false;  // without the baseline's arm: no differences, instead of an error
  std::map<std::string, std::string> labels;  // for every row: tool, device, command
};

// Everything that is loaded once. Also the ground the recall tasks stand on.
struct EvalSession {
  EvalRequest request;
  std::shared_ptr<const ModelWeights> weights;
  std::shared_ptr<const Tokenizer> tokenizer;
  std::unique_ptr<Transformer> transformer;
  std::vector<EvalText> texts;
  std::vector<std::shared_ptr<const KvArm>> arms;  // [0] = reference
  std::map<std::string, std::string> labels;       // request's and hashes
  std::vector<std::string> notes;                  // for the reader: skipped arms, warnings
  std::shared_ptr<PartialFile> partial;  // once evaluate_likelihood was called, if windows are kept
};

// Throws Error naming the file or option that does not fit: unknown arm, bundle of another model or
// tokenizer, calibration text among the scored texts.
EvalSession open_session(const EvalRequest& request);

// Name of texts and length in rows: "emma+persuasion-2048".
std::string cell_name(const EvalSession& session, size_t length);

// Runs perplexity and divergence. Adds notes to the session (dropped tail tokens, arms that never
// read a quantized token).
std::vector<ResultRow> evaluate_likelihood(EvalSession& session, const Progress& progress);

// The arms a comparison runs when none are named: the protocol's standard set, with a bundle the
// calibrated ones, and the controls. Where the bundle has key means the controls' keys are
// centered: large constant parts of keys (models with key biases) are rounded by the BF16 windows
// and the 8-bit grid, and a control that is not near zero says nothing. bundle may be null.
std::vector<std::string> standard_arms(const Bundle* bundle);

// How much of what is to be scored the bundle was calibrated on.
struct CalibrationOverlap {
  size_t shared = 0;     // passages in both (base/token_fingerprint.h: one for 16 tokens or so)
  size_t scored = 0;     // passages of the scored tokens; 0 = the bundle names files alone
  bool refused = false;  // a hundredth of the scored passages or more, or the same file
  bool any() const { return shared > 0 || refused; }
};
// From the fingerprints of the bundle's calibration tokens where it has them: the first
// `max_windows` windows of `length` tokens of each text (0 = whole texts). Fewer shared passages
// than a hundredth are boilerplate that different texts have too. A bundle without fingerprints is
// refused when one of the files is the one it was calibrated on (its hash is the bundle's text hash
// or is listed in its options).
CalibrationOverlap calibration_overlap(const BundleInfo& info, const std::vector<EvalText>& texts,
                                       size_t length, size_t max_windows);

}  // namespace oscar
