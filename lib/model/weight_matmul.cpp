#include "model/weight_matmul.h"

#include <cblas.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <vector>

#include "base/aligned.h"
#include "base/cpu.h"
#include "base/error.h"
#include "base/float16.h"
#include "base/parallel.h"
#include "model/kernel_scope.h"
#include "model/weight_kernels.h"

namespace oscar {
namespace {

constexpr size_t kTokenBlock = 2048;  // tokens whose panels are kept at a time (bounds the scratch)
constexpr size_t kPartTokens = 1024;  // about so many tokens make one piece of work
constexpr size_t kManyPieces = 32;    // enough pieces to keep threads balanced
constexpr size_t kMinRows = 32, kMaxRows = 192;  // weight rows expanded at a time
constexpr size_t kReferenceRows = 64;            // the same for the reference backend

size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

// Size of each of `parts` about equal parts of `count` tokens, in whole panels of `width`.
size_t part_size(size_t count, size_t parts, size_t width) {
  return ceil_div(ceil_div(count, parts), width) * width;
}
size_t num_parts(size_t count) {
  return std::max<size_t>(1, (count + kPartTokens / 2) / kPartTokens);
}

const WeightKernels* kernels_fp32() {
  if (cpu_features().avx512) return &weight_kernels_avx512();
  return cpu_features().avx2 ? &weight_kernels_avx2() : nullptr;
}
const WeightKernels* kernels_bf16() {
  if (cpu_features().amx_bf16) return &weight_kernels_amx();
  return cpu_features().avx512_bf16 ? &weight_kernels_avx512bf16() : nullptr;
}

StoredRows stored(const WeightMatrix& weight) {
  return {weight.type, weight.bytes, row_bytes(weight.type, weight.columns), weight.columns};
}

// One piece of work: rows [begin, end) of a job.
struct Tile {
  const MatmulJob* job;
  size_t begin, end;
};

std::vector<Tile> cut(std::span<const MatmulJob> jobs, size_t tile_rows) {
  std::vector<Tile> tiles;
  for (const MatmulJob& job : jobs) {
    for (size_t row = 0; row < job.weight->rows; row += tile_rows)
      tiles.push_back({&job, row, std::min(job.weight->rows, row + tile_rows)});
  }
  return tiles;
}

size_t total_rows(std::span<const MatmulJob> jobs) {
  size_t rows = 0;
  for (const MatmulJob& job : jobs) rows += job.weight->rows;
  return rows;
}

const float* bias_at(const Tile& tile) {
  return tile.job->bias == nullptr ? nullptr : tile.job->bias + tile.begin;
}

// ---- matrix-vector

void run_gemv(const WeightKernels& kernels, std::span<const MatmulJob> jobs, const float* x,
              size_t tokens) {
  // Pieces of about 32 KiB of stored weights: many enough to balance, large enough to stream.
  const size_t bytes = row_bytes(jobs[0].weight->type, jobs[0].weight->columns);
  const std::vector<Tile> tiles = cut(jobs, std::clamp<size_t>(32768 / bytes, 8, 256));
  parallel_for(tiles.size(), [&](size_t item) {
    const Tile& tile = tiles[item];
    kernels.gemv({.weight = stored(*tile.job->weight),
                  .row_begin = tile.begin,
                  .row_end = tile.end,
                  .x = x,
                  .tokens = tokens,
                  .bias = tile.job->bias,
                  .accumulate = tile.job->accumulate,
                  .out = tile.job->out,
                  .out_stride = tile.job->weight->rows});
  });
}

// ---- panels

struct TokenPanels {
  const uint32_t* panels;
  size_t stride;  // elements from one panel to the next
  size_t tokens, token_begin;
};

void multiply_tile(const GemmKernels& gemm, const Tile& tile, const TokenPanels& x) {
  thread_local AlignedBuffer<uint32_t> scratch;
  const KernelScope scope(gemm.start, gemm.stop);
  const WeightMatrix& weight = *tile.job->weight;
  const size_t unit_steps = kColumnUnit / gemm.columns_per_step;
  const size_t block_units = kBlockSteps / unit_steps;
  const size_t units = ceil_div(weight.columns, kColumnUnit);
  const size_t num_panels = ceil_div(tile.end - tile.begin, gemm.row_width);
  const size_t panel_size = kBlockSteps * gemm.row_width;
  uint32_t* panels = scratch.get(num_panels * panel_size);
  for (size_t unit = 0; unit < units; unit += block_units) {
    const size_t count = std::min(block_units, units - unit);
    for (size_t p = 0; p < num_panels; ++p) {
      gemm.pack_weights({.weight = stored(weight),
                         .row_begin = tile.begin + p * gemm.row_width,
                         .row_end = tile.end,
                         .unit_begin = unit,
                         .unit_count = count,
                         .panel = panels + p * panel_size});
    }
    const bool last = unit + count == units;
    for (size_t t = 0; t < x.tokens; t += gemm.token_width) {
      for (size_t p = 0; p < num_panels; ++p) {
        const size_t row = tile.begin + p * gemm.row_width;
        const float* bias = bias_at(tile);
        gemm.multiply({.weights = panels + p * panel_size,
                       .tokens = x.panels + t / gemm.token_width * x.stride +
                                 unit / block_units * gemm.token_width * kBlockSteps,
                       .steps = count * unit_steps,
                       .num_tokens = std::min(gemm.token_width, x.tokens - t),
                       .num_rows = std::min(gemm.row_width, tile.end - row),
                       .accumulate = unit > 0 || tile.job->accumulate,
                       .bias = last && bias != nullptr ? bias + p * gemm.row_width : nullptr,
                       .out = tile.job->out + (x.token_begin + t) * weight.rows + row,
                       .out_stride = weight.rows});
      }
    }
  }
}

// Rows of a piece: the more, the less often the tokens' panels are read again, as long as there are
// enough pieces.
size_t panel_tile_rows(size_t rows, size_t tokens) {
  const size_t parts = num_parts(std::min(tokens, kTokenBlock));
  size_t tile = kMaxRows;
  while (tile > kMinRows && ceil_div(rows, tile) * parts < kManyPieces) tile -= kMinRows;
  return tile;
}

void run_panels(const GemmKernels& gemm, std::span<const MatmulJob> jobs, const float* x,
                size_t tokens) {
  thread_local AlignedBuffer<uint32_t> scratch;
  const size_t columns = jobs[0].weight->columns;
  const size_t steps = ceil_div(columns, kColumnUnit) * (kColumnUnit / gemm.columns_per_step);
  const size_t panel_stride = ceil_div(steps, kBlockSteps) * gemm.token_width * kBlockSteps;
  const std::vector<Tile> tiles = cut(jobs, panel_tile_rows(total_rows(jobs), tokens));
  const size_t block = part_size(tokens, ceil_div(tokens, kTokenBlock), gemm.token_width);
  for (size_t begin = 0; begin < tokens; begin += block) {
    const size_t count = std::min(block, tokens - begin);
    const size_t num_panels = ceil_div(count, gemm.token_width);
    uint32_t* panels = scratch.get(num_panels * panel_stride);
    parallel_for(num_panels, [&](size_t p) {
      const size_t t = begin + p * gemm.token_width;
      gemm.pack_tokens({.x = x + t * columns,
                        .x_stride = columns,
                        .tokens = std::min(gemm.token_width, begin + count - t),
                        .columns = columns,
                        .panel = panels + p * panel_stride});
    });
    const size_t part = part_size(count, num_parts(count), gemm.token_width);
    const size_t parts = ceil_div(count, part);
    parallel_for(tiles.size() * parts, [&](size_t item) {
      const size_t first = item % parts * part;
      multiply_tile(gemm, tiles[item / parts],
                    {.panels = panels + first / gemm.token_width * panel_stride,
                     .stride = panel_stride,
                     .tokens = std::min(part, count - first),
                     .token_begin = begin + first});
    });
  }
}

// ---- reference: dequantize and OpenBLAS

void run_reference(std::span<const MatmulJob> jobs, const float* x, size_t tokens) {
  static std::once_flag once;
  std::call_once(once, [] { openblas_set_num_threads(1); });
  const std::vector<Tile> tiles = cut(jobs, kReferenceRows);
  parallel_for(tiles.size(), [&](size_t item) {
    thread_local std::vector<float> expanded;
    const Tile& tile = tiles[item];
    const WeightMatrix& weight = *tile.job->weight;
    const size_t rows = tile.end - tile.begin, columns = weight.columns;
    expanded.resize(rows * columns);
    for (size_t r = 0; r < rows; ++r)
      dequantize_row(weight.type, weight.row(tile.begin + r), columns,
                     expanded.data() + r * columns);
    float* out = tile.job->out + tile.begin;
    const float* bias = bias_at(tile);
    for (size_t t = 0; t < tokens; ++t)
      for (size_t r = 0; r < rows; ++r) {
        const float start = bias == nullptr ? 0.0F : bias[r];
        float& value = out[t * weight.rows + r];
        value = tile.job->accumulate ? value + start : start;
      }
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<blasint>(tokens),
                static_cast<blasint>(rows), static_cast<blasint>(columns), 1.0F, x,
                static_cast<blasint>(columns), expanded.data(), static_cast<blasint>(columns), 1.0F,
                out, static_cast<blasint>(weight.rows));
  });
}

void check_jobs(std::span<const MatmulJob> jobs) {
  for (const MatmulJob& job : jobs) {
    OSCAR_CHECK(job.weight->present(), "weight ", job.weight->name, " is absent");
    OSCAR_CHECK(job.weight->columns == jobs[0].weight->columns, "weight ", job.weight->name,
                ": expected ", jobs[0].weight->columns, " columns, got ", job.weight->columns);
  }
}

const WeightKernels* kernels(Compute compute) {
  return compute == Compute::kFp32 ? kernels_fp32() : kernels_bf16();
}

}  // namespace

