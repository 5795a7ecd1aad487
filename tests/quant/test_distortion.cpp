// Distortion statistics on rows whose answers are known.
#include <cmath>

#include "base/error.h"
#include "codec_helpers.h"
#include "quant/distortion.h"

using oscar::Distortion;
using oscar::measure_distortion;

TEST_CASE("distortion: two rows by hand", "[quant]") {
  const std::vector<float> exact = {3.0F, 4.0F, 0.0F, 0.0F, 1.0F, 0.0F, 0.0F, 2.0F};
  const std::vector<float> decoded = {3.0F, 2.0F, 0.0F, 0.0F, 0.0F, 0.0F, 0.0F, 4.0F};
  const Distortion result = measure_distortion(exact.data(), decoded.data(), 2, 4, 4, 4);
  CHECK(result.mse() == Approx((4.0 + 1.0 + 4.0) / 8.0));
  CHECK(result.relative_mse() == Approx(9.0 / 30.0));
  CHECK(result.max_abs_error == 2.0);
  CHECK(result.shrinkage() == Approx(1.0 - (17.0 / 25.0 + 8.0 / 5.0) / 2.0));
  CHECK(result.mean_cosine() ==
        Approx((17.0 / (5.0 * std::sqrt(13.0)) + 8.0 / (4.0 * std::sqrt(5.0))) / 2.0));
  CHECK(result.dim_error_sum == std::vector<double>{1.0, 2.0, 0.0, -2.0});
  CHECK(result.dim_error_square_sum == std::vector<double>{1.0, 4.0, 0.0, 4.0});
  CHECK(result.bias_share() == Approx((1.0 + 4.0 + 4.0) / (2.0 * 9.0)));
  CHECK(result.metric_error() == 0.0);
}

TEST_CASE("distortion: the metric's form equals the dense product", "[quant]") {
  const auto metric = oscar_test::random_metric(1, 36);
  const auto exact = oscar_test::normal_rows(2, 5, 36), decoded = oscar_test::normal_rows(3, 5, 36);
  double error_sum = 0.0, exact_sum = 0.0;
  for (size_t row = 0; row < 5; ++row)
    for (size_t i = 0; i < 36; ++i)
      for (size_t j = 0; j < 36; ++j) {
        const double a = static_cast<double>(metric->a[i * 36 + j]);
        const auto x = [&](size_t d) { return static_cast<double>(exact[row * 36 + d]); };
        const auto e = [&](size_t d) { return x(d) - static_cast<double>(decoded[row * 36 + d]); };
        error_sum += e(i) * a * e(j);
        exact_sum += x(i) * a * x(j);
      }
  const Distortion result =
      measure_distortion(exact.data(), decoded.data(), 5, 36, 36, 36, metric.get());
  CHECK(result.metric_error_sum == Approx(error_sum).epsilon(1e-5));
  CHECK(result.metric_exact_sum == Approx(exact_sum).epsilon(1e-5));
  CHECK(result.metric_error() == Approx(error_sum / 5.0).epsilon(1e-5));
  CHECK(result.relative_metric_error() == Approx(error_sum / exact_sum).epsilon(1e-5));
}

TEST_CASE("distortion: parts merge to the whole, strides, zero rows", "[quant]") {
  auto exact = oscar_test::normal_rows(4, 30, 64);
  const auto decoded = oscar_test::normal_rows(5, 30, 48);
  std::fill(exact.begin() + 64, exact.begin() + 64 + 48, 0.0F);
  const Distortion whole = measure_distortion(exact.data(), decoded.data(), 30, 48, 64, 48);
  CHECK(whole.projection_rows == 29);
  Distortion parts;
  for (size_t row = 0; row < 30; row += 10)
    parts.merge(
        measure_distortion(exact.data() + row * 64, decoded.data() + row * 48, 10, 48, 64, 48));
  CHECK(parts.rows == 30);
  CHECK(parts.elements == 30 * 48);
  CHECK(parts.mse() == Approx(whole.mse()));
  CHECK(parts.shrinkage() == Approx(whole.shrinkage()));
  CHECK(parts.mean_cosine() == Approx(whole.mean_cosine()));
  CHECK(parts.bias_share() == Approx(whole.bias_share()));
  CHECK(parts.max_abs_error == whole.max_abs_error);
  const Distortion same = measure_distortion(exact.data(), exact.data(), 30, 48, 64, 64);
  CHECK(same.mse() == 0.0);
  CHECK(same.mean_cosine() == Approx(1.0));
  CHECK(same.shrinkage() == Approx(0.0).margin(1e-15));
}

TEST_CASE("distortion: refusals", "[quant]") {
  std::vector<float> exact(8, 1.0F), decoded(8, 1.0F);
  decoded[6] = HUGE_VALF;
  CHECK_THROWS_WITH(measure_distortion(exact.data(), decoded.data(), 2, 4, 4, 4),
                    Catch::Contains("row 1 dim 2"));
  const auto metric = oscar_test::random_metric(1, 8);
  CHECK_THROWS_WITH(measure_distortion(exact.data(), exact.data(), 2, 4, 4, 4, metric.get()),
                    Catch::Contains("head_dim"));
  Distortion four = measure_distortion(exact.data(), exact.data(), 2, 4, 4, 4);
  CHECK_THROWS_WITH(four.merge(measure_distortion(exact.data(), exact.data(), 1, 8, 8, 8)),
                    Catch::Contains("merge"));
}
