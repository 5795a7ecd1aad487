// The comparator must fail where it should.
#include <catch2/catch.hpp>
#include <limits>

#include "support/compare.h"

using oscar_test::compare;

TEST_CASE("comparator accepts what agrees and rejects what does not", "[compare]") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  const float expected[] = {1.0F, -2.0F, nan, inf};
  const float same[] = {1.0F, -2.0F, nan, inf};
  CHECK(compare(same, expected, 4, {}));
  const float off[] = {1.0F, -2.1F, nan, inf};
  CHECK_FALSE(compare(off, expected, 4, {.absolute = 0.05}));
  CHECK(compare(off, expected, 4, {.absolute = 0.11}));
  CHECK(compare(off, expected, 4, {.relative = 0.051}));
  const float no_nan[] = {1.0F, -2.0F, 0.0F, inf};
  CHECK_FALSE(compare(no_nan, expected, 4, {.absolute = 100}));
  const float other_inf[] = {1.0F, -2.0F, nan, -inf};
  CHECK_FALSE(compare(other_inf, expected, 4, {.absolute = 100}));
  const float zeros[] = {0.0F, 0.0F};
  const float small[] = {1e-9F, 1e-9F};
  CHECK_FALSE(compare(zeros, small, 2, {.absolute = 1e-6, .min_cosine = 0.99}));
  CHECK(compare(off, expected, 4, {.absolute = 1e-3}).message.find("worst at 1") !=
        std::string::npos);
}
