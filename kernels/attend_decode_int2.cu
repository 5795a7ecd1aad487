#include <cuda_runtime.h>

#include <vector>

#include "kernels/attend_decode_int2.h"
#include "kernels/decode_launch.h"
#include "kernels/launch_check.cuh"

namespace oscar {
namespace {

using decode::Launch;

// One entry a shape: head_dim, columns, functions of its translation unit.
struct Entry {
  int head_dim, columns;
  void (*launch)(const AttendDecodeParams&, const Launch&);
};
constexpr Entry kEntries[] = {
    {64, 4, decode::launch_d64_c4},     {64, 8, decode::launch_d64_c8},
    {64, 16, decode::launch_d64_c16},   {96, 4, decode::launch_d96_c4},
    {96, 8, decode::launch_d96_c8},     {96, 16, decode::launch_d96_c16},
    {128, 4, decode::launch_d128_c4},   {128, 8, decode::launch_d128_c8},
    {128, 16, decode::launch_d128_c16}, {192, 4, decode::launch_d192_c4},
    {192, 8, decode::launch_d192_c8},   {192, 16, decode::launch_d192_c16},
    {256, 4, decode::launch_d256_c4},   {256, 8, decode::launch_d256_c8},
    {256, 16, decode::launch_d256_c16},
};

const Entry& find_entry(int head_dim, int columns) {
  for (const Entry& entry : kEntries) {
    if (entry.head_dim == head_dim && entry.columns == columns) return entry;
  }
  fail(
      "attend_decode_int2: head_dim 64, 96, 128, 192 or 256 with 4, 8 or 16 columns a block "
      "expected, "
      "got ",
      head_dim, " with ", columns);
}

// A partial result: its values, and a log2-sum for every four of them.
size_t slot_bytes(int head_dim, int columns) {
  return static_cast<size_t>(head_dim) * static_cast<size_t>(columns) / 4 * 5 * sizeof(float);
}

void check_element(ElementType type, const char* name) {
  OSCAR_CHECK(
      type == ElementType::kBf16 || type == ElementType::kFp16 || type == ElementType::kFp32,
      "attend_decode_int2: ", name, " must be bf16, fp16 or fp32");
}

void check_params(const AttendDecodeParams& p) {
  const char* op = "attend_decode_int2";
  const MixedCacheView& cache = p.cache;
  check_element(p.q_type, "q_type");
  check_element(p.out_type, "out_type");
  OSCAR_CHECK(p.batch > 0, op, ": batch of at least 1 expected, got ", p.batch);
  OSCAR_CHECK(p.num_query_tokens >= 1 && p.num_query_tokens <= 8, op,
              ": 1..8 query tokens expected, got ", p.num_query_tokens);
  OSCAR_CHECK(cache.num_kv_heads > 0 && p.num_q_heads > 0 &&
                  p.num_q_heads % cache.num_kv_heads == 0 &&
                  p.num_q_heads / cache.num_kv_heads <= 16,
              op, ": query heads must be 1..16 times the KV heads, got ", p.num_q_heads, " and ",
              cache.num_kv_heads);
  OSCAR_CHECK(p.columns_per_block ==
                  decode_columns_per_block(p.num_q_heads / cache.num_kv_heads, p.num_query_tokens),
              op, ": columns_per_block ", p.columns_per_block, " does not fit ", p.num_q_heads,
              " / ", cache.num_kv_heads, " heads and ", p.num_query_tokens, " query tokens");
  OSCAR_CHECK(p.softmax_scale > 0.0F && p.softmax_scale < 1e6F, op,
              ": positive softmax_scale expected, got ", p.softmax_scale);
  OSCAR_CHECK(p.softcap >= 0.0F && p.softcap < 1e6F, op, ": softcap >= 0 expected, got ",
              p.softcap);
  OSCAR_CHECK(p.sliding_window >= 0, op, ": sliding_window >= 0 expected, got ", p.sliding_window);
  check_device_pointer(p.q, 2, op, "q");
  check_device_pointer(p.out, 16, op, "out");
  check_device_pointer(cache.lengths, 16, op, "lengths");
  check_device_pointer(p.work, 16, op, "work");
  check_device_pointer(p.workspace, 16, op, "workspace");
  if (p.rotation != nullptr) check_device_pointer(p.rotation, 4, op, "rotation");
  if (p.lse_nats != nullptr) check_device_pointer(p.lse_nats, 4, op, "lse_nats");
  OSCAR_CHECK(cache.num_int2_pages == 0 ||
                  (cache.int2_pages != nullptr && cache.int2_page_table != nullptr),
              op, ": INT2 pages and their table must not be null");
  OSCAR_CHECK(cache.num_bf16_pages == 0 ||
                  (cache.k_bf16_pages != nullptr && cache.v_bf16_pages != nullptr &&
                   cache.bf16_page_table != nullptr),
              op, ": BF16 pages and their table must not be null");
  if (cache.num_int2_pages > 0) check_device_pointer(cache.int2_pages, 16, op, "int2_pages");
  if (cache.num_bf16_pages > 0) {
    check_device_pointer(cache.k_bf16_pages, 16, op, "k_bf16_pages");
    check_device_pointer(cache.v_bf16_pages, 16, op, "v_bf16_pages");
  }
  OSCAR_CHECK(cache.sink_table_pages >= 0 && cache.sink_table_pages <= cache.bf16_table_stride, op,
              ": sink_table_pages ", cache.sink_table_pages, " outside the BF16 table's ",
              cache.bf16_table_stride);
  OSCAR_CHECK(p.num_slots >= 0, op, ": negative num_slots");
  const size_t needed =
      static_cast<size_t>(p.num_slots) * slot_bytes(cache.head_dim, p.columns_per_block);
  OSCAR_CHECK(p.workspace_bytes >= needed, op, ": workspace of ", needed, " bytes expected, got ",
              p.workspace_bytes);
}

template <class T>
std::vector<T> read_back(const T* device, size_t count, cudaStream_t stream) {
  std::vector<T> host(count);
  if (count == 0) return host;
  check_cuda(
      cudaMemcpyAsync(host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost, stream),
      "attend_decode_int2: reading tables");
  check_cuda(cudaStreamSynchronize(stream), "attend_decode_int2: reading tables");
  return host;
}

void check_page(int page, int count, const char* kind, int seq, int index) {
  OSCAR_CHECK(page >= 0 && page < count, "attend_decode_int2: ", kind, " page id ", page,
              " of sequence ", seq, " (table entry ", index, ") outside 0..", count - 1);
}

void check_tables(const AttendDecodeParams& p, cudaStream_t stream) {
  const MixedCacheView& cache = p.cache;
  const auto batch = static_cast<size_t>(p.batch);
  const auto lengths = read_back(cache.lengths, batch, stream);
  const auto int2 = read_back(cache.int2_page_table,
                              batch * static_cast<size_t>(cache.int2_table_stride), stream);
  const auto bf16 = read_back(cache.bf16_page_table,
                              batch * static_cast<size_t>(cache.bf16_table_stride), stream);
  const int ring_pages = cache.bf16_table_stride - cache.sink_table_pages;
  for (int b = 0; b < p.batch; ++b) {
    const SequenceLengths& n = lengths[static_cast<size_t>(b)];
    OSCAR_CHECK(n.sink >= 0 && n.history >= 0 && n.recent >= 0 &&
                    n.sink + n.history + n.recent >= p.num_query_tokens,
                "attend_decode_int2: sequence ", b, " has lengths ", n.sink, " + ", n.history,
                " + ", n.recent, ", expected at least ", p.num_query_tokens, " tokens");
    const int pages = (n.history + kInt2PageTokens - 1) / kInt2PageTokens;
    OSCAR_CHECK(pages <= cache.int2_table_stride && n.sink <= 64 * cache.sink_table_pages &&
                    n.recent <= 64 * ring_pages &&
                    (n.recent == 0 || n.recent_start < 64 * ring_pages),
                "attend_decode_int2: lengths of sequence ", b, " (", n.sink, " + ", n.history,
                " + ", n.recent, ") exceed its page tables");
    for (int i = 0; i < pages; ++i) {
      check_page(int2[static_cast<size_t>(b * cache.int2_table_stride + i)], cache.num_int2_pages,
                 "INT2", b, i);
    }
    for (int i = 0; i < (n.sink + 63) / 64; ++i) {
      check_page(bf16[static_cast<size_t>(b * cache.bf16_table_stride + i)], cache.num_bf16_pages,
                 "BF16", b, i);
    }
    for (int token = 0; token < n.recent; ++token) {
      const int slot = (token + n.recent_start) % (64 * ring_pages);
      const int i = cache.sink_table_pages + slot / 64;
      check_page(bf16[static_cast<size_t>(b * cache.bf16_table_stride + i)], cache.num_bf16_pages,
                 "BF16", b, i);
    }
  }
}

}  // namespace

int attend_decode_num_ctas(int head_dim, int columns_per_block) {
  find_entry(head_dim, columns_per_block);
  return device_multiprocessors();  // one thread block fills a multiprocessor's shared memory
}

size_t attend_decode_workspace_bytes(int head_dim, int columns_per_block, int num_ctas) {
  find_entry(head_dim, columns_per_block);
  OSCAR_CHECK(num_ctas > 0, "attend_decode_int2: a positive number of thread blocks expected, got ",
              num_ctas);
  // A thread block starts inside at most one segment and ends inside at most one.
  return 2 * static_cast<size_t>(num_ctas) * slot_bytes(head_dim, columns_per_block);
}

void attend_decode_int2(const AttendDecodeParams& p, void* stream) {
  const Entry& entry = find_entry(p.cache.head_dim, p.columns_per_block);
  check_params(p);
  OSCAR_CHECK(p.num_ctas == attend_decode_num_ctas(p.cache.head_dim, p.columns_per_block),
              "attend_decode_int2: schedule for ", device_multiprocessors(),
              " thread blocks expected, got ", p.num_ctas);
  if (p.check_tables) check_tables(p, static_cast<cudaStream_t>(stream));
  entry.launch(p, {static_cast<cudaStream_t>(stream), device_shared_bytes(),
                   p.overlap_launch && device_compute_capability() >= 90});
  check_cuda(cudaGetLastError(), "attend_decode_int2: launch");
}

}  // namespace oscar
