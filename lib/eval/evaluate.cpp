#include "eval/evaluate.h"

#include <algorithm>
#include <filesystem>

#include "base/error.h"
#include "base/token_fingerprint.h"
#include "eval/arm_summary.h"
#include "eval/likelihood.h"
#include "eval/likelihood_rows.h"
#include "eval/partial_file.h"
#include "io/bundle_file.h"
#include "io/sha256.h"

namespace oscar {
namespace {

struct NamedBundle {
  Bundle bundle;
  std::string sha256;
};

// Bundles by path, each read once.
class BundleShelf {
 public:
  BundleShelf(const EvalRequest& request, EvalSession& session)
      : request_(request), session_(session) {}

  const NamedBundle* get(const std::string& path) {
    if (path.empty()) return nullptr;
    const auto found = shelf_.find(path);
    if (found != shelf_.end()) return &found->second;
    NamedBundle named{read_bundle(path), sha256_file(path)};
    check_fit(path, named.bundle.info);
    return &shelf_.emplace(path, std::move(named)).first->second;
  }

 private:
  void check_fit(const std::string& path, const BundleInfo& info) {
    const std::string& model = model_sha256(*session_.weights);
    OSCAR_CHECK(info.model_sha256.empty() || info.model_sha256 == model, path,
                ": was calibrated for the model ", info.model_sha256, ", but ", request_.model_path,
                " is ", model);
    OSCAR_CHECK(
        info.tokenizer_sha256.empty() || info.tokenizer_sha256 == session_.tokenizer->sha256(),
        path, ": was calibrated with the tokenizer ", info.tokenizer_sha256, ", but ",
        request_.model_path, " has ", session_.tokenizer->sha256());
    const CalibrationOverlap overlap = calibration_overlap(
        info, session_.texts, request_.length, request_.whole_texts ? 0 : request_.max_windows);
    if (!overlap.any()) return;
    const std::string extent = overlap.scored == 0 ? std::string("a text")
                                                   : cat(overlap.shared, " of the ", overlap.scored,
                                                         " passages (fingerprints)");
    if (!overlap.refused) {
      session_.notes.push_back(cat(path, ": was calibrated on ", extent, " that are scored"));
      return;
    }
    OSCAR_CHECK(request_.allow_overlap, path, ": was calibrated on ", extent,
                " to be scored; choose another --text, or --allow-overlap to score it all the same "
                "(labelled)");
    session_.labels["overlap"] = "calibrated on the test set";
    session_.notes.push_back(cat(path, ": calibrated on the test set"));
  }

