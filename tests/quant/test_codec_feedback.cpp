// The feedback encoder against a direct double computation of the method, its gains one by one,
// degenerate rows, and equal bits from every version of the inner loops.
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "codec_helpers.h"
#include "feedback_reference.h"
#include "support/compare.h"

using oscar::CodecSpec;
using oscar::Encoder;
using oscar::GainRule;
using oscar::MetaFormat;
using oscar::StartRange;
using oscar_test::FeedbackReference;
using oscar_test::normal_rows;
using oscar_test::random_metric;
using oscar_test::round_trip;

namespace {

constexpr StartRange kAllStarts[] = {StartRange::kClip, StartRange::kGrid, StartRange::kMetricGrid};

CodecSpec feedback_spec(int head_dim) {
  CodecSpec spec;
  spec.head_dim = head_dim;
  spec.encoder = Encoder::kFeedback;
  spec.log8_scale_max = 8.0F;
  return spec;
}

std::vector<double> to_double(const std::vector<float>& values, size_t row, size_t width) {
  return {values.begin() + static_cast<std::ptrdiff_t>(row * width),
          values.begin() + static_cast<std::ptrdiff_t>((row + 1) * width)};
}

// Mean of e A e^T over the rows.
double mean_cost(const oscar::EncoderMetric& metric, const std::vector<float>& rows,
                 const std::vector<float>& values) {
  const FeedbackReference reference(metric, {});
  const auto width = static_cast<size_t>(metric.head_dim);
  double sum = 0.0;
  for (size_t row = 0; row < rows.size() / width; ++row)
    sum += reference.cost(to_double(rows, row, width), to_double(values, row, width));
  return sum / static_cast<double>(rows.size() / width);
}

std::vector<CodecSpec> variants(int head_dim) {
  std::vector<CodecSpec> list;
  for (const MetaFormat meta :
       {MetaFormat::kScaleMinFp16, MetaFormat::kLog8, MetaFormat::kScaleZeroFp32,
        MetaFormat::kScaleZeroBf16, MetaFormat::kSymmetricFp16})
    for (const GainRule gain : {GainRule::kNone, GainRule::kPlain, GainRule::kMetric})
      for (const StartRange start : kAllStarts)
        for (const int effort : {0, 1, 2}) {
          CodecSpec spec = feedback_spec(head_dim);
          spec.meta = meta;
          spec.gain = gain;
          spec.feedback.start = start;
          spec.feedback.sweeps = effort;
          spec.feedback.refits = effort / 2;
          spec.feedback.feedback = effort != 1;
          list.push_back(spec);
        }
  return list;
}

}  // namespace

TEST_CASE("metric: factors give the damped, normalised matrix back", "[quant]") {
  const size_t size = 64;
  oscar::Random random(4);
  std::vector<double> root(size * size), m(size * size, 0.0);
  for (double& value : root) value = random.normal();
  for (size_t k = 0; k < 20; ++k)  // rank 20: legal, the damping makes it definite
    for (size_t i = 0; i < size; ++i)
      for (size_t j = 0; j < size; ++j) m[i * size + j] += root[k * size + i] * root[k * size + j];
  const oscar::EncoderMetric metric = oscar::make_encoder_metric(m.data(), 64);
  double trace = 0.0;
  for (size_t i = 0; i < size; ++i) trace += m[i * size + i];
  std::vector<double> product(size * size, 0.0), expected(size * size);
  for (size_t i = 0; i < size; ++i)
    for (size_t j = 0; j < size; ++j) {
      expected[i * size + j] = m[i * size + j] / (trace / size) + (i == j ? 0.01 : 0.0);
      for (size_t k = 0; k < size; ++k)
        product[i * size + j] += static_cast<double>(metric.l[i * size + k]) *
                                 static_cast<double>(metric.pivot[k]) *
                                 static_cast<double>(metric.l[j * size + k]);
      if (j > i) CHECK(metric.l[i * size + j] == 0.0F);
    }
  CHECK_CLOSE(product.data(), expected.data(), size * size, {.absolute = 64 * 0x1p-24});
  CHECK_CLOSE(metric.a.data(), expected.data(), size * size, {.absolute = 8 * 0x1p-24});
}

