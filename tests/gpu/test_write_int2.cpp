#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "gpu/write_run.h"

using namespace oscar;
using namespace oscar_test;

namespace {

struct Range {
  float low, scale;
};
Range clipped_range(const std::vector<float>& x, double clip) {
  std::vector<float> scratch(x.size());
  const float threshold = clip > 0 ? clip_threshold(ClipRule::kOrderStatistic, clip, x.data(),
                                                    static_cast<int>(x.size()), scratch.data())
                                   : INFINITY;
  const float low = std::max(-threshold, *std::min_element(x.begin(), x.end()));
  const float high = std::min(threshold, *std::max_element(x.begin(), x.end()));
  return {low, (high - low) / 3.0F};
}

// Runs the kernel and compares every row with the CPU codec; returns the number of codes that
// differ at a threshold.
size_t run_and_check(const WriteCase& c) {
  WriteRun run(c);
  CHECK(run.run(write_int2_rtn).refused_rows == 0);
  std::unique_ptr<Codec> codecs[2];
  for (size_t side = 0; side < 2; ++side) {
    CodecSpec spec;
    spec.head_dim = c.head_dim;
    spec.clip_ratio = c.clips[side];
    codecs[side] = make_codec(spec);
  }
  size_t at_threshold = 0, wrong = 0, wrong_meta = 0;
  const size_t touched = run.for_rows([&](size_t job, size_t side, int head, int i) {
    const StoredRow row = run.stored(job, side, head, c.jobs[job].first_token + i);
    std::vector<float> x(at(c.head_dim));
    for (size_t d = 0; d < x.size(); ++d)
      x[d] = run.input(job, side, head, i)[d] - run.mean(job, side, head)[d];
    const StoredRow expected = encode_on_cpu(*codecs[side], x);
    wrong_meta += row.scale != expected.scale || row.min != expected.min;
    const Range range = clipped_range(x, c.clips[side]);
    for (size_t d = 0; d < x.size(); ++d) {
      if (row.codes[d] == expected.codes[d]) continue;
      const bool near = threshold_distance_ulp(x[d], range.low, range.scale) <= 2.0;
      ++(near ? at_threshold : wrong);
    }
  });
  INFO("D " << c.head_dim << ", heads " << c.num_kv_heads << ", input type "
            << static_cast<int>(c.type) << ", mean " << c.mean << ", clip " << c.clips[0] << " / "
            << c.clips[1]);
  CHECK(wrong == 0);
  CHECK(wrong_meta == 0);
  CHECK(touched == 0);
  return at_threshold;
}

struct RotationCounts {
  size_t rows = 0, unsure_rows = 0, unsure_differ = 0, at_threshold = 0;
};

// The same with a rotation inside: rows none of whose elements is within rounding of a bf16
// boundary equal the CPU codec's; the others may have an element one bf16 step off.
void check_rotated(WriteCase c, RotationCounts& counts) {
  WriteRun run(c);
  Random random(5);
  const int heads = c.shared_rotation ? 1 : c.num_kv_heads;
  std::vector<std::vector<float>> rotations;
  std::vector<std::unique_ptr<DeviceBuffer<uint8_t>>> packed;
  for (WriteSide& side : run.sides) {
    std::vector<uint8_t> bytes;
    for (int head = 0; head < heads; ++head) {
      rotations.push_back(random_rotation(c.head_dim, random));
      const auto one = pack_write_rotation(rotations.back().data(), c.head_dim, WriteEncoder::kRtn);
      bytes.insert(bytes.end(), one.begin(), one.end());
    }
    packed.push_back(std::make_unique<DeviceBuffer<uint8_t>>(bytes));
    side.rotation = packed.back()->get();
    side.rotation_head_bytes = c.shared_rotation ? 0 : write_rotation_bytes(c.head_dim);
  }
  CHECK(run.run(write_int2_rtn, [](WriteParams& p) { p.rotate = true; }).refused_rows == 0);
  std::unique_ptr<Codec> codecs[2];
  for (size_t side = 0; side < 2; ++side) {
    CodecSpec spec;
    spec.head_dim = c.head_dim;
    spec.clip_ratio = c.clips[side];
    codecs[side] = make_codec(spec);
  }
  size_t wrong = 0, wrong_meta = 0;
  const size_t touched = run.for_rows([&](size_t job, size_t side, int head, int i) {
    const StoredRow row = run.stored(job, side, head, c.jobs[job].first_token + i);
    const size_t s = run.side_index(job, side);
    const RotatedRow exact = rotate_on_cpu(run.input(job, side, head, i),
                                           rotations[s * at(heads) + (heads > 1 ? at(head) : 0)],
                                           run.mean(job, side, head), c.head_dim);
    const RoundedRow rounded = round_row(exact);
    const StoredRow expected = encode_on_cpu(*codecs[side], rounded.value);
    const float low = fp16_to_float(expected.min), scale = fp16_to_float(expected.scale);
    const bool same_meta = row.scale == expected.scale && row.min == expected.min;
    ++counts.rows;
    counts.unsure_rows += rounded.unsure > 0;
    counts.unsure_differ += rounded.unsure > 0 && (!same_meta || row.codes != expected.codes);
    // One bf16 step in an end of the range, and in an element.
    const float step = rounded.unsure > 0 ? 0x1p-7F * 3.0F * scale : 0.0F;
    wrong_meta += rounded.unsure == 0 ? !same_meta
                                      : std::abs(fp16_to_float(row.min) - low) > step ||
                                            std::abs(fp16_to_float(row.scale) - scale) > step;
    const Range range = clipped_range(rounded.value, c.clips[side]);
    for (size_t d = 0; d < row.codes.size(); ++d) {
      if (row.codes[d] == expected.codes[d]) continue;
      const double distance = threshold_distance_ulp(rounded.value[d], range.low, range.scale);
      // One bf16 step of an end or of the element, against two units of the last place.
      ++(distance <= (rounded.unsure > 0 ? 0x1p-5 / 0x1p-23 : 2.0) ? counts.at_threshold : wrong);
    }
  });
  INFO("D " << c.head_dim << ", input type " << static_cast<int>(c.type) << ", mean " << c.mean
            << ", shared " << c.shared_rotation);
  CHECK(wrong == 0);
  CHECK(wrong_meta == 0);
  CHECK(touched == 0);
}

}  // namespace

