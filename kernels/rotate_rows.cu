#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/launch_check.cuh"
#include "kernels/rotate_rows.cuh"
#include "kernels/rotate_rows_hopper.h"

namespace oscar {
namespace {

using namespace rotate;

constexpr int kWarps = 8;

template <int D>
struct Shape {
  // Output columns whose part of the matrix lies in shared memory at once: two terms stay under the
  // 99 KB of the smaller devices.
  static constexpr int kColumns = D == 256 ? 64 : (D == 192 ? 96 : D);
  // Bytes of a column's row of the matrix: 64 modulo 128, so that the 16-byte reads of two
  // neighbours meet no bank twice.
  static constexpr int kRowBytes = 2 * D + (D % 64 == 0 ? 64 : 0);
  static constexpr int kTermBytes = kColumns * kRowBytes;
};

template <bool kHalf>
__device__ __forceinline__ void multiply(float (&c)[4], const uint4& low, const uint4& high,
                                         const uint4& b) {
  if constexpr (kHalf) {
    ptx::mma_fp16(c, low.x, high.x, low.y, high.y, b.x, b.y);
    ptx::mma_fp16(c, low.z, high.z, low.w, high.w, b.z, b.w);
  } else {
    ptx::mma_bf16(c, low.x, high.x, low.y, high.y, b.x, b.y);
    ptx::mma_bf16(c, low.z, high.z, low.w, high.w, b.z, b.w);
  }
}

// Columns [first, first + kColumns) of R (or of its transpose) as two 16-bit terms, one row of D
// contraction indices a column.
template <int D, bool kHalf>
__device__ __forceinline__ void load_matrix(const float* r, bool transposed, int first,
                                            uint8_t* terms) {
  using S = Shape<D>;
  const auto put = [&](int column, int k, float x0, float x1) {
    auto* at = reinterpret_cast<uint32_t*>(terms + column * S::kRowBytes + 2 * k);
    const uint32_t high = pack<kHalf>(x0, x1);
    const float2 value = unpack<kHalf>(high);
    at[0] = high;
    at[S::kTermBytes / 4] = pack<kHalf>(x0 - value.x, x1 - value.y);
  };
  if (transposed) {
    for (int i = threadIdx.x; i < S::kColumns * D / 4; i += 32 * kWarps) {
      const int column = i / (D / 4), k = i % (D / 4) * 4;
      const float4 x = __ldg(reinterpret_cast<const float4*>(r + (first + column) * D + k));
      put(column, k, x.x, x.y);
      put(column, k + 2, x.z, x.w);
    }
    return;
  }
  for (int i = threadIdx.x; i < S::kColumns / 4 * (D / 2); i += 32 * kWarps) {
    const int k = i % (D / 2) * 2, column = i / (D / 2) * 4;
    const float4 x = __ldg(reinterpret_cast<const float4*>(r + k * D + first + column));
    const float4 y = __ldg(reinterpret_cast<const float4*>(r + (k + 1) * D + first + column));
    put(column, k, x.x, y.x);
    put(column + 1, k, x.y, y.y);
    put(column + 2, k, x.z, y.z);
    put(column + 3, k, x.w, y.w);
  }
}

// Persistent blocks: blockIdx.y = matrix, blockIdx.x strides over tiles of rows. A warp holds all
// of its rows before it writes any, so the output may be the input.
template <int D, ElementType kType, bool kSplit>
__global__ void __launch_bounds__(32 * kWarps, D*(kSplit ? 2 : 1) <= 128 ? 2 : 1)
    rotate_kernel(const RotateParams p) {
  using S = Shape<D>;
  constexpr bool kHalf = kType == ElementType::kFp16;
  // Sixteen-row tiles of a warp: two, so that a read of the matrix feeds two products, unless the
  // registers do not hold them.
  constexpr int kTiles = D * (kSplit ? 2 : 1) <= 256 ? 2 : 1;
  constexpr int kBlockRows = kWarps * kTiles * 16;
  extern __shared__ __align__(16) uint8_t terms[];
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int matrix = blockIdx.y;
  const MatrixRows rows(p, matrix);
  const float* r = p.rotation + static_cast<int64_t>(matrix) * D * D;
  if constexpr (S::kColumns == D) {
    load_matrix<D, kHalf>(r, p.transposed, 0, terms);
    __syncthreads();
  }
  for (uint32_t block_row = blockIdx.x * kBlockRows; block_row < rows.count;
       block_row += gridDim.x * kBlockRows) {
    const uint32_t warp_row = block_row + threadIdx.x / 32 * (kTiles * 16);
    uint4 a[kTiles][2][D / 32], rest[kTiles][2][kSplit ? D / 32 : 1];
    int64_t output_row[kTiles][2];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        output_row[tile][half] = load_row<D, kType, kSplit>(
            p, rows, warp_row + 16 * tile + 8 * half + g, t, a[tile][half], rest[tile][half]);
      }
    }
#pragma unroll 1
    for (int first = 0; first < D; first += S::kColumns) {
      if constexpr (S::kColumns < D) {
        __syncthreads();
        load_matrix<D, kHalf>(r, p.transposed, first, terms);
        __syncthreads();
      }
#pragma unroll 1
      for (int column = 0; column < S::kColumns; column += 32) {
        // Product tile j holds columns 8 (n / 2) + 2 j + n mod 2 of the 32, so that a lane ends up
        // with eight consecutive ones.
        float c[kTiles][4][4];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
          for (int j = 0; j < 4; ++j)
            c[tile][j][0] = c[tile][j][1] = c[tile][j][2] = c[tile][j][3] = 0.0F;
        }
        const uint8_t* lane_terms = terms + (column + 8 * (g / 2) + g % 2) * S::kRowBytes + 16 * t;
#pragma unroll
        for (int b = 0; b < D / 32; ++b) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const uint8_t* at = lane_terms + 2 * j * S::kRowBytes + 64 * b;
            const uint4 high = *reinterpret_cast<const uint4*>(at);
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
              multiply<kHalf>(c[tile][j], a[tile][0][b], a[tile][1][b], high);
              if constexpr (kSplit)
                multiply<kHalf>(c[tile][j], rest[tile][0][b], rest[tile][1][b], high);
            }
            if (p.two_terms) {
              const uint4 low = *reinterpret_cast<const uint4*>(at + S::kTermBytes);
#pragma unroll
              for (int tile = 0; tile < kTiles; ++tile)
                multiply<kHalf>(c[tile][j], a[tile][0][b], a[tile][1][b], low);
            }
          }
        }
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (output_row[tile][half] < 0) continue;
            float x[8];