TEST_CASE("metric: what cannot be a metric is refused", "[quant]") {
  std::vector<double> m(16, 0.0);
  CHECK_THROWS_WITH(oscar::make_encoder_metric(m.data(), 4), Catch::Contains("diagonal"));
  for (size_t i = 0; i < 4; ++i) m[i * 5] = 1.0;
  CHECK_NOTHROW(oscar::make_encoder_metric(m.data(), 4));
  CHECK_THROWS_WITH(oscar::make_encoder_metric(m.data(), 3), Catch::Contains("head_dim"));
  m[1] = m[4] = 1.5;
  CHECK_THROWS_WITH(oscar::make_encoder_metric(m.data(), 4), Catch::Contains("semidefinite"));
  m[7] = std::nan("");
  CHECK_THROWS_WITH(oscar::make_encoder_metric(m.data(), 4), Catch::Contains("[1, 3]"));
}

TEST_CASE("feedback: all versions of the inner loops give the same bytes", "[quant]") {
  for (const int head_dim : {4, 36, 64, 128}) {
    const auto metric = random_metric(5, head_dim);
    const std::vector<float> rows = normal_rows(6, 19, static_cast<size_t>(head_dim), 2.0);
    for (const CodecSpec& spec : variants(head_dim)) {
      if (head_dim == 128 && spec.meta != MetaFormat::kScaleMinFp16) continue;  // time
      INFO("head_dim " << head_dim << " meta " << static_cast<int>(spec.meta) << " gain "
                       << static_cast<int>(spec.gain) << " sweeps " << spec.feedback.sweeps);
      const auto reference =
          round_trip(*oscar::make_codec_with(spec, metric, *oscar::scalar_lane_kernels()), rows);
      for (const oscar::LaneKernels* kernels : oscar_test::all_kernels()) {
        if (kernels->lanes == 1) continue;
        INFO(kernels->name);
        const auto codec = oscar::make_codec_with(spec, metric, *kernels);
        const auto result = round_trip(*codec, rows);
        REQUIRE(result.bytes == reference.bytes);
        REQUIRE(result.values == reference.values);
        REQUIRE(result.stats.gain_clamped == reference.stats.gain_clamped);
        // Rows one by one, by twos and by fives: the batch has no influence.
        for (const size_t step : {1U, 2U, 5U}) {
          std::vector<uint8_t> bytes(reference.bytes.size());
          for (size_t row = 0; row < 19; row += step)
            codec->encode(rows.data() + row * static_cast<size_t>(head_dim),
                          static_cast<size_t>(head_dim), std::min<size_t>(step, 19 - row),
                          bytes.data() + row * codec->bytes_per_block(), nullptr);
          REQUIRE(bytes == reference.bytes);
        }
      }
    }
  }
}

TEST_CASE("feedback: codes, pair and cost of the method as written down", "[quant]") {
  for (const int head_dim : {64, 128})
    for (const StartRange start : kAllStarts)
      for (const int effort : {0, 1, 2}) {
        CodecSpec spec = feedback_spec(head_dim);
        spec.feedback.start = start;
        spec.feedback.sweeps = effort;
        spec.feedback.refits = effort / 2;
        INFO("head_dim " << head_dim << " start " << static_cast<int>(start) << " effort "
                         << effort);
        const auto metric = random_metric(7, head_dim);
        const auto width = static_cast<size_t>(head_dim);
        const std::vector<float> rows = normal_rows(8, 60, width, 1.0);
        const auto result = round_trip(*oscar::make_codec(spec, metric), rows);
        const FeedbackReference reference(*metric, spec.feedback);
        size_t equal = 0;
        double expected_cost = 0.0;
        for (size_t row = 0; row < 60; ++row) {
          const auto expected = reference.encode(rows.data() + row * width);
          expected_cost += expected.cost / 60.0;
          bool same = true;
          for (size_t d = 0; d < width; ++d)
            same = same && static_cast<double>(result.values[row * width + d]) == expected.value(d);
          equal += same ? 1U : 0U;
        }
        // A rounding tie decided differently in float changes all later codes of its row, so a few
        // rows differ; the others agree in every code and in the pair.
        CHECK(equal >= 54);
        CHECK(mean_cost(*metric, rows, result.values) == Approx(expected_cost).epsilon(0.01));
      }
}