TEST_CASE("write: rows equal the CPU codec's, all head dims and inputs", "[gpu][write]") {
  if (!has_gpu()) return;
  size_t at_threshold = 0;
  for (const int head_dim : {64, 96, 128, 192, 256}) {
    for (const ElementType type : {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32}) {
      WriteCase c;
      c.head_dim = head_dim;
      c.type = type;
      at_threshold += run_and_check(c);
      c.mean = true;
      at_threshold += run_and_check(c);
    }
  }
  WARN("codes that differ from the CPU at a rounding threshold: " << at_threshold);
}

TEST_CASE("write: every clip rank, ties and no clip", "[gpu][write]") {
  if (!has_gpu()) return;
  for (const double clip : {0.0, 0.004, 0.1, 0.5, 0.75, 0.9, 0.99, 1.0}) {
    WriteCase c;
    c.clips[0] = c.clips[1] = clip;
    c.jobs = {{0, 33}};
    run_and_check(c);
    c.type = ElementType::kFp32;
    c.offset = 100.0F;  // keys of 16 bits that all coincide
    run_and_check(c);
    c.type = ElementType::kBf16;  // a handful of values
    run_and_check(c);
  }
}

TEST_CASE("write: flushes of a few tokens keep the rest of the record", "[gpu][write][sanitize]") {
  if (!has_gpu()) return;
  for (const int head_dim : {64, 96, 128}) {
    WriteCase c;
    c.head_dim = head_dim;
    c.num_pairs = 3;
    c.jobs = {{0, 1}, {15, 1}, {16, 8}, {60, 9}, {63, 2}, {7, 20}, {128, 64}, {200, 200}};
    run_and_check(c);
    c.type = ElementType::kFp16;
    run_and_check(c);
  }
}

