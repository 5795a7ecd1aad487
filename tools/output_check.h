// Checks of output file names before long work starts.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace oscar {

// Throws Error when a result cannot be written under `path` (its folder does not exist, or it is a
// folder itself) or when it would replace one of the files that the run reads. Empty paths are
// skipped.
void check_output(const std::string& path, const std::vector<std::string>& inputs);

// Throws Error when two of the files that a run writes are the same file under names that may
// differ in spelling. Pairs of option (or what else the file is) and path; empty paths are skipped.
void check_distinct_outputs(const std::vector<std::pair<std::string, std::string>>& outputs);

}  // namespace oscar
