#include <cmath>

#include "base/random.h"
#include "kernels/bench_timer.cuh"
#include "kernels/dequantize_int2.h"
#include "kernels/repack_int2.h"
#include "kernels/rotate_rows.h"
#include "kernels/rows_bench.h"

namespace oscar {

using namespace bench;

namespace {

constexpr int kReplays = 15;

// INT2 pages of `copies` caches of `batch` sequences, tables in random order.
struct PagePool {
  int pages_per_seq, copies;
  int64_t num_pages;
  Buffer<uint8_t> bytes;
  Buffer<int32_t> table;  // [copies, batch, pages_per_seq]

  static std::vector<int32_t> shuffled(int64_t count) {
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < count; ++i) ids.push_back(static_cast<int32_t>(i));
    Random random(5);
    random.shuffle(ids);
    return ids;
  }
  PagePool(const RowsBenchShape& s, int num_copies)
      : pages_per_seq((s.tokens + kInt2PageTokens - 1) / kInt2PageTokens),
        copies(num_copies),
        num_pages(static_cast<int64_t>(pages_per_seq) * s.batch * num_copies),
        bytes(static_cast<size_t>(num_pages * s.num_kv_heads * record_page_bytes(s.head_dim))),
        table(shuffled(num_pages)) {
    fill_records(bytes.get(), num_pages * s.num_kv_heads * kPageRecords, s.head_dim, 3);
  }
  const int32_t* table_of(int copy, int seq, int batch) const {
    return table.get() + (static_cast<int64_t>(copy) * batch + seq) * pages_per_seq;
  }
};

double int2_bytes(const RowsBenchShape& s) {
  return static_cast<double>(s.tokens) * s.batch * s.num_kv_heads * record_bytes(s.head_dim) /
         kRecordTokens;
}
void describe(KernelTiming& timing, const char* op, const RowsBenchShape& s, double bytes,
              double read_ceiling_tb_per_s) {
  timing.op = op;
  timing.shape = cat(s.num_q_heads, "x", s.num_kv_heads, "x", s.head_dim);
  timing.context = s.tokens;
  timing.batch = s.batch;
  count_bytes(timing, bytes, read_ceiling_tb_per_s);
}

}  // namespace

KernelTiming bench_dequantize(const RowsBenchShape& s, double read_ceiling_tb_per_s) {
  const int64_t row = static_cast<int64_t>(s.num_kv_heads) * s.head_dim;
  const int64_t tokens = static_cast<int64_t>(s.tokens) * s.batch;
  const double bytes = int2_bytes(s) + static_cast<double>(tokens) * static_cast<double>(row) * 4;
  const int copies = cold_copies(bytes);
  const PagePool pool(s, copies);
  const Buffer<uint16_t> k(static_cast<size_t>(tokens * row * copies));
  const Buffer<uint16_t> v(static_cast<size_t>(tokens * row * copies));
  std::vector<DequantizeJob> jobs;
  int tiles = 0;
  for (int c = 0; c < copies; ++c) {
    tiles = 0;
    for (int b = 0; b < s.batch; ++b) {
      const int64_t first = (static_cast<int64_t>(c) * s.batch + b) * s.tokens * row;
      DequantizeJob job{};
      job.pages = pool.bytes.get();
      job.page_table = pool.table_of(c, b, s.batch);
      job.k = k.get() + first;
      job.v = v.get() + first;
      job.num_tokens = s.tokens;
      job.first_tile = tiles;
      tiles += dequantize_tiles(0, s.tokens);
      jobs.push_back(job);
    }
  }
  const Buffer<DequantizeJob> d_jobs(jobs);
  DequantizeParams p;
  p.num_kv_heads = s.num_kv_heads;
  p.head_dim = s.head_dim;
  p.token_stride = row;
  p.head_stride = s.head_dim;
  p.num_jobs = s.batch;
  p.num_tiles = tiles;
  KernelTiming timing =
      time_launches(std::max(4, copies), kReplays, [&](cudaStream_t stream, int i) {
        DequantizeParams launch = p;
        launch.jobs = d_jobs.get() + static_cast<int64_t>(i % copies) * s.batch;
        dequantize_int2(launch, stream);
      });
  describe(timing, "dequantize_int2", s, bytes, read_ceiling_tb_per_s);
  return timing;
}

