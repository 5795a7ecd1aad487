// Catch2's main, compiled once for all test executables.
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>

#include "support/paths.h"

const char* oscar_test::source_folder() { return OSCAR_SOURCE_DIR; }
