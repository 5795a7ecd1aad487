// What `oscar calibrate` writes and under which names; checks before long work starts.
#pragma once

#include <string>
#include <vector>

#include "tools/cmd_calibrate.h"

namespace oscar {

inline constexpr const char* kRecipePlaceholder = "{recipe}";

// None when only statistics are asked for. Throws Error when nothing is to be written.
std::vector<std::string> wanted_recipes(const CalibrateCommand& options);
// --out with the recipe's name.
std::string out_path(const CalibrateCommand& options, const std::string& recipe);
// Where an unfinished run is kept; its rows stand in the file of that name + "-rows".
std::string checkpoint_path(const CalibrateCommand& options);

// Throws Error naming file and option when one cannot be written, would replace an input, or when
// two are the same file.
void check_outputs(const CalibrateCommand& options, const std::vector<std::string>& recipes);
// Throws Error naming an option on the command line that the source of the activations ignores.
void check_given(const CalibrateCommand& options);

}  // namespace oscar
