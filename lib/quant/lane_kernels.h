// The inner loops of the encoders, many rows at a time: arrays are [dim][lane], one lane a row, so
// that a vector register holds one dim of 16 (AVX-512), 8 (AVX2) or 1 (scalar) rows. The three
// versions give the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quant/int2_format.h"

namespace oscar {

inline constexpr int kMaxLanes = 16;

// code = clamp(trunc((clamp(x, +-threshold) - offset) / scale + 0.5), 0, max_code); a scale of
// infinity gives code 0.
struct QuantizeArgs {
  const float* x;          // [head_dim][lanes]
  const float* threshold;  // [lanes], null = not clipped
  const float* scale;      // [groups][lanes]
  const float* offset;     // [groups][lanes]
  int head_dim;
  int group;
  int max_code;
  uint8_t* codes;  // out [head_dim][lanes]
};

// Tries num_candidates pairs (scale, low) on each row and keeps the cheapest (best_recipe 5).
struct CandidateArgs {
  const float* x;         // [head_dim][lanes]
  const float* l_panels;  // L by blocks of 4 columns, see MetricPanels
  const float* pivot;     // [head_dim]
  const float* scale;     // [candidates][lanes]; 0 = every code 0
  const float* low;       // [candidates][lanes]: value = code * scale + low
  int head_dim;
  int max_code;
  int num_candidates;
  bool feedback;        // false: rounding to nearest
  float* error;         // scratch [head_dim][kMaxLanes * 8]
  uint8_t* trial;       // scratch [head_dim][kMaxLanes * 8]; may be null when codes is null
  float* best_cost;     // in/out [lanes]: e A e^T of the best so far
  int32_t* best_index;  // in/out [lanes]: the candidate's number where it improves
  uint8_t* codes;       // in/out [head_dim][lanes] of the best; null = not wanted
};

// Tries num_candidates ranges on each row and keeps the one with the least squared error, ties of
// rounding to even.
struct RangeArgs {
  const float* x;      // [head_dim][lanes]
  const float* scale;  // [candidates][lanes]
  const float* low;    // [candidates][lanes]
  int head_dim;
  int max_code;
  int num_candidates;
  float* best_cost;     // in/out [lanes]
  int32_t* best_index;  // in/out [lanes]: the candidate's number where it improves
};

// Coordinate descent on e A e^T: every code in turn is re-rounded to the best given all others.
struct SweepArgs {
  const float* x;          // [head_dim][lanes]
  const float* a_panels;   // A by blocks of 4 columns, see MetricPanels
  const float* a_inverse;  // [head_dim], 1 / A_ii
  const float* scale;      // [lanes]; 0 = every code 0
  const float* low;        // [lanes]
  int head_dim;
  int max_code;
  int sweeps;
  float* error;    // scratch [head_dim][lanes]
  uint8_t* codes;  // in/out [head_dim][lanes]
};

// Inner products of two rows x, y and of the constant row 1 in the metric.
struct MetricProductArgs {
  const float* x;  // [head_dim][lanes]
  const float* y;  // [head_dim][lanes]
  const float* l_panels;
  const float* pivot;
  const float* ones_l;  // [head_dim]: 1 L
  int head_dim;
  float* xx;  // out [lanes]: x A x^T, and so on
  float* xy;
  float* yy;
  float* x1;
  float* y1;
};

struct DecodeArgs {
  const uint8_t* codes;  // code bytes of one row
  const float* levels;   // [groups][2^bits], bits 2 or 4
  int head_dim;
  int group;
  int bits;
  PackOrder order;
  float* row;  // out [head_dim]
};

struct LaneKernels {
  const char* name;
  int lanes;
  // Transposes rows into x: lane l holds row l % period, or the last row where there are fewer
  // (1 <= count <= period <= lanes). Returns the index of the first row with a NaN or infinity, or
  // -1.
  int (*load_rows)(const float* rows, size_t row_stride, int count, int period, int head_dim,
                   float* x);
  // k-th largest |x| of every lane, k >= 1.
  void (*kth_largest)(const float* x, int head_dim, int k, float* threshold);
  // Per group; threshold may be null.
  void (*min_max)(const float* x, const float* threshold, int head_dim, int group, float* minimum,
                  float* maximum);
  void (*mean)(const float* x, int head_dim, float* mean);
  void (*quantize)(const QuantizeArgs& args);
  // Values of codes: scaled = code * scale + low (per group pair).
  void (*dequantize)(const uint8_t* codes, const float* scale, const float* low, int head_dim,
                     int group, float* y);
  void (*plain_products)(const float* x, const float* y, int head_dim, float* xx, float* xy);
  void (*metric_products)(const MetricProductArgs& args);
  void (*try_candidates)(const CandidateArgs& args);
  void (*try_ranges)(const RangeArgs& args);
  void (*sweep_codes)(const SweepArgs& args);
  void (*round_fp16)(float* values, int count);  // count a multiple of lanes
  void (*decode_row)(const DecodeArgs& args);
};

// The fastest version that this CPU runs.
const LaneKernels& lane_kernels();
// One version: "scalar", "avx2", "avx512"; null when the CPU or the build cannot run it.
const LaneKernels* lane_kernels(const char* name);

// Defined one a file; null when the build's architecture has no such instructions.
const LaneKernels* scalar_lane_kernels();
const LaneKernels* avx2_lane_kernels();
const LaneKernels* avx512_lane_kernels();

}  // namespace oscar
