// One launch of a cache writer on random rows, and what it left in the pages.
#pragma once

#include <functional>
#include <memory>

#include "base/float16.h"
#include "base/random.h"
#include "gpu/device_buffer.h"
#include "kernels/write_int2.h"
#include "quant/clip.h"
#include "quant/codec.h"

namespace oscar_test {

inline size_t at(int64_t i) { return static_cast<size_t>(i); }

struct WriteCase {
  struct Job {
    int first_token, num_tokens;
  };
  int num_kv_heads = 3, head_dim = 128;
  oscar::ElementType type = oscar::ElementType::kBf16;
  double clips[2] = {0.96, 0.92};  // keys, values
  bool mean = false;
  bool shared_rotation = true;
  int num_pairs = 1;  // job j uses pair j % num_pairs
  std::vector<Job> jobs = {{0, 100}};
  float offset = 0.0F;  // added to every element
  float scale = 1.0F;
};

struct StoredRow {
  std::vector<uint8_t> codes;
  uint16_t scale = 0, min = 0;
};

// Rounds x to the type and appends its bytes.
inline float put_element(oscar::ElementType type, float x, uint8_t* bytes) {
  if (type == oscar::ElementType::kFp32) {
    std::memcpy(bytes, &x, 4);
    return x;
  }
  const bool bf16 = type == oscar::ElementType::kBf16;
  const uint16_t bits = bf16 ? oscar::float_to_bf16(x) : oscar::float_to_fp16(x);
  std::memcpy(bytes, &bits, 2);
  return bf16 ? oscar::bf16_to_float(bits) : oscar::fp16_to_float(bits);
}

class WriteRun {
 public:
  explicit WriteRun(const WriteCase& c)
      : c_(c), row_(at(c.num_kv_heads) * at(c.head_dim)), sides(2 * at(c.num_pairs)) {
    oscar::Random random(11);
    for (size_t j = 0; j < c.jobs.size(); ++j) add_job(random, j);
    for (size_t s = 0; s < sides.size(); ++s) {
      means.emplace_back(row_, 0.0F);
      for (float& x : means.back()) x = c.mean ? static_cast<float>(random.normal()) : 0.0F;
      device_means_.push_back(std::make_unique<DeviceBuffer<float>>(means.back()));
      sides[s].mean = device_means_.back()->get();
      sides[s].clip_index = c.clips[s % 2] > 0 ? oscar::clip_index(c.clips[s % 2], c.head_dim) : -1;
    }
  }

  // Runs a writer; change may set what the case does not know.
  template <class Write>
  oscar::WriteCounters run(const Write& write,
                           const std::function<void(oscar::WriteParams&)>& change = nullptr) {
    for (const auto& pool : pools_) pool->poison(kKept);
    const DeviceBuffer<oscar::WriteJob> jobs(jobs_);
    const DeviceBuffer<oscar::WriteSide> device_sides(sides);
    const DeviceBuffer<oscar::WriteCounters> counters(std::vector<oscar::WriteCounters>(1));
    oscar::WriteParams p;
    p.num_kv_heads = c_.num_kv_heads;
    p.head_dim = c_.head_dim;
    p.input_type = c_.type;
    p.token_stride = static_cast<int64_t>(row_);
    p.head_stride = c_.head_dim;
    p.subtract_mean = c_.mean;
    p.jobs = jobs.get();
    p.num_jobs = static_cast<int>(jobs_.size());
    p.num_tiles = tiles_;
    p.sides = device_sides.get();
    p.counters = counters.get();
    p.num_pairs = c_.num_pairs;
    if (change) change(p);
    write(p, nullptr);
    cuda_ok(cudaDeviceSynchronize());
    pages_.clear();
    for (const auto& pool : pools_) pages_.push_back(pool->download());
    return counters.download()[0];
  }