#pragma unroll
            for (int j = 0; j < 4; ++j)
              x[2 * j] = c[tile][j][2 * half], x[2 * j + 1] = c[tile][j][2 * half + 1];
            store_eight(p, output_row[tile][half] + first + column, x);
          }
        }
      }
    }
  }
}

template <int D, ElementType kType, bool kSplit>
void launch_kernel(const RotateParams& p, cudaStream_t stream) {
  constexpr int kTiles = D * (kSplit ? 2 : 1) <= 256 ? 2 : 1;
  constexpr int kShared = 2 * Shape<D>::kTermBytes;
  const auto kernel = rotate_kernel<D, kType, kSplit>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
             "rotate_rows: shared memory");
  const int64_t rows = p.num_tokens * (p.num_heads / p.num_rotations);
  const int64_t tiles = (rows + kWarps * kTiles * 16 - 1) / (kWarps * kTiles * 16);
  // The matrix is loaded once a block: no more blocks than stay resident.
  const int64_t resident = std::max(1, 2 * device_multiprocessors() / p.num_rotations);
  const dim3 grid(static_cast<unsigned>(std::min(tiles, resident)),
                  static_cast<unsigned>(p.num_rotations));
  kernel<<<grid, 32 * kWarps, kShared, stream>>>(p);
}

