#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/attend_prefill.h"
#include "kernels/launch_check.cuh"
#include "kernels/prefill_launch.h"
#include "kernels/table_check.cuh"

namespace oscar {
namespace {

constexpr const char* kOp = "attend_prefill";

int compute_capability() {
  int device = 0, major = 0, minor = 0;
  check_cuda(cudaGetDevice(&device), kOp);
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), kOp);
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), kOp);
  return 10 * major + minor;
}

bool use_hopper(PrefillPath path) {
  const int capability = compute_capability();
  OSCAR_CHECK(capability >= 80, kOp, ": compute capability 8.0 or later expected, got ",
              capability / 10, ".", capability % 10);
  OSCAR_CHECK(path != PrefillPath::kHopper || capability == 90, kOp,
              ": the wgmma path needs compute capability 9.0, got ", capability / 10, ".",
              capability % 10);
  return path != PrefillPath::kPortable && capability == 90;
}

void check_strides(int64_t token_stride, int64_t head_stride, int head_dim, const char* name) {
  OSCAR_CHECK(
      token_stride > 0 && token_stride % 8 == 0 && head_stride >= head_dim && head_stride % 8 == 0,
      kOp, ": positive strides of ", name, " in multiples of 8 elements expected, got ",
      token_stride, " and ", head_stride);
}

void check_cache(const MixedCacheView& cache) {
  OSCAR_CHECK(cache.num_int2_pages >= 0 && cache.num_bf16_pages >= 0, kOp,
              ": numbers of pages must not be negative");
  if (cache.num_int2_pages > 0) {
    check_device_pointer(cache.int2_pages, 16, kOp, "int2_pages");
    check_device_pointer(cache.int2_page_table, 4, kOp, "int2_page_table");
  }
  if (cache.num_bf16_pages > 0) {
    check_device_pointer(cache.k_bf16_pages, 16, kOp, "k_bf16_pages");
    check_device_pointer(cache.v_bf16_pages, 16, kOp, "v_bf16_pages");
    check_device_pointer(cache.bf16_page_table, 4, kOp, "bf16_page_table");
  }
  OSCAR_CHECK(cache.sink_table_pages >= 0 && cache.sink_table_pages <= cache.bf16_table_stride, kOp,
              ": sink_table_pages ", cache.sink_table_pages, " outside the BF16 table's ",
              cache.bf16_table_stride);
}

void check_params(const AttendPrefillParams& p) {
  const MixedCacheView& cache = p.cache;
  OSCAR_CHECK(record_supports(cache.head_dim), kOp,
              ": head_dim 64, 96, 128, 192 or 256 expected, got ", cache.head_dim);
  OSCAR_CHECK(cache.num_kv_heads > 0 && p.num_q_heads > 0 &&
                  p.num_q_heads % cache.num_kv_heads == 0 &&
                  p.num_q_heads / cache.num_kv_heads <= 16,
              kOp, ": query heads must be 1..16 times the KV heads, got ", p.num_q_heads, " and ",
              cache.num_kv_heads);
  OSCAR_CHECK(p.num_tokens > 0, kOp, ": at least one new token expected, got ", p.num_tokens);
  OSCAR_CHECK(p.num_work > 0, kOp, ": empty schedule");
  OSCAR_CHECK(p.out_type == ElementType::kBf16 || p.out_type == ElementType::kFp16 ||
                  p.out_type == ElementType::kFp32,
              kOp, ": out_type must be bf16, fp16 or fp32");
  OSCAR_CHECK(p.softmax_scale > 0.0F && p.softmax_scale < 1e6F, kOp,
              ": positive softmax_scale expected, got ", p.softmax_scale);
  OSCAR_CHECK(p.softcap >= 0.0F && p.softcap < 1e6F, kOp, ": softcap >= 0 expected, got ",
              p.softcap);
  OSCAR_CHECK(p.sliding_window >= 0, kOp, ": sliding_window >= 0 expected, got ", p.sliding_window);
  check_strides(p.q_token_stride, p.q_head_stride, cache.head_dim, "q");
  check_strides(p.kv_token_stride, p.kv_head_stride, cache.head_dim, "k and v");
  check_strides(p.out_token_stride, p.out_head_stride, cache.head_dim, "out");
  check_device_pointer(p.q, 16, kOp, "q");
  check_device_pointer(p.k, 16, kOp, "k");
  check_device_pointer(p.v, 16, kOp, "v");
  check_device_pointer(p.out, 16, kOp, "out");
  check_device_pointer(p.work, 16, kOp, "work");
  if (p.lse_nats != nullptr) check_device_pointer(p.lse_nats, 4, kOp, "lse_nats");
  check_cache(cache);
}