  int num_pages(size_t job) const {
    return (c_.jobs[job].first_token + c_.jobs[job].num_tokens + 63) / 64;
  }
  StoredRow stored(size_t job, size_t side, int head, int token) const {
    const int page = num_pages(job) - 1 - token / 64;  // tables run backwards
    const uint8_t* record =
        pages_[job].data() +
        (at(page) * at(c_.num_kv_heads) + at(head)) * at(oscar::record_page_bytes(c_.head_dim)) +
        at(token % 64 / 16) * at(oscar::record_bytes(c_.head_dim));
    StoredRow row;
    row.codes.resize(at(c_.head_dim));
    oscar::record_read_row(record, c_.head_dim, static_cast<oscar::KvSide>(side), token % 16,
                           row.codes.data(), &row.scale, &row.min);
    return row;
  }
  // Calls body(job, side, head, i) for every row written, i = its index in the job, and returns the
  // number of bytes changed in rows that are nobody's.
  template <class Body>
  size_t for_rows(const Body& body) const {
    size_t touched = 0;
    for (size_t j = 0; j < c_.jobs.size(); ++j)
      for (size_t side = 0; side < 2; ++side)
        for (int head = 0; head < c_.num_kv_heads; ++head)
          for (int token = 0; token < num_pages(j) * 64; ++token) {
            const int i = token - c_.jobs[j].first_token;
            if (i >= 0 && i < c_.jobs[j].num_tokens) {
              body(j, side, head, i);
              continue;
            }
            const StoredRow row = stored(j, side, head, token);
            for (const uint8_t code : row.codes)  // 0xA5 = codes 1, 1, 2, 2 in each byte
              touched += code != 1 && code != 2;
            touched += (row.scale != 0xA5A5) + (row.min != 0xA5A5);
          }
    return touched;
  }
  size_t side_index(size_t job, size_t side) const { return 2 * (job % at(c_.num_pairs)) + side; }
  // The input row as the kernel reads it.
  const float* input(size_t job, size_t side, int head, int i) const {
    return inputs_[2 * job + side].data() + at(i) * row_ + at(head) * at(c_.head_dim);
  }
  const float* mean(size_t job, size_t side, int head) const {
    return means[side_index(job, side)].data() + at(head) * at(c_.head_dim);
  }

 private:
  static constexpr int kKept = 0xA5;

  void add_job(oscar::Random& random, size_t j) {
    const WriteCase::Job& job = c_.jobs[j];
    oscar::WriteJob w{};
    const void* pointers[2] = {};
    const size_t element = c_.type == oscar::ElementType::kFp32 ? 4 : 2;
    for (const void*& pointer : pointers) {
      std::vector<float> values(at(job.num_tokens) * row_);
      std::vector<uint8_t> bytes(values.size() * element);
      for (size_t i = 0; i < values.size(); ++i)
        values[i] = put_element(c_.type, c_.offset + c_.scale * static_cast<float>(random.normal()),
                                &bytes[element * i]);
      device_inputs_.push_back(std::make_unique<DeviceBuffer<uint8_t>>(bytes));
      pointer = device_inputs_.back()->get();
      inputs_.push_back(std::move(values));
    }
    std::vector<int32_t> table;
    for (int i = 0; i < num_pages(j); ++i) table.push_back(num_pages(j) - 1 - i);
    tables_.push_back(std::make_unique<DeviceBuffer<int32_t>>(table));
    pools_.push_back(std::make_unique<DeviceBuffer<uint8_t>>(
        at(num_pages(j)) * at(c_.num_kv_heads) * at(oscar::record_page_bytes(c_.head_dim))));
    w.k = pointers[0];
    w.v = pointers[1];
    w.pages = pools_.back()->get();
    w.page_table = tables_.back()->get();
    w.first_token = job.first_token;
    w.num_tokens = job.num_tokens;
    w.side_pair = static_cast<int32_t>(j % at(c_.num_pairs));
    w.first_tile = tiles_;
    tiles_ += oscar::write_tiles(job.first_token, job.num_tokens);
    jobs_.push_back(w);
  }

  WriteCase c_;
  size_t row_;
  std::vector<std::vector<float>> inputs_;
  std::vector<std::unique_ptr<DeviceBuffer<uint8_t>>> device_inputs_, pools_;
  std::vector<std::unique_ptr<DeviceBuffer<int32_t>>> tables_;
  std::vector<std::unique_ptr<DeviceBuffer<float>>> device_means_;
  std::vector<oscar::WriteJob> jobs_;
  std::vector<std::vector<uint8_t>> pages_;
  int tiles_ = 0;

