// Options of `oscar capture`, so that tests can run it without a command line.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace oscar {

struct CaptureCommand {
  std::string model, out, dtype = "bf16", compute = "fp32";
  std::vector<std::string> texts;
  std::vector<size_t> lengths = {2048}, layers;
  size_t tokens = 20480;
  int threads = 0;
  bool outputs = false, json = false, quiet = false;
};

// Writes options.out; a summary (or one JSON object with --json) goes to stdout.
void run_capture(const CaptureCommand& options);

}  // namespace oscar
