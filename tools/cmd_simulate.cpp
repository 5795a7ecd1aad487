#include "tools/cmd_simulate.h"

#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "eval/evaluate.h"
#include "eval/simulate.h"
#include "io/bundle_file.h"
#include "io/capture_file.h"
#include "io/results.h"
#include "io/sha256.h"
#include "model/kv_arm.h"
#include "report/simulate_report.h"
#include "tools/cmd_eval.h"
#include "tools/commands.h"
#include "tools/console.h"
#include "tools/output_check.h"
#include "tools/version.h"

namespace oscar {
namespace {

// The texts behind a capture, several hashes stand between commas, and its tokens.
std::vector<EvalText> captured_texts(const CaptureReader& capture) {
  std::vector<EvalText> texts(1);
  texts[0].tokens = capture.token_ids();
  std::stringstream hashes(capture.info().text_sha256);
  for (std::string hash; std::getline(hashes, hash, ',');) {
    texts.emplace_back();
    texts.back().sha256 = hash;
  }
  return texts;
}

std::vector<std::shared_ptr<const KvArm>> make_arms(const SimulateCommand& command,
                                                    const CaptureReader& capture,
                                                    std::vector<std::string>& notes) {
  const CaptureInfo& info = capture.info();
  const ModelConfig config = config_of(info);
  ArmOptions arm_options;
  arm_options.windows = {command.sink, command.recent, WindowMode::kExact};
  arm_options.group = command.group;
  arm_options.model_sha256 = info.model_sha256;
  Bundle bundle;
  if (!command.bundle.empty()) {
    bundle = read_bundle(command.bundle);
    arm_options.bundle_path = command.bundle;
    arm_options.bundle_sha256 = sha256_file(command.bundle);
    if (calibration_overlap(bundle.info, captured_texts(capture), 0, 0).refused) {
      notes.push_back("the bundle was calibrated on a text of this capture: not held out");
    }
  }
  std::vector<std::shared_ptr<const KvArm>> arms;
  for (const std::string& name : command.arms) {
    KvArm arm = make_arm(name, config, arm_options, command.bundle.empty() ? nullptr : &bundle);
    arm.name = name;
    arms.push_back(std::make_shared<const KvArm>(std::move(arm)));
  }
  return arms;
}

}  // namespace

void run_simulate(const SimulateCommand& command) {
  set_num_threads(command.threads);
  const Progress progress = console_progress(command.quiet);
  check_output(command.out, {command.capture, command.bundle});
  const CaptureReader capture(command.capture);
  const CaptureInfo& info = capture.info();
  std::vector<std::string> notes;
  const auto arms = make_arms(command, capture, notes);
  SimulateOptions options;
  options.query_stride = command.query_stride;
  options.first_query = command.first_query;
  options.max_sequences = command.sequences;
  options.layers = command.layers;
  options.labels = {{"tool", tool_version()},
                    {"device", device_name()},
                    {"command", command_line()},
                    {"capture_sha256", sha256_file(command.capture)},
                    {"model_sha256", info.model_sha256},
                    {"data_sha256", info.text_sha256}};
  const std::vector<ResultRow> rows = simulate(capture, arms, options, progress);
  if (!command.out.empty()) write_rows(rows, command.out);
  if (command.json) {
    for (const ResultRow& row : rows) fmt::print("{}\n", to_json_line(row));
    return;
  }
  fmt::print(
      "Errors by captured queries, mean over layers and heads (K, V: relative squared error "
      "of history rows;\nlogit rms: nats, over history keys, plain and weighted by the real "
      "softmax; output: relative squared error):\n{}\n",
      simulate_summary_table(rows).text());
  const Table worst = simulate_table(rows, command.worst);
  fmt::print("Worst {} for {}:\n{}", worst.num_rows(), command.arms.back(), worst.text());
  for (const std::string& note : notes) fmt::print("note: {}\n", note);
}

void add_simulate(CLI::App& app) {
  auto options = std::make_shared<SimulateCommand>();
  CLI::App* command = app.add_subcommand(
      "simulate", "errors of arms on a capture, per layer and head, without running the model");
  command->add_option("--capture", options->capture, "capture file (.h5)")->required();
  command->add_option("--bundle", options->bundle, "calibration bundle for the oscar arms");
  command
      ->add_option("--arm", options->arms,
                   "arms joined by commas: NAME[:SUFFIX...], the last one orders the worst layers")
      ->delimiter(',')
      ->required();
  command->add_option("--layers", options->layers, "layers joined by commas (default: all)")
      ->delimiter(',');
  command->add_option("--sink", options->sink, "first tokens kept in high precision")
      ->check(count_range())
      ->capture_default_str();
  command->add_option("--recent", options->recent, "last tokens kept in high precision")
      ->check(count_range())
      ->capture_default_str();
  command->add_option("--group", options->group, "elements of a quantization group (0 = head_dim)");
  command->add_option("--sequences", options->sequences, "sequences of the capture (0 = all)");
  command->add_option("--query-stride", options->query_stride, "use every so many queries")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--from", options->first_query,
                      "first query position (0 = middle of the sequence, behind the windows)");
  command->add_option("--worst", options->worst, "lines of the table of worst heads (0 = all)")
      ->capture_default_str();
  add_threads_option(*command, options->threads);
  command->add_option("--out", options->out, "rows file (.jsonl)");
  command->add_flag("--json", options->json, "print the rows instead of the tables");
  command->add_flag("--quiet", options->quiet, "no progress on stderr");
  command->footer(
      "Example:\n  oscar simulate --capture capture.h5 --bundle best.h5 --arm "
      "naive-windows,hadamard,oscar-best --out simulate.jsonl");
  command->callback([options] { run_simulate(*options); });
}

}  // namespace oscar