 public:
  std::vector<oscar::WriteSide> sides;    // device pointers; a test adds rotations and metrics
  std::vector<std::vector<float>> means;  // [side][heads, D]
};

// Distance of (x - low) / scale from the nearest rounding threshold, in units of the last place of
// the quotient and of the operands' size in it.
inline double threshold_distance_ulp(float x, float low, float scale) {
  const double level =
      (static_cast<double>(x) - static_cast<double>(low)) / static_cast<double>(scale);
  double best = 1e30;
  for (const double threshold : {0.5, 1.5, 2.5}) best = std::min(best, std::abs(level - threshold));
  const double size =
      std::max(std::abs(static_cast<double>(x)), std::abs(static_cast<double>(low))) /
      static_cast<double>(scale);
  return best / (std::max(1.0, size) * 0x1p-23);
}

// What the CPU codec stores for a row: codes and the fp16 pair.
inline StoredRow encode_on_cpu(const oscar::Codec& codec, const std::vector<float>& x) {
  std::vector<uint8_t> bytes(codec.bytes_per_block());
  codec.encode(x.data(), x.size(), 1, bytes.data(), nullptr);
  StoredRow row;
  for (size_t d = 0; d < x.size(); ++d)
    row.codes.push_back(static_cast<uint8_t>(bytes[d / 4] >> (2 * (d % 4)) & 3));
  std::memcpy(&row.scale, bytes.data() + x.size() / 4, 2);
  std::memcpy(&row.min, bytes.data() + x.size() / 4 + 2, 2);
  return row;
}

// A random orthogonal matrix [D, D]: Gram-Schmidt on Gaussian rows, in double, twice.
inline std::vector<float> random_rotation(int dim, oscar::Random& random) {
  const size_t n = at(dim);
  std::vector<double> r(n * n);
  for (double& x : r) x = random.normal();
  for (size_t i = 0; i < n; ++i) {
    for (int pass = 0; pass < 2; ++pass)
      for (size_t j = 0; j < i; ++j) {
        double dot = 0.0;
        for (size_t d = 0; d < n; ++d) dot += r[i * n + d] * r[j * n + d];
        for (size_t d = 0; d < n; ++d) r[i * n + d] -= dot * r[j * n + d];
      }
    double norm = 0.0;
    for (size_t d = 0; d < n; ++d) norm += r[i * n + d] * r[i * n + d];
    for (size_t d = 0; d < n; ++d) r[i * n + d] /= std::sqrt(norm);
  }
  return {r.begin(), r.end()};
}

// A row as the kernel rotates it: x R - mean in double, with the size of its terms. x: [D].
struct RotatedRow {
  std::vector<double> value, terms;  // terms: sum |x_i R_id| + |mean_d|
};
inline RotatedRow rotate_on_cpu(const float* x, const std::vector<float>& rotation,
                                const float* mean, int dim) {
  const size_t n = at(dim);
  RotatedRow row{std::vector<double>(n, 0.0), std::vector<double>(n, 0.0)};
  for (size_t i = 0; i < n; ++i)
    for (size_t d = 0; d < n; ++d) {
      const double term = static_cast<double>(x[i]) * static_cast<double>(rotation[i * n + d]);
      row.value[d] += term;
      row.terms[d] += std::abs(term);
    }
  for (size_t d = 0; d < n; ++d) {
    row.value[d] -= static_cast<double>(mean[d]);
    row.terms[d] += std::abs(static_cast<double>(mean[d]));
  }
  return row;
}

// The row rounded to bf16; unsure: elements that a relative error of 2^-22 of the terms could round
// the other way.
struct RoundedRow {
  std::vector<float> value;
  size_t unsure = 0;
};
inline RoundedRow round_row(const RotatedRow& row) {
  RoundedRow rounded;
  for (size_t d = 0; d < row.value.size(); ++d) {
    const double slack = 0x1p-22 * row.terms[d];
    const float below = oscar::round_to_bf16(static_cast<float>(row.value[d] - slack));
    const float above = oscar::round_to_bf16(static_cast<float>(row.value[d] + slack));
    rounded.unsure += below != above;
    rounded.value.push_back(oscar::round_to_bf16(static_cast<float>(row.value[d])));
  }
  return rounded;
}

}  // namespace oscar_test
