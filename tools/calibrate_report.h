// What a calibration found on held-out tokens: tables on stdout, or JSON.
#pragma once

#include <string>

#include "calib/calibrate.h"

namespace oscar {

// path: where the bundle was written.
void print_calibration(const RecipeResult& recipe, const std::string& path);
// One JSON object.
std::string calibration_json(const RecipeResult& recipe, const std::string& path);

}  // namespace oscar
