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

inline V inverse_or_zero(V scale) {
  const typename V::Mask positive = V::less(V::zero(), scale);
  const V usable = V::select(positive, scale, V::set1(1.0F));
  return V::select(positive, V::div(V::set1(1.0F), usable), V::zero());
}

// Code of a value `above` the low end; an inverse scale of 0 gives code 0.
inline V round_code(V above, V inverse, V top) {
  const V position = V::fma(above, inverse, V::set1(0.5F));
  return V::floor(V::min(V::max(position, V::zero()), top));
}

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
    chunk.inverse[f] = inverse_or_zero(chunk.scale[f]);
    chunk.cost[f] = V::zero();
  }
  return chunk;
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
        const V target = kFeedback ? sum[k][f] : x;
        const V code = round_code(V::sub(target, chunk.low[f]), chunk.inverse[f], top);
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

// One sweep over kColumns columns of A; wider blocks have more independent sums under way.
template <int kColumns>
void sweep_block(const oscar::SweepArgs& args, int begin, V scale, V inverse, V low) {
  const V top = V::set1(static_cast<float>(args.max_code));
  const float* panels = args.a_panels + begin * args.head_dim;
  const auto entry = [&](int row, int column) {
    return V::set1(panels[(column / kBlock * args.head_dim + row) * kBlock + column % kBlock]);
  };
  V gradient[kColumns];
  for (int k = 0; k < kColumns; ++k) gradient[k] = V::zero();
  for (int j = 0; j < args.head_dim; ++j) {
    const V error = V::load(args.error + j * V::kLanes);
#pragma GCC unroll 8
    for (int k = 0; k < kColumns; ++k) gradient[k] = V::fma(entry(j, k), error, gradient[k]);
  }
#pragma GCC unroll 8
  for (int k = 0; k < kColumns; ++k) {
    const int d = begin + k;
    const V x = V::load(args.x + d * V::kLanes);
    float* slot = args.error + d * V::kLanes;
    const V before = V::load(slot);
    const V best = V::sub(before, V::mul(gradient[k], V::set1(args.a_inverse[d])));
    const V code = round_code(V::sub(V::sub(x, best), low), inverse, top);
    const V error = V::sub(x, V::fma(code, scale, low));
    V::store(slot, error);
    V::store_codes(args.codes + d * V::kLanes, code);
    const V delta = V::sub(error, before);
#pragma GCC unroll 8
    for (int next = k + 1; next < kColumns; ++next)
      gradient[next] = V::fma(entry(d, next), delta, gradient[next]);
  }
}

void sweep_codes(const oscar::SweepArgs& args) {
  const V scale = V::load(args.scale), low = V::load(args.low), inverse = inverse_or_zero(scale);
  for (int d = 0; d < args.head_dim; ++d) {
    const V value = V::fma(V::load_codes(args.codes + d * V::kLanes), scale, low);
    V::store(args.error + d * V::kLanes, V::sub(V::load(args.x + d * V::kLanes), value));
  }
  for (int i = 0; i < args.sweeps; ++i) {
    int begin = 0;
    for (; begin + 2 * kBlock <= args.head_dim; begin += 2 * kBlock)
      sweep_block<2 * kBlock>(args, begin, scale, inverse, low);
    if (begin < args.head_dim) sweep_block<kBlock>(args, begin, scale, inverse, low);
  }
}

// Squared errors of F ranges, in units of their scale.
template <int F>
void try_range_chunk(const oscar::RangeArgs& args, int first) {
  const V top = V::set1(static_cast<float>(args.max_code));
  V inverse[F], offset[F], cost[F];
  for (int f = 0; f < F; ++f) {
    inverse[f] = inverse_or_zero(V::load(args.scale + (first + f) * V::kLanes));
    offset[f] = V::mul(V::load(args.low + (first + f) * V::kLanes), inverse[f]);
    cost[f] = V::zero();
  }
  for (int d = 0; d < args.head_dim; ++d) {
    const V x = V::load(args.x + d * V::kLanes);
#pragma GCC unroll 8
    for (int f = 0; f < F; ++f) {
      const V position = V::fms(x, inverse[f], offset[f]);
      const V code = V::nearest(V::min(V::max(position, V::zero()), top));
      const V error = V::sub(position, code);
      cost[f] = V::fma(error, error, cost[f]);
    }
  }
  V best = V::load(args.best_cost);
  for (int f = 0; f < F; ++f) {
    const V scale = V::load(args.scale + (first + f) * V::kLanes);
    const V squared = V::mul(cost[f], V::mul(scale, scale));
    const typename V::Mask better = V::less(squared, best);
    best = V::select(better, squared, best);
    V::replace_index(args.best_index, better, first + f);
  }
  V::store(args.best_cost, best);
}

void try_ranges(const oscar::RangeArgs& args) {
  constexpr int kAtOnce = V::kMaxCandidates < 3 ? V::kMaxCandidates : 6;
  int first = 0;
  for (; first + kAtOnce <= args.num_candidates; first += kAtOnce)
    try_range_chunk<kAtOnce>(args, first);
  for (; first < args.num_candidates; ++first) try_range_chunk<1>(args, first);
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
  const bool codes = args.codes != nullptr;
  if (args.feedback) {
    codes ? first_pass<F, true, true>(args, chunk) : first_pass<F, true, false>(args, chunk);
  } else {
    codes ? first_pass<F, false, true>(args, chunk) : first_pass<F, false, false>(args, chunk);
  }
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
