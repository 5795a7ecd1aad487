// Measures prefill attention. Method as in kernel_bench.h.
#pragma once

#include "kernels/attend_prefill.h"
#include "kernels/kernel_bench.h"

namespace oscar {

struct PrefillBenchShape {
  int num_q_heads = 32, num_kv_heads = 8, head_dim = 128;
  int new_tokens = 4096;
  int cached = 0;  // tokens before the chunk: sink, INT2 history, recent
  int sink = 64, recent = 256;
  int batch = 1;
  PrefillPath path = PrefillPath::kAuto;
};

// Products counted: 4 D for every (query head, query, visible key).
double prefill_flops(const PrefillBenchShape& shape);
KernelTiming bench_prefill(const PrefillBenchShape& shape, double read_ceiling_tb_per_s);

}  // namespace oscar
