#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "gpu/write_run.h"

using namespace oscar;
using namespace oscar_test;

namespace {

// A metric of the decaying kind that queries give: M = B B^T with B of a few strong directions.
std::shared_ptr<const EncoderMetric> random_metric(int dim, Random& random) {
  const size_t n = at(dim);
  std::vector<double> b(n * n), m(n * n, 0.0);
  for (size_t i = 0; i < n * n; ++i)
    b[i] = random.normal() * std::exp(-4.0 * static_cast<double>(i % n) / static_cast<double>(n));
  for (size_t i = 0; i < n; ++i)
    for (size_t j = 0; j < n; ++j)
      for (size_t k = 0; k < n; ++k) m[i * n + j] += b[i * n + k] * b[j * n + k];
  return std::make_shared<const EncoderMetric>(make_encoder_metric(m.data(), dim));
}

struct FeedbackCounts {
  size_t rows = 0, same_bytes = 0, other_multiplier = 0, borderline_codes = 0, costlier = 0;
  size_t gain_steps = 0, unsure_rows = 0;
};

// One row against the method in double.
class RowCheck {
 public:
  RowCheck(const EncoderMetric& metric, const std::vector<float>& x, const StoredRow& row)
      : metric_(metric), x_(x), row_(row), n_(x.size()) {}

  double value(size_t d) const {
    return fp16_to_float(row_.scale) * static_cast<double>(row_.codes[d]) +
           static_cast<double>(fp16_to_float(row_.min));
  }
  // Codes that are not the rounded target given the row's own codes of the later dims. A target
  // within 2 ulp (of the size of the terms it is the sum of; 4 where there are more than 128 terms:
  // the tensor cores truncate their sums) of a threshold may go either way.
  void check_codes(size_t& borderline, size_t& wrong) const {
    const double scale = fp16_to_float(row_.scale), low = fp16_to_float(row_.min);
    for (size_t i = n_; i-- > 0;) {
      double target = static_cast<double>(x_[i]);
      double terms = std::abs(target) + std::abs(low);
      for (size_t j = i + 1; j < n_; ++j) {
        const double l = static_cast<double>(metric_.l[j * n_ + i]);
        target += l * (static_cast<double>(x_[j]) - value(j));
        terms += std::abs(l) *
                 (std::abs(static_cast<double>(x_[j])) + std::abs(low) + scale * row_.codes[j]);
      }
      const double level = (target - low) / scale;
      const int code = static_cast<int>(std::clamp(std::floor(level + 0.5), 0.0, 3.0));
      if (code == row_.codes[i]) continue;
      const double distance =
          std::abs(level - (std::min<int>(code, row_.codes[i]) + 0.5)) * scale / terms;
      const double ulps = n_ > 128 ? 4.0 : 2.0;
      const bool near = std::abs(code - row_.codes[i]) == 1 && distance <= ulps * 0x1p-23;
      ++(near ? borderline : wrong);
    }
  }
  // e A e^T, and x A x^T / x A y^T.
  double cost() const {
    double sum = 0.0;
    for (size_t i = 0; i < n_; ++i) {
      double residual = 0.0;
      for (size_t j = i; j < n_; ++j)
        residual +=
            static_cast<double>(metric_.l[j * n_ + i]) * (static_cast<double>(x_[j]) - value(j));
      sum += static_cast<double>(metric_.pivot[i]) * residual * residual;
    }
    return sum;
  }
  double gain() const {
    double xx = 0.0, xy = 0.0;
    for (size_t i = 0; i < n_; ++i) {
      double xl = 0.0, yl = 0.0;
      for (size_t j = i; j < n_; ++j) {
        xl += static_cast<double>(metric_.l[j * n_ + i]) * static_cast<double>(x_[j]);
        yl += static_cast<double>(metric_.l[j * n_ + i]) * value(j);
      }
      xx += static_cast<double>(metric_.pivot[i]) * xl * xl;
      xy += static_cast<double>(metric_.pivot[i]) * xl * yl;
    }
    return std::clamp(xy > 0.0 ? xx / xy : 2.0, 0.8, 1.5);
  }