  const EvalRequest& request_;
  EvalSession& session_;
  std::map<std::string, NamedBundle> shelf_;
};

// text: NAME[:SUFFIX...][@BUNDLE.h5]
std::shared_ptr<const KvArm> build_arm(const std::string& text, const EvalRequest& request,
                                       const ModelWeights& weights, BundleShelf& shelf) {
  const size_t at = text.find('@');
  const std::string name = text.substr(0, at);
  ArmOptions options = request.arm_options;
  options.model_sha256 = model_sha256(weights);
  const NamedBundle* bundle = nullptr;
  if (arm_needs_bundle(name)) {
    options.bundle_path = at == std::string::npos ? request.bundle_path : text.substr(at + 1);
    bundle = shelf.get(options.bundle_path);
    if (bundle != nullptr) options.bundle_sha256 = bundle->sha256;
  }
  KvArm arm =
      make_arm(name, weights.config, options, bundle == nullptr ? nullptr : &bundle->bundle);
  arm.name = name;
  if (at != std::string::npos && bundle != nullptr) {
    arm.name += "@" + std::filesystem::path(options.bundle_path).stem().string();
  }
  return std::make_shared<const KvArm>(std::move(arm));
}

// What does not fit the stored form is counted, and said: a few rows in a thousand are usual.
void note_encode_events(EvalSession& session, const LikelihoodRun& run) {
  for (size_t arm = 1; arm < run.arms.size(); ++arm) {
    const std::string events = describe(encode_events(run.records, arm));
    if (!events.empty()) session.notes.push_back(cat(run.arms[arm]->name, ": ", events));
  }
}

std::string run_mode(const EvalRequest& request) {
  return request.after_prefill ? "after-prefill" : mode_name(request.arm_options.windows.mode);
}

std::string arm_provenance(const KvArm& arm) {
  return cat(arm.name, " [", describe(arm), "; ", arm.bundle_sha256, "]");
}

std::string provenance(const EvalSession& session, size_t num_windows) {
  const EvalRequest& request = session.request;
  std::string text = cat("model ", model_sha256(*session.weights), "; tokenizer ",
                         session.tokenizer->sha256(), "; texts");
  for (const EvalText& item : session.texts) text += " " + item.sha256;
  text +=
      cat("; length ", request.length, "; windows ", num_windows, "; rows ", request.rows, "; bos ",
          request.with_bos, "; null ", request.null_run, "; mode ", run_mode(request), "; prefill ",
          request.prefill, "; compute ", request.compute == Compute::kFp32 ? "fp32" : "bf16",
          "; group ", request.arm_options.group, "; meta ",
          static_cast<int>(request.arm_options.meta), "; arms");
  for (const auto& arm : session.arms) text += " " + arm_provenance(*arm);
  const auto tool = request.labels.find("tool");
  if (tool != request.labels.end()) text += "; tool " + tool->second;
  return text;
}

void note_unread_arms(EvalSession& session, const LikelihoodRun& run) {
  for (size_t arm = 1; arm < run.arms.size(); ++arm) {
    double read = 0;
    for (const WindowRecord& record : run.records) read += record.arms[arm].tokens_int2_read;
    if (run.arms[arm]->quantized && read == 0) {
      session.notes.push_back(
          cat(run.arms[arm]->name, ": not quantized (no quantized token was read; windows ",
              to_string(run.arms[arm]->windows), " cover the ", run.window_length, " tokens)"));
    }
  }
}

}  // namespace

CalibrationOverlap calibration_overlap(const BundleInfo& info, const std::vector<EvalText>& texts,
                                       size_t length, size_t max_windows) {
  CalibrationOverlap overlap;
  if (info.token_fingerprints.empty()) {
    overlap.refused = std::any_of(texts.begin(), texts.end(), [&](const EvalText& text) {
      return !text.sha256.empty() && (info.text_sha256.find(text.sha256) != std::string::npos ||
                                      info.options_json.find(text.sha256) != std::string::npos);
    });
    return overlap;
  }
  std::vector<int64_t> scored;
  for (const EvalText& text : texts) {
    std::span<const int32_t> tokens(text.tokens);
    if (max_windows > 0 && length > 0)
      tokens = tokens.first(std::min(tokens.size(), length * max_windows));
    scored = merged_fingerprints(scored, token_fingerprints(tokens));
  }
  overlap.scored = scored.size();
  overlap.shared = shared_fingerprints(scored, info.token_fingerprints);
  overlap.refused = overlap.shared > 0 && 100 * overlap.shared >= overlap.scored;
  return overlap;
}

std::string cell_name(const EvalSession& session, size_t length) {
  std::string name;
  for (const EvalText& text : session.texts) {
    name += cat(name.empty() ? "" : "+", std::filesystem::path(text.path).stem().string());
  }
  return cat(name, "-", length);
}

std::vector<std::string> standard_arms(const Bundle* bundle) {
  std::vector<std::string> arms{"naive", "naive-windows", "quarot", "hadamard", "kivi"};
  if (bundle != nullptr) {
    for (const char* arm : {"oscar", "oscar-centered", "oscar-light", "oscar-lean", "oscar-best"}) {
      arms.emplace_back(arm);
    }
  }
  const bool centered = bundle != nullptr &&
                        std::all_of(bundle->layers.begin(), bundle->layers.end(),
                                    [](const auto& item) { return !item.second.k_mean.empty(); });
  for (const char* control : {"int4", "int8"})
    arms.push_back(cat(control, centered ? ":k.centered" : ""));
  return arms;
}

EvalSession open_session(const EvalRequest& request) {
  EvalSession session;
  session.request = request;
  session.labels = request.labels;
  session.weights = std::make_shared<const ModelWeights>(load_weights(request.model_path));
  session.tokenizer = Tokenizer::load(request.model_path);
  session.texts = load_texts(request.text_paths, *session.tokenizer);
  BundleShelf shelf(request, session);
  // A bundle of another model, or made from the scored text, is an error even where single arms may
  // be left out.
  shelf.get(request.bundle_path);
  session.arms.push_back(build_arm(request.reference, request, *session.weights, shelf));
  OSCAR_CHECK(!session.arms[0]->quantized, "--reference ", request.reference,
              ": the reference must be bf16 or fp32");
  for (const std::string& name : request.arms) {
    if (name == request.reference) continue;
    try {
      session.arms.push_back(build_arm(name, request, *session.weights, shelf));
    } catch (const Interrupted&) {
      throw;
    } catch (const Error& problem) {
      if (!request.skip_impossible_arms) throw;
      session.notes.push_back(cat("arm ", name, " left out: ", problem.what()));
    }
  }
  const bool has_baseline =
      std::any_of(session.arms.begin(), session.arms.end(),
                  [&](const auto& arm) { return arm->name == request.baseline; });
  OSCAR_CHECK(request.baseline.empty() || request.baseline_optional || has_baseline, "--baseline ",
              request.baseline, ": no arm of this run has that name");
  session.transformer = std::make_unique<Transformer>(session.weights, request.compute);
  session.labels["model"] = session.weights->config.name;
  session.labels["model_sha256"] = model_sha256(*session.weights);
  session.labels["tokenizer_sha256"] = session.tokenizer->sha256();
  session.labels["weights"] =
      type_name(session.weights->layers.empty() ? session.weights->embedding.type
                                                : session.weights->layers[0].q.type);
  session.labels["compute"] = request.compute == Compute::kFp32 ? "fp32" : "bf16";
  std::string data;
  for (const EvalText& text : session.texts) data += cat(data.empty() ? "" : " ", text.sha256);
  session.labels["data_sha256"] = data;
  return session;
}

std::vector<ResultRow> evaluate_likelihood(EvalSession& session, const Progress& progress) {
  const EvalRequest& request = session.request;
  const TextWindows windows = cut_windows(session.texts, request.length, request.max_windows);
  if (windows.tokens_dropped > 0) {
    session.notes.push_back(cat(windows.tokens_dropped,
                                " tokens at text ends do not fill a window and are not scored"));
  }
  // The run's windows count even when no arm uses them: the scored rows do not depend on the arms.
  const WindowSpec& run_windows = request.arm_options.windows;
  size_t high_precision = 0;
  for (const auto& arm : session.arms) {
    if (!arm->quantized) continue;
    high_precision = std::max({high_precision, arm->windows.sink + arm->windows.recent,
                               run_windows.sink + run_windows.recent});
  }
  LikelihoodOptions options;
  options.targets = scored_targets(parse_row_selection(request.rows), request.length,
                                   request.with_bos, high_precision);
  options.with_bos = request.with_bos;
  options.prefill = request.prefill;
  options.after_prefill = request.after_prefill;
  options.null_run = request.null_run;

  LikelihoodRun run;
  std::vector<size_t> done;
  if (!request.partial_path.empty()) {
    session.partial.reset();  // of an earlier call: its file is locked
    session.partial = std::make_shared<PartialFile>(request.partial_path,
                                                    provenance(session, windows.windows.size()));
    for (const WindowRecord& record : session.partial->records()) {
      done.push_back(record.window);
      run.records.push_back(record);
    }
    if (!done.empty()) {
      session.notes.push_back(
          cat(done.size(), " windows taken from ", request.partial_path, " (resumed)"));
    }
  }
  run_likelihood(*session.transformer, session.texts, windows, session.arms, options, done,
                 progress, [&](WindowRecord record) {
                   if (session.partial) session.partial->append(record);
                   run.records.push_back(std::move(record));
                 });
  std::sort(run.records.begin(), run.records.end(),
            [](const WindowRecord& a, const WindowRecord& b) { return a.window < b.window; });
  run.cell = cell_name(session, request.length);
  run.targets = options.targets;
  run.window_length = request.length;
  run.arms = session.arms;
  run.null_run = request.null_run;
  run.mode = run_mode(request);
  run.bootstrap_seed = request.seed;
  run.perplexity = request.perplexity;
  run.divergence = request.divergence;
  run.labels = session.labels;
  run.labels["rows"] = request.rows;
  std::vector<ResultRow> rows = likelihood_rows(run);
  if (request.divergence && !request.baseline.empty()) {
    for (ResultRow& row : paired_divergence_rows(run, request.baseline)) {
      rows.push_back(std::move(row));
    }
  }
  note_unread_arms(session, run);
  note_encode_events(session, run);
  return rows;
}

}  // namespace oscar
