// Checks of output file names before long work starts.
#pragma once

#include <string>
#include <vector>

namespace oscar {

// Throws Error when a result cannot be written under `path` (its folder does not exist, or it is a
// folder itself) or when it would replace one of the files that the run reads. Empty paths are
// skipped.
void check_output(const std::string& path, const std::vector<std::string>& inputs);

}  // namespace oscar
