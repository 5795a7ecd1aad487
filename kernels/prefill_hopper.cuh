// Prefill attention with wgmma (sm_90a): producer warpgroups fill a ring of key and value tiles
// (they dequantize INT2 pages on the way), two consumer warpgroups take 64 query rows each.
#pragma once

#include "kernels/prefill_portable.cuh"
#include "kernels/wgmma.cuh"

namespace oscar::prefill {

template <int D>
struct Hopper {
  static constexpr int kConsumers = 2, kRows = 64 * kConsumers;
  // Two: one for keys, one for values. The unpacking of a page is a chain of latencies; above 128
  // dims the registers do not suffice for a second warpgroup.
  static constexpr int kProducers = D <= 128 ? 2 : 1;
  static constexpr int kThreads = 128 * (kConsumers + kProducers);
  // Query as register fragments; above 128 dims it is read from shared memory.
  static constexpr bool kQueryInRegisters = D <= 128;
  static constexpr int kTile = tile_bytes(D, kKeys);
  static constexpr int kQueryBytes = kQueryInRegisters ? 0 : kConsumers * kTile;
  static constexpr int kStages = D <= 128 ? 5 : (D == 192 ? 3 : 2);
  static constexpr int kShared = kStages * 2 * kTile + kQueryBytes + 1024;  // 1024: alignment
  // setmaxnreg: together at most the 512 registers that 128 threads share.
  static constexpr int kProducerRegisters = kProducers == 2 ? 56 : (D <= 192 ? 72 : 88);
  static constexpr int kConsumerRegisters = kProducers == 2 ? 200 : (D <= 192 ? 216 : 208);
  static_assert(kProducers * kProducerRegisters + kConsumers * kConsumerRegisters <= 512);
};

#ifdef OSCAR_HAS_WGMMA

template <int kCount>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
// Shared memory written by ordinary stores or cp.async becomes visible to wgmma.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

struct Barriers {
  uint32_t full, empty;  // shared addresses of [kStages] mbarriers each
};

template <int D, bool kKeySide, bool kValueSide>
__device__ __forceinline__ void produce(const AttendPrefillParams& p, const PrefillWork& w,
                                        uint32_t tiles, Barriers barriers) {
  using C = Hopper<D>;
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const auto announce = [&](int stage) {
    fence_async_proxy();
    ptx::mbarrier_arrive(barriers.full + 8 * stage);
  };
  int stage = 0, parity = 1, pending = -1;  // pending: stage whose copies are on their way
  const auto announce_pending = [&] {
    if (pending >= 0) announce(pending);
    pending = -1;
  };
  PageLoads<D, kKeySide, kValueSide> loads, next;
  PrefillBlock block = prefill_block(w.lengths, w.new_tokens, w.block_begin);
  if (block.source == PrefillSource::kHistory) next.load(p, w, block, warp, lane);
  for (int index = w.block_begin; index < w.block_end; ++index) {
    const PrefillBlock current = block;
    loads = next;
    if (index + 1 <
        w.block_end) {  // a page's loads are on their way while the one before is unpacked
      block = next_block(w.lengths, w.new_tokens, block);
      if (block.source == PrefillSource::kHistory) next.load(p, w, block, warp, lane);
    }
    if constexpr (C::kStages == 2) {  // the other stage is freed by who waits for this announcement
      copy_wait<0>();
      announce_pending();
    }
    ptx::mbarrier_wait(barriers.empty + 8 * stage, parity);
    const uint32_t k_tile = tiles + stage * (2 * C::kTile), v_tile = k_tile + C::kTile;
    const bool history = current.source == PrefillSource::kHistory;
    if (history) {
      store_page<D>(loads, current.count, warp, k_tile, v_tile, lane);
    } else {
      if constexpr (kKeySide)
        copy_rows<D, 128>(row_source<D>(p, w, current, true), current.count, k_tile, thread);
      if constexpr (kValueSide)
        copy_rows<D, 128>(row_source<D>(p, w, current, false), current.count, v_tile, thread);
    }
    copy_commit();
    if (pending >= 0) copy_wait<1>();
    announce_pending();
    if (history) {
      announce(stage);
    } else {
      pending = stage;
    }
    if (++stage == C::kStages) stage = 0, parity ^= 1;
  }
  copy_wait<0>();
  announce_pending();
}

// Scores of a block: S = Q K^T.
template <int D, class Query>
__device__ __forceinline__ void multiply_keys(float (&s)[8][4], const Query& q, uint32_t q_tile,
                                              uint32_t k_tile) {
  const uint64_t b = wgmma::make_descriptor(k_tile, 0);
#pragma unroll
  for (int i = 0; i < D / 16; ++i) {
    // Inside a row of 128 bytes the start moves by 32 bytes; descriptors count in 16 bytes.
    const uint64_t step = static_cast<uint64_t>((i / 4 * (kKeys * 128) + i % 4 * 32) >> 4);
    if constexpr (Hopper<D>::kQueryInRegisters) {
      wgmma::multiply_nk(s, q[i], b + step, i > 0);
    } else {
      wgmma::multiply_nk(s, wgmma::make_descriptor(q_tile, 0) + step, b + step, i > 0);
    }
  }
}
// O += P V.
template <int D>
__device__ __forceinline__ void multiply_values(float (&o)[D / 8][4], const uint32_t (&p)[4][4],
                                                uint32_t v_tile) {
  const uint64_t b = wgmma::make_descriptor(v_tile, kKeys * 128);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    wgmma::multiply_kn(o, p[i], b + static_cast<uint64_t>(i * 2048 >> 4), true);
}

template <int D>
__device__ __forceinline__ void consume(const AttendPrefillParams& p, const PrefillWork& w,
                                        uint32_t tiles, uint32_t q_tiles, Barriers barriers,
                                        uint32_t scratch) {
  using C = Hopper<D>;
  const int consumer = threadIdx.x / 128 - C::kProducers, thread = threadIdx.x % 128;
  const int warp = thread / 32, lane = thread % 32;
  const int group = p.num_q_heads / p.cache.num_kv_heads;
  const QueryRows rows(p, w, 64 * consumer + 16 * warp, lane);
  const uint32_t q_tile = q_tiles + consumer * C::kTile;
  uint32_t q[C::kQueryInRegisters ? D / 16 : 1][4];
  if constexpr (C::kQueryInRegisters) {
    load_query<D>(p, rows, lane, q);
  } else {
    store_query_tile<D>(p, w, 64 * consumer, q_tile, thread, 128);
    fence_async_proxy();
    ptx::named_barrier(1 + consumer, 128);
  }
  const ScoreScale scale(p);
  SoftmaxRows softmax;
  float o[D / 8][4], s[8][4], factor[2];
  uint32_t weights[4][4];
#pragma unroll
  for (int n = 0; n < D / 8; ++n) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0F;
  int stage = 0, parity = 0;
  const auto k_tile = [&](int at) { return tiles + at * (2 * C::kTile); };
  const auto release = [&](int at) {
    if (lane == 0) ptx::mbarrier_arrive(barriers.empty + 8 * at);
  };
  PrefillBlock block = prefill_block(w.lengths, w.new_tokens, w.block_begin);
  const auto columns = [&] { return visible_columns(w, block, rows, p.sliding_window, group); };
  const auto scores = [&] {
    ptx::mbarrier_wait(barriers.full + 8 * stage, parity);
    wgmma::fence();
    multiply_keys<D>(s, q, q_tile, k_tile(stage));
    wgmma::commit();
  };
  const auto values = [&](int at) {
    wgmma::fence();
    multiply_values<D>(o, weights, k_tile(at) + C::kTile);
    wgmma::commit();
  };
  scores();
  wgmma::wait<0>();
  wgmma::hold(s);
  softmax.step(s, scale, columns(), lane, factor);  // o is still zero
  pack_weights(s, weights);
  for (int index = w.block_begin + 1; index < w.block_end; ++index) {
    const int before = stage;
    block = next_block(w.lengths, w.new_tokens, block);
    if (++stage == C::kStages) stage = 0, parity ^= 1;
    scores();
    values(before);
    wgmma::wait<1>();
    wgmma::hold(s);
    const bool moved = softmax.step(s, scale, columns(), lane, factor);
    // The assembler would move the exponentials behind the wait, where they no longer overlap with
    // the products of the values: a store that needs all of them stays before it.
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(scratch), "f"(softmax.sum[0] + softmax.sum[1])
                 : "memory");
    wgmma::wait<0>();
    wgmma::hold(o);
    wgmma::hold(s);  // the weights' registers are read until here
    release(before);
    if (moved) rescale(o, factor);
    pack_weights(s, weights);
  }
  values(stage);
  wgmma::wait<0>();
  wgmma::hold(o);
  store_rows<D>(p, rows, softmax, o, lane);
}