void weight_matmul(std::span<const MatmulJob> jobs, const float* x, size_t tokens, Compute compute,
                   MatmulBackend backend) {
  if (jobs.empty() || tokens == 0) return;
  check_jobs(jobs);
  const WeightKernels* own = kernels(compute);
  const WeightKernels* few = kernels_fp32();
  if (backend == MatmulBackend::kReference ||
      (backend == MatmulBackend::kAuto && compute == Compute::kFp32 && own == nullptr)) {
    OSCAR_CHECK(compute == Compute::kFp32, "the reference backend multiplies in float32 only");
    return run_reference(jobs, x, tokens);
  }
  if (compute == Compute::kBf16) check_compute_supported(compute);
  OSCAR_CHECK(own != nullptr, "this CPU lacks the instructions of the SIMD backend (", simd_name(),
              ")");
  if (tokens <= kGemvTokens) return run_gemv(*few, jobs, x, tokens);
  run_panels(own->gemm, jobs, x, tokens);
}

void check_compute_supported(Compute compute) {
  OSCAR_CHECK(compute == Compute::kFp32 || kernels_bf16() != nullptr,
              "--compute bf16 needs a CPU with AVX512-BF16 or AMX, this one has ", simd_name());
}

const char* matmul_backend_name(Compute compute) {
  if (compute == Compute::kBf16) return cpu_features().amx_bf16 ? "amx_bf16" : "avx512_bf16";
  if (kernels_fp32() == nullptr) return "openblas";
  return cpu_features().avx512 ? "avx512" : "avx2";
}

}  // namespace oscar
