#include <algorithm>

#include "kernels/launch_check.cuh"
#include "kernels/rotate_rows.cuh"
#include "kernels/rotate_rows_hopper.h"
#include "kernels/wgmma.cuh"

namespace oscar::rotate {
namespace {

constexpr int kThreads = 256;  // two warpgroups of 64 rows each

template <int D>
struct Hopper {
  // Output columns of a thread block; blockIdx.z counts the parts. Two terms of 256 columns do not
  // fit shared memory.
  static constexpr int kColumns = D == 256 ? 128 : D;
  static constexpr int kParts = D / kColumns;
  static constexpr int kBlocks = (kColumns + 63) / 64;  // products of 64 columns
  // Rows of a tile of 64 contraction indices: columns of R, whole products.
  static constexpr int kTileRows = 64 * kBlocks;
  static constexpr int kTermBytes = (D + 63) / 64 * kTileRows * 128;
  static constexpr int kShared = 2 * kTermBytes + 1024;  // 1024: alignment
};

// Contraction indices and columns are permuted so that lanes read and write eight consecutive
// elements of a row: place of dim d among a row's contraction indices, and of column c among the
// rows of the matrix tile.
__device__ __forceinline__ int index_of(int d) {
  return d / 32 * 32 + d % 8 / 4 * 16 + d % 4 / 2 * 8 + d % 32 / 8 * 2 + d % 2;
}
__device__ __forceinline__ int row_of(int c) {
  return c / 32 * 32 + c % 8 / 2 * 8 + c % 32 / 8 * 2 + c % 2;
}

#ifdef OSCAR_HAS_WGMMA

// Columns [first, first + kColumns) of R (or its transpose) as two 16-bit terms in tiles of 64
// contraction indices, rows of 128 bytes, swizzled as wgmma reads them.
template <int D, bool kHalf>
__device__ __forceinline__ void load_matrix(const float* r, bool transposed, int first,
                                            uint8_t* terms) {
  using H = Hopper<D>;
  const auto put = [&](int column, int k, float x0, float x1) {  // k even
    const int row = row_of(column), index = index_of(k), chunk = index / 8;
    auto* at = reinterpret_cast<uint32_t*>(terms + chunk / 8 * (H::kTileRows * 128) + row * 128 +
                                           (((chunk ^ row) & 7) << 4) + index % 8 * 2);
    const uint32_t high = pack<kHalf>(x0, x1);
    const float2 value = unpack<kHalf>(high);
    at[0] = high;
    at[H::kTermBytes / 4] = pack<kHalf>(x0 - value.x, x1 - value.y);
  };
  if (transposed) {
    for (int i = threadIdx.x; i < H::kColumns * D / 4; i += kThreads) {
      const int column = i / (D / 4), k = i % (D / 4) * 4;
      const float4 x = __ldg(reinterpret_cast<const float4*>(r + (first + column) * D + k));
      put(column, k, x.x, x.y);
      put(column, k + 2, x.z, x.w);
    }
    return;
  }
  for (int i = threadIdx.x; i < H::kColumns / 4 * (D / 2); i += kThreads) {
    const int k = i % (D / 2) * 2, column = i / (D / 2) * 4;
    const float4 x = __ldg(reinterpret_cast<const float4*>(r + k * D + first + column));
    const float4 y = __ldg(reinterpret_cast<const float4*>(r + (k + 1) * D + first + column));
    put(column, k, x.x, y.x);
    put(column + 1, k, x.y, y.y);
    put(column + 2, k, x.z, y.z);
    put(column + 3, k, x.w, y.w);
  }
}

// One term of 16 rows a warp times one term of 64 columns.
template <int D, bool kHalf>
__device__ __forceinline__ void multiply(float (&c)[8][4], const uint4 (&low)[D / 32],
                                         const uint4 (&high)[D / 32], uint64_t columns,
                                         bool accumulate) {
#pragma unroll
  for (int i = 0; i < D / 16; ++i) {
    const uint4 x = low[i / 2], y = high[i / 2];
    const uint32_t a[4] = {i % 2 ? x.z : x.x, i % 2 ? y.z : y.x, i % 2 ? x.w : x.y,
                           i % 2 ? y.w : y.y};
    const uint64_t b =
        columns + static_cast<uint64_t>((i / 4 * (Hopper<D>::kTileRows * 128) + i % 4 * 32) >> 4);
    if constexpr (kHalf) {
      wgmma::multiply_nk_fp16(c, a, b, accumulate || i > 0);
    } else {
      wgmma::multiply_nk(c, a, b, accumulate || i > 0);
    }
  }
}

#endif  // OSCAR_HAS_WGMMA

// Persistent blocks: blockIdx.y = matrix, blockIdx.z = part of the columns, blockIdx.x strides over
// tiles of 64 rows a warpgroup. A warpgroup holds all of its rows before it writes any, so with one
// part the output may be the input.
template <int D, ElementType kType, bool kSplit>
__global__ void __launch_bounds__(kThreads, D*(kSplit ? 2 : 1) <= 128 ? 2 : 1)
    rotate_hopper_kernel(const __grid_constant__ RotateParams p) {
#ifdef OSCAR_HAS_WGMMA
  using H = Hopper<D>;
  constexpr bool kHalf = kType == ElementType::kFp16;
  extern __shared__ __align__(1024) uint8_t shared[];
  uint8_t* terms = shared + (1024 - ptx::shared_address(shared) % 1024) % 1024;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const MatrixRows rows(p, blockIdx.y);
  const int first_column = blockIdx.z * H::kColumns;
  load_matrix<D, kHalf>(p.rotation + static_cast<int64_t>(rows.matrix) * D * D, p.transposed,
                        first_column, terms);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  const uint64_t descriptor = wgmma::make_descriptor(ptx::shared_address(terms), 0);
  const uint32_t warp_row = threadIdx.x / 32 * 16 + g;
  for (uint32_t tile = blockIdx.x * (kThreads / 2); tile < rows.count;
       tile += gridDim.x * (kThreads / 2)) {
    uint4 low[D / 32], high[D / 32], low_rest[kSplit ? D / 32 : 1], high_rest[kSplit ? D / 32 : 1];
    const int64_t output[2] = {
        load_row<D, kType, kSplit>(p, rows, tile + warp_row, t, low, low_rest),
        load_row<D, kType, kSplit>(p, rows, tile + warp_row + 8, t, high, high_rest)};
#pragma unroll
    for (int block = 0; block < H::kBlocks; ++block) {
      float c[8][4];
      const uint64_t columns = descriptor + static_cast<uint64_t>(block * (64 * 128) >> 4);
      wgmma::fence();
      multiply<D, kHalf>(c, low, high, columns, false);
      if constexpr (kSplit) multiply<D, kHalf>(c, low_rest, high_rest, columns, true);
      if (p.two_terms) {
        wgmma::fence();  // the products before may lie in another basic block
        multiply<D, kHalf>(c, low, high, columns + (H::kTermBytes >> 4), true);
      }
      wgmma::commit();
      wgmma::wait<0>();
      wgmma::hold(c);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const int column = 64 * block + 32 * part;
          if (output[half] < 0 || column >= H::kColumns) continue;
          float x[8];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            x[2 * j] = c[4 * part + j][2 * half];
            x[2 * j + 1] = c[4 * part + j][2 * half + 1];
          }
          store_eight(p, output[half] + first_column + column, x);
        }
      }
    }
  }