template <int D>
void launch_dim(const RotateParams& p, cudaStream_t stream) {
  const bool split = p.mean != nullptr;
  switch (p.input_type) {
    case ElementType::kBf16:
      if (split) return launch_kernel<D, ElementType::kBf16, true>(p, stream);
      return launch_kernel<D, ElementType::kBf16, false>(p, stream);
    case ElementType::kFp16:
      if (split) return launch_kernel<D, ElementType::kFp16, true>(p, stream);
      return launch_kernel<D, ElementType::kFp16, false>(p, stream);
    case ElementType::kFp32:
      return launch_kernel<D, ElementType::kFp32, true>(p, stream);
  }
}

constexpr const char* kOp = "rotate_rows";

int64_t element_bytes(ElementType type) { return type == ElementType::kFp32 ? 4 : 2; }

void check_params(const RotateParams& p) {
  OSCAR_CHECK(record_supports(p.head_dim), kOp, ": head_dim 64, 96, 128, 192 or 256 expected, got ",
              p.head_dim);
  OSCAR_CHECK(p.num_tokens > 0 && p.num_heads > 0, kOp,
              ": at least one token and head expected, got ", p.num_tokens, " and ", p.num_heads);
  OSCAR_CHECK(p.num_tokens < (int64_t{1} << 31) / p.num_heads, kOp,
              ": fewer than 2^31 rows expected, got ", p.num_tokens, " x ", p.num_heads);
  OSCAR_CHECK(p.num_rotations > 0 && p.num_heads % p.num_rotations == 0 && p.num_rotations <= 65535,
              kOp, ": num_rotations must divide the ", p.num_heads, " heads, got ",
              p.num_rotations);
  OSCAR_CHECK(p.num_means > 0 && p.num_heads % p.num_means == 0, kOp,
              ": num_means must divide the ", p.num_heads, " heads, got ", p.num_means);
  for (const ElementType type : {p.input_type, p.output_type}) {
    OSCAR_CHECK(
        type == ElementType::kBf16 || type == ElementType::kFp16 || type == ElementType::kFp32, kOp,
        ": rows must be bf16, fp16 or fp32");
  }
  for (const auto& [token_stride, head_stride] :
       {std::pair{p.input_token_stride, p.input_head_stride},
        std::pair{p.output_token_stride, p.output_head_stride}}) {
    OSCAR_CHECK(token_stride > 0 && token_stride % 8 == 0 && head_stride >= p.head_dim &&
                    head_stride % 8 == 0,
                kOp, ": positive strides in multiples of 8 elements expected, got ", token_stride,
                " and ", head_stride);
  }
  check_device_pointer(p.input, 16, kOp, "input");
  check_device_pointer(p.output, 16, kOp, "output");
  check_device_pointer(p.rotation, 16, kOp, "rotation");
  if (p.mean != nullptr) check_device_pointer(p.mean, 16, kOp, "mean");
  const auto extent = [&](int64_t token_stride, int64_t head_stride, ElementType type) {
    return ((p.num_tokens - 1) * token_stride + (p.num_heads - 1) * head_stride + p.head_dim) *
           element_bytes(type);
  };
  const auto* in = static_cast<const uint8_t*>(p.input);
  const auto* out = static_cast<const uint8_t*>(p.output);
  const bool in_place = in == out && p.input_type == p.output_type &&
                        p.input_token_stride == p.output_token_stride &&
                        p.input_head_stride == p.output_head_stride;
  const bool apart = in + extent(p.input_token_stride, p.input_head_stride, p.input_type) <= out ||
                     out + extent(p.output_token_stride, p.output_head_stride, p.output_type) <= in;
  OSCAR_CHECK(in_place || apart, kOp,
              ": input and output must be the same rows of the same type, or apart");
}

}  // namespace

void rotate_rows(const RotateParams& p, void* stream) {
  check_params(p);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (!p.portable && rotate::hopper_supports(p)) {
    rotate::launch_hopper(p, stream);
    check_cuda(cudaGetLastError(), "rotate_rows: launch");
    return;
  }
  for_head_dim(p.head_dim, [&]<int D>() { launch_dim<D>(p, cuda_stream); });
  check_cuda(cudaGetLastError(), "rotate_rows: launch");
}

}  // namespace oscar