KernelTiming bench_repack(const RowsBenchShape& s, RepackDirection direction,
                          EngineRows::Layout layout, double read_ceiling_tb_per_s) {
  const bool vllm = layout == EngineRows::Layout::kVllm;
  const int64_t tokens = static_cast<int64_t>(s.tokens) * s.batch;
  const int64_t rows = tokens * s.num_kv_heads;
  const VllmSlotFormat slot{s.head_dim, s.head_dim, 1};
  const int64_t slot_bytes =
      vllm ? static_cast<int64_t>(slot.slot_bytes()) : 2 * (s.head_dim / 4 + 8);
  const double bytes = int2_bytes(s) + static_cast<double>(rows * slot_bytes);
  const int copies = cold_copies(bytes);
  const PagePool pool(s, copies);
  const auto count = [&](int64_t row_bytes) {
    return static_cast<size_t>(rows * row_bytes * copies);
  };
  const int64_t code_bytes = s.head_dim / 4;
  // SGLang: codes and fp32 pairs of both sides.
  const Buffer<uint8_t> k_codes(vllm ? 16 : count(code_bytes)),
      v_codes(vllm ? 16 : count(code_bytes));
  const Buffer<float> k_pairs(vllm ? 4 : count(2)), v_pairs(vllm ? 4 : count(2));
  const Buffer<uint8_t> slots(vllm ? count(slot_bytes) : 16);
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < tokens * copies; ++i) ids.push_back(i);
  const Buffer<int64_t> d_ids(ids);
  std::vector<RepackJob> jobs;
  int tiles = 0;
  for (int c = 0; c < copies; ++c) {
    tiles = 0;
    for (int b = 0; b < s.batch; ++b) {
      RepackJob job{};
      job.page_table = pool.table_of(c, b, s.batch);
      job.slots = d_ids.get() + (static_cast<int64_t>(c) * s.batch + b) * s.tokens;
      job.num_tokens = s.tokens;
      job.first_tile = tiles;
      tiles += repack_tiles(0, s.tokens);
      jobs.push_back(job);
    }
  }
  const Buffer<RepackJob> d_jobs(jobs);
  const Buffer<unsigned long long> refused(std::vector<unsigned long long>(1, 0));
  RepackParams p;
  p.num_kv_heads = s.num_kv_heads;
  p.head_dim = s.head_dim;
  p.pages = pool.bytes.get();
  p.num_pages = static_cast<int>(pool.num_pages);
  p.rows.layout = layout;
  p.rows.order = vllm ? PackOrder::kConsecutive : PackOrder::kQuartered;
  p.rows.meta = vllm ? MetaFormat::kScaleMinFp16First : MetaFormat::kScaleZeroFp32;
  p.rows.num_slots = tokens * copies;
  p.rows.k_codes = k_codes.get();
  p.rows.k_pairs = k_pairs.get();
  p.rows.v_codes = v_codes.get();
  p.rows.v_pairs = v_pairs.get();
  p.rows.slots = slots.get();
  p.num_jobs = s.batch;
  p.num_tiles = tiles;
  p.refused_rows = refused.get();
  const auto launch = [&](cudaStream_t stream, int i) {
    RepackParams copy = p;
    copy.jobs = d_jobs.get() + static_cast<int64_t>(i % copies) * s.batch;
    repack_int2(copy, stream);
  };
  if (direction == RepackDirection::kToRecords) {  // rows first, from the pages
    for (int c = 0; c < copies; ++c) launch(nullptr, c);
    check_cuda(cudaDeviceSynchronize(), "bench: rows");
  }
  p.direction = direction;
  KernelTiming timing = time_launches(std::max(4, copies), kReplays, launch);
  const bool to_rows = direction == RepackDirection::kToRows;
  describe(timing,
           vllm ? (to_rows ? "repack_to_vllm" : "repack_from_vllm")
                : (to_rows ? "repack_to_sglang" : "repack_from_sglang"),
           s, bytes, read_ceiling_tb_per_s);
  return timing;
}

KernelTiming bench_copy_pages(const RowsBenchShape& s, double read_ceiling_tb_per_s) {
  const double bytes = 2.0 * int2_bytes(s);
  const int copies = cold_copies(bytes);
  const PagePool source(s, copies), destination(s, copies);
  const int pages = source.pages_per_seq * s.batch;
  std::vector<PageCopy> list;
  const std::vector<int32_t> from = PagePool::shuffled(source.num_pages);
  for (int64_t i = 0; i < source.num_pages; ++i)
    list.push_back({from[static_cast<size_t>(i)], static_cast<int32_t>(i)});
  const Buffer<PageCopy> d_list(list);
  CopyPagesParams p;
  p.source_pool = source.bytes.get();
  p.destination_pool = destination.bytes.get();
  p.num_source_pages = p.num_destination_pages = static_cast<int>(source.num_pages);
  p.page_bytes = static_cast<int64_t>(s.num_kv_heads) * record_page_bytes(s.head_dim);
  p.num_copies = pages;
  KernelTiming timing =
      time_launches(std::max(4, copies), kReplays, [&](cudaStream_t stream, int i) {
        CopyPagesParams launch = p;
        launch.copies = d_list.get() + static_cast<int64_t>(i % copies) * pages;
        copy_pages(launch, stream);
      });
  describe(timing, "copy_pages", s, bytes, read_ceiling_tb_per_s);
  return timing;
}

KernelTiming bench_rotate(const RowsBenchShape& s, double read_ceiling_tb_per_s) {
  const int heads = s.num_q_heads + s.num_kv_heads;
  const int64_t row = static_cast<int64_t>(heads) * s.head_dim;
  const int64_t tokens = static_cast<int64_t>(s.tokens) * s.batch;
  const double bytes = 4.0 * static_cast<double>(tokens) * static_cast<double>(row);
  const int copies = cold_copies(bytes);
  const Buffer<uint16_t> input(static_cast<size_t>(tokens * row * copies));
  const Buffer<uint16_t> output(static_cast<size_t>(tokens * row * copies));
  fill_bf16(input.get(), tokens * row * copies, 6);
  std::vector<float> rotation(static_cast<size_t>(s.head_dim) * static_cast<size_t>(s.head_dim));
  Random random(8);
  for (float& x : rotation)
    x = static_cast<float>(random.normal() / std::sqrt(static_cast<double>(s.head_dim)));
  const Buffer<float> d_rotation(rotation);
  RotateParams p;
  p.num_tokens = tokens;
  p.num_heads = heads;
  p.head_dim = s.head_dim;
  p.input_token_stride = p.output_token_stride = row;
  p.input_head_stride = p.output_head_stride = s.head_dim;
  p.rotation = d_rotation.get();
  KernelTiming timing =
      time_launches(std::max(4, copies), kReplays, [&](cudaStream_t stream, int i) {
        RotateParams launch = p;
        launch.input = input.get() + i % copies * tokens * row;
        launch.output = output.get() + i % copies * tokens * row;
        rotate_rows(launch, stream);
      });
  describe(timing, "rotate_rows", s, bytes, read_ceiling_tb_per_s);
  return timing;
}

}  // namespace oscar
