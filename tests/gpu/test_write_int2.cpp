#include <catch2/catch.hpp>

#include "base/error.h"
#include "base/float16.h"
#include "base/random.h"
#include "gpu/device_buffer.h"
#include "kernels/write_int2.h"
#include "quant/clip.h"
#include "quant/codec.h"

using namespace oscar;
using namespace oscar_test;

namespace {

size_t at(int64_t i) { return static_cast<size_t>(i); }

struct Job {
  int first_token, num_tokens;
};
struct WriteCase {
  int num_kv_heads = 3, head_dim = 128;
  ElementType type = ElementType::kBf16;
  double k_clip = 0.96, v_clip = 0.92;
  bool mean = false;
  std::vector<Job> jobs = {{0, 100}};
  float offset = 0.0F;  // added to every element
};

// Distance of (x - low) / scale from the nearest rounding threshold, in units of the last place of
// the quotient: codes may differ from the CPU's only where it is small.
double threshold_distance_ulp(float x, float low, float scale) {
  const double level =
      (static_cast<double>(x) - static_cast<double>(low)) / static_cast<double>(scale);
  double best = 1e30;
  for (const double threshold : {0.5, 1.5, 2.5}) best = std::min(best, std::abs(level - threshold));
  // The subtraction and the quotient round at the size of the operands.
  const double size =
      std::max({std::abs(static_cast<double>(x)), std::abs(static_cast<double>(low))}) /
      static_cast<double>(scale);
  return best / (std::max(1.0, size) * 0x1p-23);
}

// Runs the kernel and compares every row with the CPU codec; returns the number of codes that
// differ at a threshold.
size_t run_and_check(const WriteCase& c) {
  Random random(11);
  const int dim = c.head_dim, heads = c.num_kv_heads;
  const size_t row = at(heads) * at(dim);
  const size_t element = c.type == ElementType::kFp32 ? 4 : 2;
  std::vector<std::vector<float>> inputs[2];
  std::vector<std::unique_ptr<DeviceBuffer<uint8_t>>> device_inputs[2], pages;
  std::vector<std::unique_ptr<DeviceBuffer<int32_t>>> tables;
  std::vector<WriteJob> jobs;
  int tiles = 0;
  for (const Job& job : c.jobs) {
    WriteJob w{};
    const void* pointers[2] = {};
    for (int side = 0; side < 2; ++side) {
      std::vector<float> values(at(job.num_tokens) * row);
      std::vector<uint8_t> bytes(values.size() * element);
      for (size_t i = 0; i < values.size(); ++i) {
        float x = c.offset + static_cast<float>(random.normal());
        if (c.type == ElementType::kBf16) {
          const uint16_t bits = float_to_bf16(x);
          std::memcpy(&bytes[2 * i], &bits, 2);
          x = bf16_to_float(bits);
        } else if (c.type == ElementType::kFp16) {
          const uint16_t bits = float_to_fp16(x);
          std::memcpy(&bytes[2 * i], &bits, 2);
          x = fp16_to_float(bits);
        } else {
          std::memcpy(&bytes[4 * i], &x, 4);
        }
        values[i] = x;
      }
      device_inputs[side].push_back(std::make_unique<DeviceBuffer<uint8_t>>(bytes));
      pointers[side] = device_inputs[side].back()->get();
      inputs[side].push_back(std::move(values));
    }
    const int num_pages = (job.first_token + job.num_tokens + 63) / 64;
    std::vector<int32_t> table;
    for (int i = 0; i < num_pages; ++i) table.push_back(num_pages - 1 - i);
    tables.push_back(std::make_unique<DeviceBuffer<int32_t>>(table));
    pages.push_back(std::make_unique<DeviceBuffer<uint8_t>>(
        at(num_pages) * at(heads) * at(record_page_bytes(dim)), 0xA5));
    w.k = pointers[0];
    w.v = pointers[1];
    w.pages = pages.back()->get();
    w.page_table = tables.back()->get();
    w.first_token = job.first_token;
    w.num_tokens = job.num_tokens;
    w.first_tile = tiles;
    tiles += write_tiles(job.first_token, job.num_tokens);
    jobs.push_back(w);
  }
  std::vector<float> means[2];
  std::unique_ptr<DeviceBuffer<float>> d_means[2];
  std::vector<WriteSide> sides(2);
  const double clips[2] = {c.k_clip, c.v_clip};
  for (size_t side = 0; side < 2; ++side) {
    means[side].resize(row);
    for (float& x : means[side]) x = c.mean ? static_cast<float>(random.normal()) : 0.0F;
    d_means[side] = std::make_unique<DeviceBuffer<float>>(means[side]);
    sides[side].mean = c.mean ? d_means[side]->get() : nullptr;
    sides[side].clip_index = clips[side] > 0 ? clip_index(clips[side], dim) : -1;
  }
  const DeviceBuffer<WriteJob> d_jobs(jobs);
  const DeviceBuffer<WriteSide> d_sides(sides);
  const DeviceBuffer<WriteCounters> counters(std::vector<WriteCounters>(1, WriteCounters{}));
  WriteParams p;
  p.num_kv_heads = heads;
  p.head_dim = dim;
  p.input_type = c.type;
  p.token_stride = static_cast<int64_t>(row);
  p.head_stride = dim;
  p.jobs = d_jobs.get();
  p.num_jobs = static_cast<int>(jobs.size());
  p.num_tiles = tiles;
  p.sides = d_sides.get();
  p.counters = counters.get();
  write_int2_rtn(p, nullptr);
  cuda_ok(cudaDeviceSynchronize());
  CHECK(counters.download()[0].refused_rows == 0);

  size_t at_threshold = 0, wrong = 0, wrong_meta = 0, touched_elsewhere = 0;
  for (size_t j = 0; j < c.jobs.size(); ++j) {
    const Job& job = c.jobs[j];
    const std::vector<uint8_t> bytes = pages[j]->download();
    const int num_pages = (job.first_token + job.num_tokens + 63) / 64;
    for (int side = 0; side < 2; ++side) {
      CodecSpec spec;
      spec.head_dim = dim;
      spec.clip_ratio = clips[side];
      const auto codec = make_codec(spec);
      for (int head = 0; head < heads; ++head) {
        for (int token = 0; token < num_pages * 64; ++token) {
          const uint8_t* record =
              bytes.data() +
              (at(num_pages - 1 - token / 64) * at(heads) + at(head)) * at(record_page_bytes(dim)) +
              at(token % 64 / 16) * at(record_bytes(dim));
          std::vector<uint8_t> codes(at(dim));
          uint16_t scale = 0, min = 0;
          record_read_row(record, dim, static_cast<KvSide>(side), token % 16, codes.data(), &scale,
                          &min);
          const int i = token - job.first_token;
          if (i < 0 || i >= job.num_tokens) {  // kept: 0xA5 = codes 1, 1, 2, 2 in each byte
            for (const uint8_t code : codes) touched_elsewhere += code != 1 && code != 2;
            touched_elsewhere += scale != 0xA5A5 || min != 0xA5A5;
            continue;
          }
          std::vector<float> x(at(dim));
          for (size_t d = 0; d < x.size(); ++d)
            x[d] = inputs[side][j][at(i) * row + at(head) * at(dim) + d] -
                   means[side][at(head) * at(dim) + d];
          std::vector<uint8_t> expected(codec->bytes_per_block());
          codec->encode(x.data(), x.size(), 1, expected.data(), nullptr);
          uint16_t pair[2];
          std::memcpy(pair, expected.data() + dim / 4, 4);
          wrong_meta += pair[0] != scale || pair[1] != min;
          std::vector<float> scratch(x.size());
          const float threshold = clips[side] > 0
                                      ? clip_threshold(ClipRule::kOrderStatistic, clips[side],
                                                       x.data(), dim, scratch.data())
                                      : INFINITY;
          const float low = std::max(-threshold, *std::min_element(x.begin(), x.end()));
          const float high = std::min(threshold, *std::max_element(x.begin(), x.end()));
          for (size_t d = 0; d < x.size(); ++d) {
            const int code = expected[d / 4] >> (2 * (d % 4)) & 3;
            if (code == codes[d]) continue;
            if (threshold_distance_ulp(x[d], low, (high - low) / 3.0F) <= 2.0) {
              ++at_threshold;
            } else {
              ++wrong;
            }
          }
        }
      }
    }
  }
  INFO("D " << dim << ", heads " << heads << ", input type " << static_cast<int>(c.type)
            << ", mean " << c.mean << ", clip " << c.k_clip << " / " << c.v_clip);
  CHECK(wrong == 0);
  CHECK(wrong_meta == 0);
  CHECK(touched_elsewhere == 0);
  return at_threshold;
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
    c.k_clip = c.v_clip = clip;
    c.jobs = {{0, 33}};
    run_and_check(c);
    c.type = ElementType::kFp32;
    c.offset = 100.0F;  // keys of 16 bits that all coincide
    run_and_check(c);
  }
}

TEST_CASE("write: flushes of a few tokens keep the rest of the record", "[gpu][write][sanitize]") {
  if (!has_gpu()) return;
  for (const int head_dim : {64, 96, 128}) {
    WriteCase c;
    c.head_dim = head_dim;
    c.jobs = {{0, 1}, {15, 1}, {16, 8}, {60, 9}, {63, 2}, {7, 20}, {128, 64}, {200, 200}};
    run_and_check(c);
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
}