 private:
  const EncoderMetric& metric_;
  const std::vector<float>& x_;
  const StoredRow& row_;
  size_t n_;
};

void check_feedback(const WriteCase& c, FeedbackCounts& counts, bool rotate = false) {
  WriteRun run(c);
  Random random(7);
  const size_t heads = at(c.num_kv_heads);
  std::vector<std::shared_ptr<const EncoderMetric>> metrics;
  std::vector<std::vector<float>> rotations;
  std::vector<std::unique_ptr<DeviceBuffer<uint8_t>>> buffers;
  std::vector<std::unique_ptr<Codec>> codecs;
  for (size_t s = 0; s < run.sides.size(); ++s) {
    std::vector<uint8_t> packed, fragments;
    for (size_t head = 0; head < heads; ++head) {
      metrics.push_back(random_metric(c.head_dim, random));
      rotations.push_back(random_rotation(rotate ? c.head_dim : 1, random));
      CodecSpec spec;
      spec.head_dim = c.head_dim;
      spec.encoder = Encoder::kFeedback;
      spec.feedback.start_clip = c.clips[s % 2];
      codecs.push_back(make_codec(spec, metrics.back()));
      const auto one =
          pack_write_metric(metrics.back()->l.data(), metrics.back()->pivot.data(), c.head_dim);
      packed.insert(packed.end(), one.begin(), one.end());
      if (!rotate) continue;
      const auto r =
          pack_write_rotation(rotations.back().data(), c.head_dim, WriteEncoder::kFeedback);
      fragments.insert(fragments.end(), r.begin(), r.end());
    }
    buffers.push_back(std::make_unique<DeviceBuffer<uint8_t>>(packed));
    run.sides[s].metric = buffers.back()->get();
    buffers.push_back(std::make_unique<DeviceBuffer<uint8_t>>(fragments));
    run.sides[s].rotation = buffers.back()->get();
    run.sides[s].rotation_head_bytes = write_rotation_bytes(c.head_dim);
  }
  const auto change = [&](WriteParams& p) { p.rotate = rotate; };
  std::vector<StoredRow> plain;
  CHECK(run.run(write_int2_feedback, change).refused_rows == 0);
  size_t wrong = 0, wrong_pair = 0;
  const auto row_of = [&](size_t job, size_t side, int head, int i) {
    RoundedRow x;
    const float* input = run.input(job, side, head, i);
    const float* mean = run.mean(job, side, head);
    const size_t index = run.side_index(job, side) * heads + at(head);
    if (rotate) return round_row(rotate_on_cpu(input, rotations[index], mean, c.head_dim));
    for (int d = 0; d < c.head_dim; ++d) x.value.push_back(round_to_bf16(input[d] - mean[d]));
    return x;
  };
  size_t touched = run.for_rows([&](size_t job, size_t side, int head, int i) {
    const StoredRow row = run.stored(job, side, head, c.jobs[job].first_token + i);
    plain.push_back(row);
    const size_t index = run.side_index(job, side) * heads + at(head);
    const RoundedRow x = row_of(job, side, head, i);
    ++counts.rows;
    if (x.unsure > 0) {  // the row that was encoded is not known exactly
      ++counts.unsure_rows;
      return;
    }
    const StoredRow expected = encode_on_cpu(*codecs[index], x.value);
    const RowCheck check(*metrics[index], x.value, row);
    check.check_codes(counts.borderline_codes, wrong);
    const bool same_pair = row.scale == expected.scale && row.min == expected.min;
    counts.same_bytes += same_pair && row.codes == expected.codes;
    counts.other_multiplier += !same_pair;
    counts.costlier +=
        check.cost() > RowCheck(*metrics[index], x.value, expected).cost() * (1.0 + 1e-3);
    if (same_pair) return;
    // Another candidate: its pair must be one of the five.
    const float threshold_scale = fp16_to_float(row.scale) / fp16_to_float(expected.scale);
    bool known = false;
    for (const float a : WriteParams{}.multipliers)
      for (const float b : WriteParams{}.multipliers)
        known |= std::abs(threshold_scale - a / b) < 2e-3F * a / b;
    wrong_pair += !known;
  });
  // With the gain: the same codes, the pair times gamma.
  for (WriteSide& side : run.sides) side.gain = 1;
  CHECK(run.run(write_int2_feedback, change).refused_rows == 0);
  size_t n = 0, gain_codes = 0, gain_pairs = 0;
  touched += run.for_rows([&](size_t job, size_t side, int head, int i) {
    const StoredRow row = run.stored(job, side, head, c.jobs[job].first_token + i);
    const StoredRow& before = plain[n++];
    const RoundedRow x = row_of(job, side, head, i);
    gain_codes += row.codes != before.codes;
    if (x.unsure > 0) return;
    const size_t index = run.side_index(job, side) * heads + at(head);
    const double gain = RowCheck(*metrics[index], x.value, before).gain();
    const auto steps = [&](uint16_t is, uint16_t was) {
      const uint16_t wanted = float_to_fp16(static_cast<float>(gain) * fp16_to_float(was));
      return std::abs(static_cast<int>(is) - static_cast<int>(wanted));
    };
    const int off = std::max(steps(row.scale, before.scale), steps(row.min, before.min));
    counts.gain_steps += off == 1;
    gain_pairs += off > 1;
  });
  INFO("D " << c.head_dim << ", input type " << static_cast<int>(c.type) << ", mean " << c.mean
            << ", rotate " << rotate);
  CHECK(wrong == 0);
  CHECK(wrong_pair == 0);
  CHECK(gain_codes == 0);
  CHECK(gain_pairs == 0);
  CHECK(touched == 0);
}

void report(const FeedbackCounts& counts) {
  WARN("feedback rows: " << counts.rows << ", bytes equal to the CPU's " << counts.same_bytes
                         << ", other multiplier " << counts.other_multiplier
                         << ", codes with a target at a threshold " << counts.borderline_codes
                         << ", cost above the CPU's by more than 1e-3 " << counts.costlier
                         << ", gain one fp16 step off " << counts.gain_steps
                         << ", rows with an element at a bf16 boundary " << counts.unsure_rows);
  const size_t rows = counts.rows - counts.unsure_rows;
  // A borderline code changes the targets after it, so the row's cost may end on either side.
  CHECK(counts.costlier * 1000 <= rows * 3);
  CHECK(counts.same_bytes * 1000 >= rows * 990);
}

}  // namespace

