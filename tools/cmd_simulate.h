// simulate: errors of arms on a capture, without running the model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace oscar {

struct SimulateCommand {
  std::string capture, bundle, out;
  std::vector<std::string> arms;
  std::vector<int64_t> layers;
  size_t sink = 64, recent = 256, sequences = 0, query_stride = 8, first_query = 0, worst = 10;
  int group = 0, threads = 0;
  bool json = false, quiet = false;
};

// Prints the tables (or the rows) and stores the rows (out).
void run_simulate(const SimulateCommand& command);

}  // namespace oscar
