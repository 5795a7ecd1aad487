#include <memory>
#include <optional>

#include "eval/evaluate.h"
#include "tools/cmd_eval.h"
#include "tools/commands.h"

namespace oscar {

// The standard arms side by side: those that need no calibration, the controls, and what the bundle
// can give.
void add_compare(CLI::App& app) {
  auto options = std::make_shared<EvalOptions>();
  options->baseline = "hadamard";
  CLI::App* command = app.add_subcommand(
      "compare", "the standard arms side by side, with paired differences and bits per element");
  add_eval_options(*command, *options);
  command
      ->add_option(
          "--arm", options->arms,
          "arms joined by commas (default: naive, naive-windows, quarot, hadamard, kivi, "
          "with --bundle oscar and the recipes it can give, int4, int8, their keys centered "
          "where the bundle has means)")
      ->delimiter(',');
  command->footer(
      "Example:\n  oscar compare --model model.gguf --text pride_and_prejudice.txt --bundle "
      "best.h5 "
      "\\\n    --windows 4 --out compare.jsonl --markdown compare.md --html compare.html");
  command->callback([options, command] {
    EvalOptions chosen = *options;
    chosen.baseline_optional = command->count("--baseline") == 0;
    if (chosen.arms.empty()) {
      std::optional<Bundle> bundle;
      if (!chosen.bundle.empty()) bundle = read_bundle(chosen.bundle);
      chosen.arms = standard_arms(bundle ? &*bundle : nullptr);
      chosen.skip_impossible_arms = true;
    }
    run_eval(chosen);
  });
}

}  // namespace oscar