TEST_CASE("write feedback: rows equal the CPU codec's but for borderline codes", "[gpu][write]") {
  if (!has_gpu()) return;
  FeedbackCounts counts;
  for (const int head_dim : {64, 96, 128, 192, 256}) {
    WriteCase c;
    c.head_dim = head_dim;
    c.num_kv_heads = 2;
    c.clips[0] = c.clips[1] = 0.92;
    c.jobs = {{0, head_dim == 128 ? 300 : 70}};
    check_feedback(c, counts);
    c.jobs = {{0, 40}};
    c.mean = true;
    c.type = ElementType::kFp16;
    check_feedback(c, counts);
    c.type = ElementType::kFp32;
    check_feedback(c, counts);
  }
  report(counts);
}

TEST_CASE("write feedback: flushes over layers keep the rest of the record",
          "[gpu][write][sanitize]") {
  if (!has_gpu()) return;
  FeedbackCounts counts;
  for (const int head_dim : {96, 128}) {
    WriteCase c;
    c.head_dim = head_dim;
    c.num_kv_heads = 2;
    c.num_pairs = 2;
    c.clips[0] = c.clips[1] = 0.92;
    c.jobs = {{0, 1}, {15, 2}, {16, 8}, {60, 9}, {7, 20}};
    check_feedback(c, counts);
  }
  report(counts);
}

TEST_CASE("write feedback: rows rotated inside", "[gpu][write]") {
  if (!has_gpu()) return;
  FeedbackCounts counts;
  for (const int head_dim : {64, 128, 256}) {
    for (const ElementType type : {ElementType::kBf16, ElementType::kFp32}) {
      WriteCase c;
      c.head_dim = head_dim;
      c.type = type;
      c.num_kv_heads = 2;
      c.mean = type == ElementType::kFp32;
      c.clips[0] = c.clips[1] = 0.92;
      c.jobs = {{0, 35}};
      check_feedback(c, counts, true);
    }
  }
  report(counts);
}

TEST_CASE("write feedback: refused and constant rows are counted", "[gpu][write]") {
  if (!has_gpu()) return;
  WriteCase c;
  c.head_dim = 64;
  c.num_kv_heads = 1;
  c.type = ElementType::kFp32;
  c.jobs = {{0, 16}};
  Random random(3);
  const auto metric = random_metric(64, random);
  const DeviceBuffer<uint8_t> packed(pack_write_metric(metric->l.data(), metric->pivot.data(), 64));
  WriteRun run(c);
  std::vector<float> values(16 * 64, 1.0F);
  for (size_t i = 0; i < 64; ++i) values[3 * 64 + i] = static_cast<float>(i);
  values[5 * 64 + 7] = NAN;
  values[6 * 64 + 8] = -INFINITY;
  for (size_t i = 0; i < 64; ++i) values[7 * 64 + i] = static_cast<float>(i) * 1e6F;
  const DeviceBuffer<float> input(values);
  WriteJob job{};
  DeviceBuffer<uint8_t> pages(at(record_page_bytes(64)), 0);
  const DeviceBuffer<int32_t> table(std::vector<int32_t>{0});
  job.k = job.v = input.get();
  job.pages = pages.get();
  job.page_table = table.get();
  job.num_tokens = 16;
  const DeviceBuffer<WriteJob> jobs(std::vector<WriteJob>{job});
  for (WriteSide& side : run.sides) side.metric = packed.get();
  const WriteCounters counters =
      run.run(write_int2_feedback, [&](WriteParams& p) { p.jobs = jobs.get(); });
  CHECK(counters.refused_rows == 6);
  CHECK(counters.constant_rows == 24);
  std::vector<float> decoded(64);
  const std::vector<uint8_t> bytes = pages.download();
  record_decode_row(bytes.data(), 64, KvSide::kValue, 0, decoded.data());
  CHECK(decoded[13] == 1.0F);
  record_decode_row(bytes.data(), 64, KvSide::kKey, 7, decoded.data());
  CHECK(decoded[8] == 0.0F);
  const auto refused = [&](const std::function<void(WriteParams&)>& change) {
    CHECK_THROWS_AS(run.run(write_int2_feedback, change), Error);
  };
  refused([](WriteParams& p) { p.head_dim = 80; });
  refused([](WriteParams& p) { p.sides = nullptr; });
  refused([](WriteParams& p) { p.multipliers[2] = 0.0F; });
  std::vector<float> large(64 * 64, 0.0F);
  large[64] = 1000.0F;
  CHECK_THROWS_AS(pack_write_metric(large.data(), metric->pivot.data(), 64), Error);
  CHECK_THROWS_AS(pack_write_rotation(large.data(), 64, WriteEncoder::kRtn), Error);
}