TEST_CASE("write: rows rotated inside", "[gpu][write]") {
  if (!has_gpu()) return;
  RotationCounts counts;
  for (const int head_dim : {64, 96, 128, 192, 256}) {
    for (const ElementType type : {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32}) {
      WriteCase c;
      c.head_dim = head_dim;
      c.type = type;
      c.jobs = {{0, 33}, {9, 3}};
      check_rotated(c, counts);
      c.mean = true;
      c.shared_rotation = false;
      check_rotated(c, counts);
    }
  }
  WARN("rotated rows: " << counts.rows << ", with an element at a bf16 boundary "
                        << counts.unsure_rows << ", of them different from the CPU's "
                        << counts.unsure_differ << "; codes at a threshold "
                        << counts.at_threshold);
  CHECK(counts.unsure_differ * 20 < counts.rows);
}

TEST_CASE("write: rotated rows of any size, many layers in a launch", "[gpu][write][sanitize]") {
  if (!has_gpu()) return;
  RotationCounts counts;
  for (const float scale : {1e-3F, 1.0F, 3000.0F}) {
    WriteCase c;
    c.scale = scale;
    c.num_kv_heads = 2;
    c.num_pairs = 2;
    c.jobs = {{0, 5}, {31, 2}, {64, 17}, {3, 3}};
    check_rotated(c, counts);
  }
}

TEST_CASE("write: refused and constant rows are counted", "[gpu][write]") {
  if (!has_gpu()) return;
  std::vector<float> values(16 * 64, 1.0F);  // all rows constant
  for (size_t i = 0; i < 64; ++i) values[3 * 64 + i] = static_cast<float>(i);
  values[5 * 64 + 7] = NAN;
  values[6 * 64 + 8] = -INFINITY;
  values[7 * 64] = 1e9F;  // scale beyond fp16
  const DeviceBuffer<float> input(values);
  const DeviceBuffer<uint8_t> pages(at(record_page_bytes(64)), 0);
  const DeviceBuffer<int32_t> table(std::vector<int32_t>{0});
  const DeviceBuffer<WriteCounters> counters(std::vector<WriteCounters>(1, WriteCounters{}));
  const DeviceBuffer<WriteSide> sides(std::vector<WriteSide>(2));
  WriteJob job{};
  job.k = job.v = input.get();
  job.pages = pages.get();
  job.page_table = table.get();
  job.num_tokens = 16;
  const DeviceBuffer<WriteJob> jobs(std::vector<WriteJob>{job});
  WriteParams p;
  p.num_kv_heads = 1;
  p.head_dim = 64;
  p.input_type = ElementType::kFp32;
  p.token_stride = p.head_stride = 64;
  p.jobs = jobs.get();
  p.num_jobs = p.num_tiles = 1;
  p.sides = sides.get();
  p.counters = counters.get();
  write_int2_rtn(p, nullptr);
  cuda_ok(cudaDeviceSynchronize());
  CHECK(counters.download()[0].refused_rows == 6);    // three rows, keys and values
  CHECK(counters.download()[0].constant_rows == 24);  // twelve rows
  std::vector<float> decoded(64);
  const std::vector<uint8_t> bytes = pages.download();
  record_decode_row(bytes.data(), 64, KvSide::kValue, 0, decoded.data());
  CHECK(decoded[13] == 1.0F);
  record_decode_row(bytes.data(), 64, KvSide::kKey, 6, decoded.data());
  CHECK(decoded[8] == 0.0F);

  const auto refused = [&](auto change) {
    WriteParams q = p;
    change(q);
    CHECK_THROWS_AS(write_int2_rtn(q, nullptr), Error);
  };
  refused([](WriteParams& q) { q.head_dim = 100; });
  refused([](WriteParams& q) { q.jobs = nullptr; });
  refused([](WriteParams& q) { q.num_tiles = 0; });
  refused([](WriteParams& q) { q.token_stride = 60; });
  refused([](WriteParams& q) { q.counters = nullptr; });
  refused([](WriteParams& q) { q.input_type = static_cast<ElementType>(9); });
}