TEST_CASE("feedback: every step lowers the cost in the metric", "[quant]") {
  const int head_dim = 64;
  const auto metric = random_metric(9, head_dim);
  const std::vector<float> rows = normal_rows(10, 400, 64);
  const auto cost_of = [&](const CodecSpec& spec) {
    return mean_cost(*metric, rows, round_trip(*oscar::make_codec(spec, metric), rows).values);
  };
  CodecSpec rtn;
  rtn.head_dim = head_dim;
  rtn.clip_ratio = 0.92;
  const double plain = cost_of(rtn);
  CodecSpec spec = feedback_spec(head_dim);
  spec.feedback.feedback = false;
  const double searched = cost_of(spec);
  spec.feedback.multipliers = {1.0};
  const double clip_start = cost_of(spec);
  spec.feedback.start = StartRange::kMetricGrid;
  const double grid_start = cost_of(spec);
  spec.feedback.start = StartRange::kClip;
  spec.feedback.feedback = true;
  const double one_multiplier = cost_of(spec);
  spec.feedback.multipliers = {0.85, 1.0, 1.15, 1.35, 1.6};
  const double lean = cost_of(spec);
  spec.feedback.start = StartRange::kMetricGrid;
  const double grid = cost_of(spec);
  spec.feedback.sweeps = 2;
  const double swept = cost_of(spec);
  spec.feedback.refits = 1;
  const double refitted = cost_of(spec);
  CHECK(searched < 0.9 * plain);
  CHECK(one_multiplier < searched);
  CHECK(lean < 0.9 * one_multiplier);
  CHECK(grid_start < 0.9 * clip_start);
  CHECK(swept < 0.99 * grid);
  CHECK(refitted < 0.995 * swept);
}

TEST_CASE("feedback: in the identity metric it is plain rounding", "[quant]") {
  std::vector<double> identity(64 * 64, 0.0);
  for (size_t i = 0; i < 64; ++i) identity[i * 65] = 3.0;
  const auto metric =
      std::make_shared<oscar::EncoderMetric>(oscar::make_encoder_metric(identity.data(), 64));
  const std::vector<float> rows = normal_rows(11, 40, 64);
  CodecSpec spec = feedback_spec(64);
  spec.feedback.sweeps = 1;
  const auto with = round_trip(*oscar::make_codec(spec, metric), rows);
  spec.feedback.sweeps = 0;
  spec.feedback.feedback = false;
  const auto without = round_trip(*oscar::make_codec(spec, metric), rows);
  CHECK(with.bytes == without.bytes);
}

TEST_CASE("feedback: the metric gain makes the error orthogonal to the row", "[quant]") {
  const auto metric = random_metric(12, 64, 1.0);
  const std::vector<float> rows = normal_rows(13, 50, 64);
  const FeedbackReference reference(*metric, {});
  const auto worst = [&](const std::vector<float>& values) {
    double largest = 0.0;
    for (size_t row = 0; row < 50; ++row) {
      const auto x = to_double(rows, row, 64), y = to_double(values, row, 64);
      largest =
          std::max(largest, std::abs(1.0 - reference.product(x, y) / reference.product(x, x)));
    }
    return largest;
  };
  CodecSpec rtn;
  rtn.head_dim = 64;
  rtn.clip_ratio = 0.92;
  for (CodecSpec spec : {feedback_spec(64), rtn}) {
    spec.meta = MetaFormat::kScaleZeroFp32;
    const auto without = round_trip(*oscar::make_codec(spec, metric), rows);
    spec.gain = GainRule::kMetric;
    const auto with = round_trip(*oscar::make_codec(spec, metric), rows);
    CHECK(with.stats.gain_clamped == 0);
    CHECK(worst(without.values) > 0.01);
    CHECK(worst(with.values) < 1e-5);
    spec.meta = MetaFormat::kScaleMinFp16;
    CHECK(worst(round_trip(*oscar::make_codec(spec, metric), rows).values) < 2 * 0x1p-11);
  }
}

