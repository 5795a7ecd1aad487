// The named recipe with the changes that the command's options ask for.
#pragma once

#include <string>

#include "calib/recipes.h"
#include "tools/cmd_calibrate.h"

namespace oscar {

// Throws Error naming the option that is out of range or not understood.
RecipeOptions chosen_recipe(const CalibrateCommand& options, const std::string& name);

}  // namespace oscar
