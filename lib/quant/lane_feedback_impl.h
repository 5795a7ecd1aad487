// Lane kernels of the feedback encoder, written once over a vector type V (see lane_rtn_impl.h).
//
// With A = L diag(p) L^T and e = x - value, e A e^T = sum_i p_i r_i^2 where r_i = e_i + sum_{j>i}
// L_ji e_j: the residual that the feedback pass has at hand anyway, so the cost is free. Candidates
// share the loads of L: 4 columns times F candidates are in registers at once.
#pragma once

#include "quant/lane_kernels.h"

namespace {

constexpr int kBlock = 4;  // columns of L and A in a panel

// Loops over the block are unrolled by request: otherwise their sums would live in memory.

// Candidates of one chunk, [F] each.
template <int F>
struct Chunk {
  V scale[F], inverse[F], low[F], cost[F];
};

template <int F>
Chunk<F> load_chunk(const oscar::CandidateArgs& args, int first) {
  Chunk<F> chunk;
  for (int f = 0; f < F; ++f) {
    chunk.scale[f] = V::load(args.scale + (first + f) * V::kLanes);
    chunk.low[f] = V::load(args.low + (first + f) * V::kLanes);
    const V usable = V::select(V::less(V::zero(), chunk.scale[f]), chunk.scale[f], V::set1(1.0F));
    chunk.inverse[f] =
        V::select(V::less(V::zero(), chunk.scale[f]), V::div(V::set1(1.0F), usable), V::zero());
    chunk.cost[f] = V::zero();
  }
  return chunk;
}

template <int F>
inline V nearest_code(const Chunk<F>& chunk, int f, V target, V top) {
  const V position = V::fma(V::sub(target, chunk.low[f]), chunk.inverse[f], V::set1(0.5F));
  return V::floor(V::min(V::max(position, V::zero()), top));
}

// First rounding of F candidates, from the last dim to the first.
template <int F, bool kFeedback, bool kCodes>
void first_pass(const oscar::CandidateArgs& args, Chunk<F>& chunk) {
  const V top = V::set1(static_cast<float>(args.max_code));
  const float* panel = args.l_panels;
  for (int begin = args.head_dim - kBlock; begin >= 0; begin -= kBlock) {
    V sum[kBlock][F];
    for (int k = 0; k < kBlock; ++k)
      for (int f = 0; f < F; ++f) sum[k][f] = V::load(args.x + (begin + k) * V::kLanes);
    for (int j = args.head_dim - 1; j >= begin + kBlock; --j, panel += kBlock) {
      const V l0 = V::set1(panel[0]), l1 = V::set1(panel[1]), l2 = V::set1(panel[2]),
              l3 = V::set1(panel[3]);
      const float* errors = args.error + j * F * V::kLanes;
      for (int f = 0; f < F; ++f) {
        const V error = V::load(errors + f * V::kLanes);
        sum[0][f] = V::fma(l0, error, sum[0][f]);
        sum[1][f] = V::fma(l1, error, sum[1][f]);
        sum[2][f] = V::fma(l2, error, sum[2][f]);
        sum[3][f] = V::fma(l3, error, sum[3][f]);
      }
    }
#pragma GCC unroll 8
    for (int k = kBlock - 1; k >= 0; --k, panel += kBlock) {
      const int d = begin + k;
      const V x = V::load(args.x + d * V::kLanes);
      const V pivot = V::set1(args.pivot[d]);
#pragma GCC unroll 8
      for (int f = 0; f < F; ++f) {
        const V code = nearest_code(chunk, f, kFeedback ? sum[k][f] : x, top);
        const V value = V::fma(code, chunk.scale[f], chunk.low[f]);
        const V error = V::sub(x, value);
        const V residual = V::sub(sum[k][f], value);
        chunk.cost[f] = V::fma(V::mul(pivot, residual), residual, chunk.cost[f]);
        V::store(args.error + (d * F + f) * V::kLanes, error);
        if (kCodes) V::store_codes(args.trial + (d * F + f) * V::kLanes, code);
#pragma GCC unroll 8
        for (int above = 0; above < k; ++above)
          sum[above][f] = V::fma(V::set1(panel[above]), error, sum[above][f]);
      }
    }
  }
}

// One coordinate-descent sweep: every code is re-rounded to the best given all others.
template <int F>
void sweep(const oscar::CandidateArgs& args, Chunk<F>& chunk) {
  const V top = V::set1(static_cast<float>(args.max_code));
  const float* panel = args.a_panels;
  for (int begin = 0; begin < args.head_dim; begin += kBlock, panel += kBlock * args.head_dim) {
    V gradient[kBlock][F];
    for (int k = 0; k < kBlock; ++k)
      for (int f = 0; f < F; ++f) gradient[k][f] = V::zero();
    for (int j = 0; j < args.head_dim; ++j) {
      const float* a = panel + j * kBlock;
      const V a0 = V::set1(a[0]), a1 = V::set1(a[1]), a2 = V::set1(a[2]), a3 = V::set1(a[3]);
      const float* errors = args.error + j * F * V::kLanes;
      for (int f = 0; f < F; ++f) {
        const V error = V::load(errors + f * V::kLanes);
        gradient[0][f] = V::fma(a0, error, gradient[0][f]);
        gradient[1][f] = V::fma(a1, error, gradient[1][f]);
        gradient[2][f] = V::fma(a2, error, gradient[2][f]);
        gradient[3][f] = V::fma(a3, error, gradient[3][f]);
      }
    }
#pragma GCC unroll 8
    for (int k = 0; k < kBlock; ++k) {
      const int d = begin + k;
      const V x = V::load(args.x + d * V::kLanes);
      const V diagonal = V::set1(args.a_diag[d]);
      const V inverse_diagonal = V::set1(1.0F / args.a_diag[d]);
#pragma GCC unroll 8
      for (int f = 0; f < F; ++f) {
        float* slot = args.error + (d * F + f) * V::kLanes;
        const V before = V::load(slot);
        const V away = V::mul(gradient[k][f], inverse_diagonal);  // before - best error
        const V best = V::sub(before, away);
        const V code = nearest_code(chunk, f, V::sub(x, best), top);
        const V error = V::sub(x, V::fma(code, chunk.scale[f], chunk.low[f]));
        const V distance = V::sub(error, best);
        const V change = V::sub(V::mul(distance, distance), V::mul(away, away));
        chunk.cost[f] = V::fma(diagonal, change, chunk.cost[f]);
        V::store(slot, error);
        V::store_codes(args.trial + (d * F + f) * V::kLanes, code);
        const V delta = V::sub(error, before);
#pragma GCC unroll 8
        for (int next = k + 1; next < kBlock; ++next)
          gradient[next][f] = V::fma(V::set1(panel[d * kBlock + next]), delta, gradient[next][f]);
      }
    }
  }
}

// Where a candidate is cheaper than the best so far, it becomes the best.
template <int F>
void keep_best(const oscar::CandidateArgs& args, const Chunk<F>& chunk, int first) {
  V best = V::load(args.best_cost);
  for (int f = 0; f < F; ++f) {
    const typename V::Mask better = V::less(chunk.cost[f], best);
    if (!V::any(better)) continue;
    best = V::select(better, chunk.cost[f], best);
    V::replace_index(args.best_index, better, first + f);
    if (args.codes == nullptr) continue;
    for (int d = 0; d < args.head_dim; ++d)
      V::replace_codes(args.codes + d * V::kLanes, better, args.trial + (d * F + f) * V::kLanes);
  }
  V::store(args.best_cost, best);
}

template <int F>
void try_chunk(const oscar::CandidateArgs& args, int first) {
  Chunk<F> chunk = load_chunk<F>(args, first);
  const bool codes = args.codes != nullptr || args.sweeps > 0;
  if (args.feedback) {
    codes ? first_pass<F, true, true>(args, chunk) : first_pass<F, true, false>(args, chunk);
  } else {
    codes ? first_pass<F, false, true>(args, chunk) : first_pass<F, false, false>(args, chunk);
  }
  for (int i = 0; i < args.sweeps; ++i) sweep<F>(args, chunk);
  keep_best<F>(args, chunk, first);
}

void try_candidates(const oscar::CandidateArgs& args) {
  int first = 0;
  while (first < args.num_candidates) {
    const int left = args.num_candidates - first;
    const int size = left < V::kMaxCandidates ? left : V::kMaxCandidates;
    if constexpr (V::kMaxCandidates >= 6)
      if (size == 6) try_chunk<6>(args, first);
    if constexpr (V::kMaxCandidates >= 5)
      if (size == 5) try_chunk<5>(args, first);
    if constexpr (V::kMaxCandidates >= 4)
      if (size == 4) try_chunk<4>(args, first);
    if constexpr (V::kMaxCandidates >= 3)
      if (size == 3) try_chunk<3>(args, first);
    if constexpr (V::kMaxCandidates >= 2)
      if (size == 2) try_chunk<2>(args, first);
    if (size == 1) try_chunk<1>(args, first);
    first += size;
  }
}

// x L and y L by the same panels, then the five sums.
void metric_products(const oscar::MetricProductArgs& args) {
  V xx = V::zero(), xy = V::zero(), yy = V::zero(), x1 = V::zero(), y1 = V::zero();
  const float* panel = args.l_panels;
  for (int begin = args.head_dim - kBlock; begin >= 0; begin -= kBlock) {
    V x[kBlock], y[kBlock];
    for (int k = 0; k < kBlock; ++k) x[k] = y[k] = V::zero();
    for (int j = args.head_dim - 1; j >= begin; --j, panel += kBlock) {
      const V xj = V::load(args.x + j * V::kLanes), yj = V::load(args.y + j * V::kLanes);
      for (int k = 0; k < kBlock; ++k) {
        x[k] = V::fma(V::set1(panel[k]), xj, x[k]);
        y[k] = V::fma(V::set1(panel[k]), yj, y[k]);
      }
    }
#pragma GCC unroll 8
    for (int k = kBlock - 1; k >= 0; --k) {
      const V pivot = V::set1(args.pivot[begin + k]);
      const V weighted_x = V::mul(pivot, x[k]), weighted_y = V::mul(pivot, y[k]);
      const V one = V::set1(args.ones_l[begin + k]);
      xx = V::fma(weighted_x, x[k], xx);
      xy = V::fma(weighted_x, y[k], xy);
      yy = V::fma(weighted_y, y[k], yy);
      x1 = V::fma(weighted_x, one, x1);
      y1 = V::fma(weighted_y, one, y1);
    }
  }
  V::store(args.xx, xx);
  V::store(args.xy, xy);
  V::store(args.yy, yy);
  V::store(args.x1, x1);
  V::store(args.y1, y1);
}

}  // namespace