TEST_CASE("feedback: log-8 metadata cost little and count saturation", "[quant]") {
  const auto metric = random_metric(14, 128);
  const std::vector<float> rows = normal_rows(15, 200, 128);
  CodecSpec spec = feedback_spec(128);
  const double fp16_cost =
      mean_cost(*metric, rows, round_trip(*oscar::make_codec(spec, metric), rows).values);
  spec.meta = MetaFormat::kLog8;
  const auto log8 = round_trip(*oscar::make_codec(spec, metric), rows);
  CHECK(log8.stats.scale_saturated == 0);
  CHECK(mean_cost(*metric, rows, log8.values) < 1.03 * fp16_cost);
  spec.log8_scale_max = 0.5F;
  CHECK(round_trip(*oscar::make_codec(spec, metric), rows).stats.scale_saturated > 150);
}

TEST_CASE("feedback: rows of zeros, constant rows, huge means", "[quant]") {
  const auto metric = random_metric(16, 64);
  for (const CodecSpec& spec : variants(64)) {
    INFO("meta " << static_cast<int>(spec.meta) << " gain " << static_cast<int>(spec.gain)
                 << " start " << static_cast<int>(spec.feedback.start));
    const auto codec = oscar::make_codec(spec, metric);
    const bool log8 = spec.meta == MetaFormat::kLog8;
    for (const float constant : {0.0F, 0.7F, -3.3F, 1000.0F}) {
      const std::vector<float> rows(64 * 3, constant);
      const auto result = round_trip(*codec, rows);
      const double size = std::abs(static_cast<double>(constant));
      double tolerance = size * 0x1p-7;  // bf16 and fp16 pairs
      // log8: half a step of the zero, folded by the gain onto a scale that is off by 1.1 %.
      if (log8) tolerance = size < 20.0 ? size * 0.03 : size;
      for (const float value : result.values)
        REQUIRE(std::abs(static_cast<double>(value) - static_cast<double>(constant)) <= tolerance);
      if (!oscar::holds_constants(spec.meta)) CHECK(result.stats.meta_fallbacks == 3);
    }
    std::vector<float> rows = normal_rows(17, 4, 64);
    for (float& value : rows) value = 3000.0F + 0.01F * value;
    const auto result = round_trip(*codec, rows);
    for (const float value : result.values) {
      REQUIRE(std::isfinite(value));
      REQUIRE(std::abs(static_cast<double>(value) - 3000.0) <= (log8 ? 3000.0 : 24.0));
    }
    if (log8) CHECK(result.stats.scale_saturated > 0);
  }
}

TEST_CASE("feedback: rows that the metadata cannot hold, and non-finite rows", "[quant]") {
  const auto metric = random_metric(18, 64);
  const CodecSpec spec = feedback_spec(64);
  const auto codec = oscar::make_codec(spec, metric);
  std::vector<float> rows = normal_rows(19, 20, 64);
  for (size_t d = 0; d < 64; ++d) rows[18 * 64 + d] = -1e6F * static_cast<float>(1 + d % 3);
  CHECK_THROWS_WITH(round_trip(*codec, rows), Catch::Contains("row 18"));
  rows[18 * 64] = std::nanf("");
  CHECK_THROWS_WITH(round_trip(*codec, rows), Catch::Contains("row 18") && Catch::Contains("NaN"));
}

TEST_CASE("feedback: 4 and 8 bits", "[quant]") {
  const auto metric = random_metric(20, 64);
  const std::vector<float> rows = normal_rows(21, 50, 64);
  double last = HUGE_VAL;
  for (const int bits : {2, 4, 8}) {
    CodecSpec spec = feedback_spec(64);
    spec.bits = bits;
    spec.feedback.start_clip = 1.0;
    const double cost =
        mean_cost(*metric, rows, round_trip(*oscar::make_codec(spec, metric), rows).values);
    CHECK(cost < 0.1 * last);
    last = cost;
  }
}
