// Measures the kernels on the current device: graph replays over enough buffers that the L2 cache
// is cold, medians with spread, beside the copy and read ceilings of the same run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace oscar {

struct DecodeBenchShape {
  int num_q_heads = 32, num_kv_heads = 8, head_dim = 128;
  int context = 32768;  // tokens in all
  int batch = 1;
  // The op is attend_decode_int2, with _alone, _ordered, _history behind it for what is not usual.
  int sink = 64, recent = 256;  // both 0: history alone
  bool random_pages = true;     // false: pages in order
  bool rotate = false;          // query rotation inside
  bool overlap_launch = true;   // as in AttendDecodeParams
};
struct WriteBenchShape {
  int num_kv_heads = 8, head_dim = 128;
  int tokens = 4096;  // of a job
  int num_jobs = 1;   // sequences x layers of one launch
  int layers = 1;     // the jobs use that many side pairs
  bool feedback = false, rotate = false;
};

struct KernelTiming {
  std::string op;     // attend_decode_int2, write_int2_rtn, copy, read, ...
  std::string shape;  // "32x8x128"
  int64_t context = 0;
  int batch = 0;
  double time_us = 0, time_us_min = 0, time_us_max = 0;  // median, range over the replays
  int replays = 0;
  double bytes = 0;  // counted: every input read once, every output written once
  double bandwidth_tb_per_s = 0;
  double read_fraction = 0;  // bandwidth over the read ceiling of the same run
  double tflop_per_s = 0;    // counted products of an operation bound by arithmetic, else 0
};

struct Ceilings {
  KernelTiming copy, read;  // copy: bytes read plus written
};

std::string bench_device_name();
bool bench_has_device();
// bytes: size of the buffers, several times the L2 cache.
Ceilings measure_ceilings(int64_t bytes = int64_t{4} << 30);
KernelTiming bench_decode(const DecodeBenchShape& shape, double read_ceiling_tb_per_s);
// Clip 0.96 / 0.92 (feedback: start 0.92), bf16 rows, matrices not counted as bytes; read_fraction
// is over the read ceiling here too, although a fifth of the bytes is written.
KernelTiming bench_write(const WriteBenchShape& shape, double read_ceiling_tb_per_s);

}  // namespace oscar