#endif  // OSCAR_HAS_WGMMA

template <int D>
__global__ void __launch_bounds__(Hopper<D>::kThreads, 1)
    attend_hopper_kernel(const __grid_constant__ AttendPrefillParams p) {
#ifdef OSCAR_HAS_WGMMA
  using C = Hopper<D>;
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ __align__(8) uint64_t full[C::kStages], empty[C::kStages];
  __shared__ float scratch[C::kThreads];
  const uint32_t tiles = (ptx::shared_address(shared) + 1023U) & ~1023U;
  const Barriers barriers{ptx::shared_address(full), ptx::shared_address(empty)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      ptx::mbarrier_init(barriers.full + 8 * i, 128 * C::kProducers);
      ptx::mbarrier_init(barriers.empty + 8 * i, 4 * C::kConsumers);  // the consumers' warps
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  const PrefillWork w = p.work[blockIdx.x];
  if (threadIdx.x < 128 * C::kProducers) {
    fewer_registers<C::kProducerRegisters>();
    if constexpr (C::kProducers == 1) {
      produce<D, true, true>(p, w, tiles, barriers);
    } else if (threadIdx.x < 128) {
      produce<D, true, false>(p, w, tiles, barriers);
    } else {
      produce<D, false, true>(p, w, tiles, barriers);
    }
  } else {
    more_registers<C::kConsumerRegisters>();
    consume<D>(p, w, tiles, tiles + C::kStages * 2 * C::kTile, barriers,
               ptx::shared_address(scratch + threadIdx.x));
  }
#else
  __trap();
#endif
}

}  // namespace oscar::prefill
