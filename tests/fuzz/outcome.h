// Counts what a reader did with damaged files and insists on the one exception type.
#pragma once

#include <catch2/catch.hpp>
#include <string_view>

#include "base/error.h"

namespace oscar_test {

struct Outcome {
  size_t accepted = 0, refused = 0;
  // Runs the reader; anything but success or oscar::Error leaves this function and fails the test.
  template <class Reader>
  void run(Reader&& reader) {
    try {
      reader();
      ++accepted;
    } catch (const oscar::Error& error) {
      INFO(error.what());
      REQUIRE(std::string_view(error.what()).size() > 5);
      REQUIRE(std::string_view(error.what()).find('\n') == std::string_view::npos);
      ++refused;
    }
  }
};

}  // namespace oscar_test
