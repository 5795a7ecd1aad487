#include <cmath>
#include <numeric>

#include "base/random.h"
#include "kernels/bench_timer.cuh"
#include "kernels/prefill_bench.h"

namespace oscar {

using namespace bench;

namespace {

std::vector<int32_t> shuffled_ids(int count) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  std::iota(ids.begin(), ids.end(), 0);
  Random random(5);
  random.shuffle(ids);
  return ids;
}

}  // namespace

double prefill_flops(const PrefillBenchShape& s) {
  const double queries = s.new_tokens;
  const double pairs = queries * s.cached + queries * (queries + 1) / 2;
  return 4.0 * s.head_dim * s.num_q_heads * pairs * s.batch;
}

KernelTiming bench_prefill(const PrefillBenchShape& s, double read_ceiling_tb_per_s) {
  OSCAR_CHECK(s.cached == 0 || s.cached > s.sink + s.recent,
              "bench: no cached tokens, or more than the windows' ", s.sink + s.recent,
              ", expected, got ", s.cached);
  SequenceLengths length{};
  if (s.cached > 0) length = {s.sink, s.cached - s.sink - s.recent, s.recent, 0};
  const int int2_row = (length.history + 63) / 64, sink_pages = (length.sink + 63) / 64;
  const int bf16_row = sink_pages + (length.recent + 63) / 64;
  const auto count = [](int64_t n) { return static_cast<size_t>(n); };
  const Buffer<uint8_t> int2(
      count(int64_t{int2_row} * s.batch * s.num_kv_heads * record_page_bytes(s.head_dim)));
  fill_records(int2.get(), int64_t{int2_row} * s.batch * s.num_kv_heads * kPageRecords, s.head_dim,
               3);
  const int64_t bf16_count = int64_t{bf16_row} * s.batch * s.num_kv_heads * 64 * s.head_dim;
  const int64_t tokens = int64_t{s.new_tokens} * s.batch;
  const int64_t q_row = int64_t{s.num_q_heads} * s.head_dim;
  const int64_t kv_row = int64_t{s.num_kv_heads} * s.head_dim;
  const Buffer<uint16_t> k_pages(count(bf16_count)), v_pages(count(bf16_count));
  const Buffer<uint16_t> q(count(tokens * q_row)), out(count(tokens * q_row));
  const Buffer<uint16_t> k(count(tokens * kv_row)), v(count(tokens * kv_row));
  fill_bf16(k_pages.get(), bf16_count, 4);
  fill_bf16(v_pages.get(), bf16_count, 5);
  fill_bf16(q.get(), tokens * q_row, 6);
  fill_bf16(k.get(), tokens * kv_row, 7);
  fill_bf16(v.get(), tokens * kv_row, 8);
  const Buffer<int32_t> int2_table(shuffled_ids(int2_row * s.batch));
  const Buffer<int32_t> bf16_table(shuffled_ids(bf16_row * s.batch));
  PrefillProblem problem;
  problem.lengths.assign(count(s.batch), length);
  problem.new_tokens.assign(count(s.batch), s.new_tokens);
  problem.num_kv_heads = s.num_kv_heads;
  problem.group = s.num_q_heads / s.num_kv_heads;
  problem.rows_per_tile = attend_prefill_rows_per_tile(s.path);
  const std::vector<PrefillWork> schedule = make_prefill_schedule(problem);
  const Buffer<PrefillWork> work(schedule);
  AttendPrefillParams p;
  p.cache.num_kv_heads = s.num_kv_heads;
  p.cache.head_dim = s.head_dim;
  p.cache.int2_pages = int2.get();
  p.cache.num_int2_pages = int2_row * s.batch;
  p.cache.k_bf16_pages = k_pages.get();
  p.cache.v_bf16_pages = v_pages.get();
  p.cache.num_bf16_pages = bf16_row * s.batch;
  p.cache.int2_page_table = int2_table.get();
  p.cache.int2_table_stride = int2_row;
  p.cache.bf16_page_table = bf16_table.get();
  p.cache.bf16_table_stride = bf16_row;
  p.cache.sink_table_pages = sink_pages;
  p.num_q_heads = s.num_q_heads;
  p.num_tokens = tokens;
  p.q = q.get();
  p.q_token_stride = p.out_token_stride = q_row;
  p.q_head_stride = p.out_head_stride = p.kv_head_stride = s.head_dim;
  p.k = k.get();
  p.v = v.get();
  p.kv_token_stride = kv_row;
  p.out = out.get();
  p.softmax_scale = 1.0F / std::sqrt(static_cast<float>(s.head_dim));
  p.work = work.get();
  p.num_work = static_cast<int>(schedule.size());
  p.path = s.path;
  // Bound by arithmetic: the same buffers every time.
  KernelTiming timing =
      time_launches(2, 11, [&](cudaStream_t stream, int) { attend_prefill(p, stream); });
  timing.op =
      cat("attend_prefill_", s.new_tokens, s.path == PrefillPath::kPortable ? "_portable" : "");
  timing.shape = cat(s.num_q_heads, "x", s.num_kv_heads, "x", s.head_dim);
  timing.context = s.cached + s.new_tokens;
  timing.batch = s.batch;
  const double bytes =
      static_cast<double>(tokens) * static_cast<double>(2 * q_row + 2 * kv_row) * 2.0 +
      static_cast<double>(int2.bytes()) + 4.0 * static_cast<double>(bf16_count);
  count_bytes(timing, bytes, read_ceiling_tb_per_s);
  timing.tflop_per_s = prefill_flops(s) / timing.time_us * 1e-6;
  return timing;
}

}  // namespace oscar
