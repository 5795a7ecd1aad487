// Measures the kernels around the cache: dequantize, repack, page copies, rotation. Method as in
// kernel_bench.h.
#pragma once

#include <vector>

#include "kernels/kernel_bench.h"
#include "kernels/repack_int2.h"

namespace oscar {

struct RowsBenchShape {
  int num_q_heads = 32, num_kv_heads = 8, head_dim = 128;
  int tokens = 32768;  // of a sequence
  int batch = 1;
};

// INT2 pages to bf16 rows of K and V.
KernelTiming bench_dequantize(const RowsBenchShape& shape, double read_ceiling_tb_per_s);
// Pages in random order to or from consecutive slots.
KernelTiming bench_repack(const RowsBenchShape& shape, RepackDirection direction,
                          EngineRows::Layout layout, double read_ceiling_tb_per_s);
// Copies of whole INT2 pages of one layer.
KernelTiming bench_copy_pages(const RowsBenchShape& shape, double read_ceiling_tb_per_s);
// bf16 rows of queries and keys (num_q_heads + num_kv_heads) times one matrix in two terms.
KernelTiming bench_rotate(const RowsBenchShape& shape, double read_ceiling_tb_per_s);

}  // namespace oscar
