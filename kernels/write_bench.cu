#include "kernels/bench_timer.cuh"
#include "kernels/write_int2.h"

namespace oscar {

using namespace bench;

KernelTiming bench_write_rtn(const WriteBenchShape& s, double read_ceiling_tb_per_s) {
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
      tiles += write_tiles(0, s.tokens);
      jobs.push_back(job);
    }
  }
  const Buffer<WriteJob> d_jobs(jobs);
  std::vector<WriteSide> sides(2);
  sides[0].clip_index = static_cast<int>(0.96 * s.head_dim);
  sides[1].clip_index = static_cast<int>(0.92 * s.head_dim);
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
  KernelTiming timing = time_launches(std::max(4, copies), 15, [&](cudaStream_t stream, int i) {
    WriteParams launch = p;
    launch.jobs = d_jobs.get() + static_cast<int64_t>(i % copies) * s.num_jobs;
    write_int2_rtn(launch, stream);
  });
  timing.op = "write_int2_rtn";
  timing.shape = cat(s.num_kv_heads, "x", s.head_dim);
  timing.context = s.tokens;
  timing.batch = s.num_jobs;
  count_bytes(timing, bytes, read_ceiling_tb_per_s);
  return timing;
}

}  // namespace oscar
