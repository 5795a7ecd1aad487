// What this binary is: version, commit, build options, SIMD level, libraries.
#pragma once

#include <string>

namespace oscar {

std::string version_text();  // several lines, for --version
std::string tool_version();  // one line for provenance: "0.1.0+<commit>"

}  // namespace oscar
