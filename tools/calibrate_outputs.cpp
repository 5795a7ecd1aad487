#include "tools/calibrate_outputs.h"

#include <algorithm>
#include <set>

#include "base/error.h"
#include "tools/output_check.h"

namespace oscar {

std::vector<std::string> wanted_recipes(const CalibrateCommand& options) {
  OSCAR_CHECK(!options.out.empty() || !options.moments_out.empty(),
              "calibrate: expected --out, --moments-out or both");
  return options.out.empty() ? std::vector<std::string>{} : options.recipes;
}

std::string out_path(const CalibrateCommand& options, const std::string& recipe) {
  std::string path = options.out;
  const size_t at = path.find(kRecipePlaceholder);
  if (at != std::string::npos) path.replace(at, std::string(kRecipePlaceholder).size(), recipe);
  return path;
}

std::string checkpoint_path(const CalibrateCommand& options) {
  return (options.out.empty() ? options.moments_out : out_path(options, options.recipes.at(0))) +
         ".part";
}

void check_outputs(const CalibrateCommand& options, const std::vector<std::string>& recipes) {
  OSCAR_CHECK(options.out.empty() || !recipes.empty(), "--recipe: expected at least one recipe");
  OSCAR_CHECK(recipes.size() <= 1 || options.out.find(kRecipePlaceholder) != std::string::npos,
              "--out: with several recipes the name must contain ", kRecipePlaceholder);
  std::vector<std::string> inputs = options.texts;
  inputs.insert(inputs.end(), {options.capture, options.model});
  inputs.insert(inputs.end(), options.moments.begin(), options.moments.end());
  std::vector<std::pair<std::string, std::string>> outputs{{"--moments-out", options.moments_out}};
  for (const std::string& recipe : std::set<std::string>(recipes.begin(), recipes.end()))
    outputs.emplace_back("--out", out_path(options, recipe));
  for (const auto& [option, path] : outputs) check_output(path, inputs);
  if (!options.texts.empty())
    for (const char* suffix : {"", "-rows"})
      outputs.emplace_back("the file of the unfinished run", checkpoint_path(options) + suffix);
  check_distinct_outputs(outputs);
}

void check_given(const CalibrateCommand& options) {
  const bool chooses =
      std::find(options.recipes.begin(), options.recipes.end(), "auto") != options.recipes.end();
  for (const char* budget : {"--bits", "--write-cost"})
    OSCAR_CHECK(chooses || options.given.count(budget) == 0, budget,
                " has no effect without --recipe auto; leave it out or let the recipe be chosen");
  std::vector<const char*> without_effect{"--tokens", "--seq-len", "--skip-tokens",
                                          "--checkpoint-seconds"};
  std::string reason = " has no effect with --capture, whose tokens are fixed; leave it out";
  if (!options.moments.empty()) {
    without_effect.insert(without_effect.end(),
                          {"--compute", "--held-out", "--held-out-tokens", "--tp-rank"});
    reason = " has no effect with --moments, whose statistics are fixed; leave it out";
  } else if (options.capture.empty()) {
    return;
  }
  for (const char* name : without_effect) OSCAR_CHECK(options.given.count(name) == 0, name, reason);
}

}  // namespace oscar