#else
  __trap();
#endif
}

template <int D, ElementType kType, bool kSplit>
void launch_kernel(const RotateParams& p, cudaStream_t stream) {
  using H = Hopper<D>;
  const auto kernel = rotate_hopper_kernel<D, kType, kSplit>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, H::kShared),
             "rotate_rows: shared memory");
  const int64_t rows = p.num_tokens * (p.num_heads / p.num_rotations);
  const int64_t tiles = (rows + kThreads / 2 - 1) / (kThreads / 2);
  // The matrix is loaded once a block: no more blocks than stay resident.
  int per_multiprocessor = 1;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, kThreads,
                                                           H::kShared),
             "rotate_rows: occupancy");
  const int64_t resident =
      std::max(1, per_multiprocessor * device_multiprocessors() / (p.num_rotations * H::kParts));
  const dim3 grid(static_cast<unsigned>(std::min(tiles, resident)),
                  static_cast<unsigned>(p.num_rotations), H::kParts);
  kernel<<<grid, kThreads, H::kShared, stream>>>(p);
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

}  // namespace

bool hopper_supports(const RotateParams& p) {
  int device = 0, major = 0, minor = 0;
  check_cuda(cudaGetDevice(&device), "rotate_rows");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
             "rotate_rows");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
             "rotate_rows");
  return major == 9 && minor == 0 && !(p.head_dim == 256 && p.input == p.output);
}

void launch_hopper(const RotateParams& p, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  for_head_dim(p.head_dim, [&]<int D>() { launch_dim<D>(p, cuda_stream); });
}

}  // namespace oscar::rotate