// Page ids and lengths of the sequences in the schedule.
void check_work(const AttendPrefillParams& p, cudaStream_t stream) {
  const MixedCacheView& cache = p.cache;
  const auto work = read_device(p.work, static_cast<size_t>(p.num_work), kOp, stream);
  const int group = p.num_q_heads / cache.num_kv_heads;
  const int ring_tokens = 64 * (cache.bf16_table_stride - cache.sink_table_pages);
  const auto check_row = [&](const int32_t* table, int stride, int seq, int entries, int pages) {
    const auto ids = read_device(table + static_cast<int64_t>(seq) * stride,
                                 static_cast<size_t>(entries), kOp, stream);
    for (int i = 0; i < entries; ++i)
      check_page_id(ids[static_cast<size_t>(i)], pages, kOp, seq, i);
  };
  int checked_seq = -1;
  for (const PrefillWork& w : work) {
    const SequenceLengths& n = w.lengths;
    OSCAR_CHECK(w.kv_head >= 0 && w.kv_head < cache.num_kv_heads && w.seq >= 0 && w.num_rows > 0 &&
                    w.first_row >= 0 && w.block_begin >= 0 && w.block_begin < w.block_end &&
                    w.block_end <= prefill_num_blocks(n, w.new_tokens),
                kOp, ": schedule of another problem (KV head ", w.kv_head, ", rows ", w.first_row,
                " + ", w.num_rows, ")");
    OSCAR_CHECK(w.new_begin + (w.first_row + w.num_rows - 1) / group < p.num_tokens, kOp,
                ": the schedule has more than ", p.num_tokens, " new tokens");
    if (w.seq == checked_seq) continue;
    checked_seq = w.seq;
    const int pages = prefill_blocks_of(n.history);
    OSCAR_CHECK(pages <= cache.int2_table_stride && n.sink <= 64 * cache.sink_table_pages &&
                    n.recent <= ring_tokens && (n.recent == 0 || n.recent_start < ring_tokens),
                kOp, ": lengths of sequence ", w.seq, " (", n.sink, " + ", n.history, " + ",
                n.recent, ") exceed its page tables");
    if (pages > 0)
      check_row(cache.int2_page_table, cache.int2_table_stride, w.seq, pages, cache.num_int2_pages);
    if (n.sink > 0) {
      check_row(cache.bf16_page_table, cache.bf16_table_stride, w.seq, prefill_blocks_of(n.sink),
                cache.num_bf16_pages);
    }
    for (int i = 0; i < n.recent; i += std::min(64, std::max(1, n.recent - 1 - i))) {
      const int slot = (n.recent_start + i) % ring_tokens;
      const int32_t* entry = cache.bf16_page_table +
                             static_cast<int64_t>(w.seq) * cache.bf16_table_stride +
                             cache.sink_table_pages + slot / 64;
      check_page_id(read_device(entry, 1, kOp, stream)[0], cache.num_bf16_pages, kOp, w.seq,
                    cache.sink_table_pages + slot / 64);
    }
  }
}

}  // namespace

int attend_prefill_rows_per_tile(PrefillPath path) {
  return use_hopper(path) ? prefill::kHopperRows : prefill::kPortableRows;
}

void attend_prefill(const AttendPrefillParams& p, void* stream) {
  check_params(p);
  const bool hopper = use_hopper(p.path);
  if (p.check_tables) check_work(p, static_cast<cudaStream_t>(stream));
  for_head_dim(p.cache.head_dim, [&]<int D>() { prefill::launch<D>(p, hopper, stream); });
  check_cuda(cudaGetLastError(), "attend_prefill: launch");
}

}  // namespace oscar
