#include <cmath>

#include "base/random.h"
#include "kernels/bench_timer.cuh"
#include "kernels/write_int2.h"

namespace oscar {

using namespace bench;

namespace {

// A rotation and a metric that are good for nothing but time: plausible numbers everywhere.
std::vector<uint8_t> bench_rotation(int head_dim, WriteEncoder encoder) {
  std::vector<float> rotation(static_cast<size_t>(head_dim) * static_cast<size_t>(head_dim));
  Random random(8);
  for (float& x : rotation)
    x = static_cast<float>(random.normal() / std::sqrt(static_cast<double>(head_dim)));
  return pack_write_rotation(rotation.data(), head_dim, encoder);
}
std::vector<uint8_t> bench_metric(int head_dim) {
  const auto size = static_cast<size_t>(head_dim);
  std::vector<float> l(size * size, 0.0F), pivot(size);
  Random random(9);
  for (size_t i = 0; i < size; ++i) {
    for (size_t j = 0; j < i; ++j) l[i * size + j] = static_cast<float>(0.1 * random.normal());
    l[i * size + i] = 1.0F;
    pivot[i] = static_cast<float>(0.1 + random.uniform());
  }
  return pack_write_metric(l.data(), pivot.data(), head_dim);
}

}  // namespace

KernelTiming bench_write(const WriteBenchShape& s, double read_ceiling_tb_per_s) {
  const int64_t row = static_cast<int64_t>(s.num_kv_heads) * s.head_dim;
  const int64_t tokens = static_cast<int64_t>(s.tokens) * s.num_jobs;
  const double bytes = static_cast<double>(tokens) * static_cast<double>(row) * 4.0 +
                       static_cast<double>(tokens) * s.num_kv_heads *
                           (record_bytes(s.head_dim) / static_cast<double>(kRecordTokens));
  const int copies = cold_copies(bytes);
  const int pages = (s.tokens + kInt2PageTokens - 1) / kInt2PageTokens;
  const int64_t total_pages = static_cast<int64_t>(pages) * s.num_jobs * copies;
  const Buffer<uint16_t> k(static_cast<size_t>(tokens * row * copies));
  const Buffer<uint16_t> v(static_cast<size_t>(tokens * row * copies));
  fill_bf16(k.get(), tokens * row * copies, 1);
  fill_bf16(v.get(), tokens * row * copies, 2);
  const Buffer<uint8_t> pool(
      static_cast<size_t>(total_pages * s.num_kv_heads * record_page_bytes(s.head_dim)));
  check_cuda(cudaMemset(pool.get(), 0, pool.bytes()), "bench: pool");
  std::vector<int32_t> table;
  for (int64_t i = 0; i < total_pages; ++i) table.push_back(static_cast<int32_t>(i));
  const Buffer<int32_t> d_table(table);
  std::vector<WriteJob> jobs;
  int tiles = 0;
  for (int c = 0; c < copies; ++c) {
    tiles = 0;
    for (int j = 0; j < s.num_jobs; ++j) {
      const int64_t index = static_cast<int64_t>(c) * s.num_jobs + j;
      WriteJob job{};
      job.k = k.get() + index * s.tokens * row;
      job.v = v.get() + index * s.tokens * row;
      job.pages = pool.get();
      job.page_table = d_table.get() + index * pages;
      job.num_tokens = s.tokens;
      job.first_tile = tiles;
      job.side_pair = j * s.layers / s.num_jobs;
      tiles += write_tiles(0, s.tokens);
      jobs.push_back(job);
    }
  }
  const Buffer<WriteJob> d_jobs(jobs);
  // Each layer has its own matrices: jobs of one layer (of `layers`) lie together.
  const WriteEncoder encoder = s.feedback ? WriteEncoder::kFeedback : WriteEncoder::kRtn;
  std::vector<uint8_t> rotations, metrics;
  const auto append = [](std::vector<uint8_t>& to, const std::vector<uint8_t>& part, int times) {
    for (int i = 0; i < times; ++i) to.insert(to.end(), part.begin(), part.end());
  };
  if (s.rotate) append(rotations, bench_rotation(s.head_dim, encoder), s.layers);
  if (s.feedback) append(metrics, bench_metric(s.head_dim), s.layers * 2 * s.num_kv_heads);
  const Buffer<uint8_t> d_rotations(rotations), d_metrics(metrics);
  std::vector<WriteSide> sides(2 * static_cast<size_t>(s.layers));
  for (size_t i = 0; i < sides.size(); ++i) {
    const bool key = i % 2 == 0;
    sides[i].clip_index = static_cast<int>((key && !s.feedback ? 0.96 : 0.92) * s.head_dim);
    sides[i].rotation =
        d_rotations.get() + static_cast<int64_t>(i / 2) * write_rotation_bytes(s.head_dim);
    sides[i].metric =
        d_metrics.get() + static_cast<int64_t>(i) * s.num_kv_heads * write_metric_bytes(s.head_dim);
    sides[i].gain = 1;
  }
  const Buffer<WriteSide> d_sides(sides);
  const Buffer<WriteCounters> counters(std::vector<WriteCounters>(1, WriteCounters{}));
  WriteParams p;
  p.num_kv_heads = s.num_kv_heads;
  p.head_dim = s.head_dim;
  p.token_stride = row;
  p.head_stride = s.head_dim;
  p.num_jobs = s.num_jobs;
  p.num_tiles = tiles;
  p.sides = d_sides.get();
  p.counters = counters.get();
  p.rotate = s.rotate;
  p.num_pairs = s.layers;
  KernelTiming timing = time_launches(std::max(4, copies), 15, [&](cudaStream_t stream, int i) {
    WriteParams launch = p;
    launch.jobs = d_jobs.get() + static_cast<int64_t>(i % copies) * s.num_jobs;
    s.feedback ? write_int2_feedback(launch, stream) : write_int2_rtn(launch, stream);
  });
  timing.op =
      cat(s.feedback ? "write_int2_feedback" : "write_int2_rtn", s.rotate ? "_rotated" : "");
  timing.shape = cat(s.num_kv_heads, "x", s.head_dim);
  timing.context = s.tokens;
  timing.batch = s.num_jobs;
  count_bytes(timing, bytes, read_ceiling_tb_per_s);
  return timing;
}

}  // namespace oscar
