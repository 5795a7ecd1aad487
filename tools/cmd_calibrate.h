// Options of `oscar calibrate`, so that tests can run it without a command line.
#pragma once

#include <cstddef>
#include <set>
#include <string>
#include <vector>

namespace oscar {

struct CalibrateCommand {
  std::string capture;  // or model and texts, or moments
  std::string model, compute = "fp32";
  std::vector<std::string> texts;
  std::vector<std::string> moments;  // shards to put together
  std::string moments_out;           // statistics to write
  bool moments_rows = false;
  std::string tp_rank;  // "r/R": the capture holds the heads of rank r of R
  std::string out;  // may be empty with moments_out; with several recipes it contains "{recipe}"
  std::vector<std::string> recipes = {"best"};
  size_t tokens = 20480;
  std::vector<size_t> lengths = {2048};
  size_t skip_tokens = 0;
  // Changes to the recipe; empty or negative = as the recipe says.
  std::string key_target, value_target, composition, key_metric, center_values;
  double clip_k = -1.0, clip_v = -1.0;
  bool per_head = false, center = false, block_hadamard = false, keep_rotation = false;
  int sign_patterns = -1;
  std::vector<std::string> multiplier_sets;  // "0.9/1/1.1" each
  double held_out = 0.2;
  size_t held_out_tokens = 1024, sink = 64, recent = 256;
  int group = 0, threads = 0;
  double checkpoint_seconds = 60.0;
  double bits = 3.0, write_cost = 0.2;  // budgets of the recipe "auto"
  bool json = false, quiet = false;
  // Names of the options on the command line: refused where they would have no effect.
  std::set<std::string> given;
};

// Writes the bundles; a table (or one JSON object with --json) goes to stdout.
void run_calibrate(const CalibrateCommand& options);

}  // namespace oscar
