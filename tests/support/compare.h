// The one comparator of the tests: NaN and infinity must coincide, then every element must agree
// absolutely or relatively, then the cosine is checked; the worst position is printed.
#pragma once

#include <cmath>
#include <cstddef>
#include <sstream>
#include <string>

namespace oscar_test {

struct Tolerance {
  double absolute = 0.0;
  double relative = 0.0;
  double min_cosine = 0.0;  // 0 = not checked
};

struct Comparison {
  bool ok = true;
  std::string message;  // empty when ok; else what differs first and worst
  explicit operator bool() const { return ok; }
};

template <class A, class B>
Comparison compare(const A* actual, const B* expected, size_t count, const Tolerance& tolerance) {
  Comparison result;
  double dot = 0.0, actual_square = 0.0, expected_square = 0.0, worst = 0.0;
  size_t worst_index = 0, failures = 0;
  for (size_t i = 0; i < count; ++i) {
    const double a = static_cast<double>(actual[i]);
    const double e = static_cast<double>(expected[i]);
    bool good = true;
    double excess = 0.0;
    if (!std::isfinite(a) || !std::isfinite(e)) {
      good = (std::isnan(a) && std::isnan(e)) || a == e;
      excess = good ? 0.0 : HUGE_VAL;
    } else {
      const double difference = std::abs(a - e);
      good = difference <= tolerance.absolute || difference <= tolerance.relative * std::abs(e);
      excess = difference;
      dot += a * e;
      actual_square += a * a;
      expected_square += e * e;
    }
    if (!good) {
      ++failures;
      if (failures == 1 || excess > worst) {
        worst = excess;
        worst_index = i;
      }
    }
  }
  std::ostringstream text;
  text.precision(9);
  if (failures > 0) {
    text << failures << " of " << count << " elements differ; worst at " << worst_index
         << ": actual " << static_cast<double>(actual[worst_index]) << ", expected "
         << static_cast<double>(expected[worst_index]) << "; ";
  }
  if (tolerance.min_cosine > 0.0 && count > 0) {
    const double norm = std::sqrt(actual_square * expected_square);
    const double cosine = norm == 0.0 ? (actual_square == expected_square ? 1.0 : 0.0) : dot / norm;
    if (!(cosine >= tolerance.min_cosine))
      text << "cosine " << cosine << " below " << tolerance.min_cosine;
  }
  result.message = text.str();
  result.ok = result.message.empty();
  return result;
}

}  // namespace oscar_test

// Checks and prints the worst position on failure.
#define CHECK_CLOSE(actual, expected, count, ...)                                         \
  do {                                                                                    \
    const auto comparison_ = ::oscar_test::compare(actual, expected, count, __VA_ARGS__); \
    INFO(comparison_.message);                                                            \
    CHECK(comparison_.ok);                                                                \
  } while (false)
