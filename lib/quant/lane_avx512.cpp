// Lane kernels for AVX-512 F, BW, VL, DQ: 16 rows at a time.
#include "quant/lane_kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)

#include <immintrin.h>

#include <cstring>

namespace {

struct V {
  static constexpr int kLanes = 16;
  static constexpr int kMaxCandidates = 6;
  using Mask = __mmask16;
  __m512 v;

  static V zero() { return {_mm512_setzero_ps()}; }
  static V set1(float value) { return {_mm512_set1_ps(value)}; }
  static V bits(uint32_t pattern) {
    return {_mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(pattern)))};
  }
  static V load(const float* from) { return {_mm512_loadu_ps(from)}; }
  static void store(float* to, V a) { _mm512_storeu_ps(to, a.v); }
  static V add(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
  static V sub(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
  static V mul(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
  static V div(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
  static V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  static V min(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }
  static V max(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
  static V abs(V a) { return {_mm512_abs_ps(a.v)}; }
  static V fms(V a, V b, V c) { return {_mm512_fmsub_ps(a.v, b.v, c.v)}; }
  static V nearest(V a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  }
  static V floor(V a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
  }
  static Mask less(V a, V b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
  static bool any(Mask mask) { return mask != 0; }
  static V select(Mask mask, V yes, V no) { return {_mm512_mask_blend_ps(mask, no.v, yes.v)}; }
  static V or_bits(V a, V b) { return {_mm512_or_ps(a.v, b.v)}; }
  static V one_where_bits_ge(V a, V b) {
    const Mask mask =
        _mm512_cmp_epu32_mask(_mm512_castps_si512(a.v), _mm512_castps_si512(b.v), _MM_CMPINT_NLT);
    return {_mm512_maskz_mov_ps(mask, _mm512_set1_ps(1.0F))};
  }
  static V round_fp16(V a) {
    return {_mm512_cvtph_ps(_mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
  }
  static void store_codes(uint8_t* to, V a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(a.v)));
  }
  static V load_codes(const uint8_t* from) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes))};
  }
  static void replace_codes(uint8_t* to, Mask mask, const uint8_t* from) {
    _mm_mask_storeu_epi8(to, mask, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static void replace_index(int32_t* to, Mask mask, int index) {
    _mm512_mask_storeu_epi32(to, mask, _mm512_set1_epi32(index));
  }
};

}  // namespace

#include "quant/lane_feedback_impl.h"
#include "quant/lane_rtn_impl.h"

namespace {

// 16 x 16 transpose: pairs, then quads inside 128-bit lanes, then the lanes themselves.
void transpose16(__m512* r) {
  __m512 t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

int load_rows(const float* rows, size_t row_stride, int count, int period, int head_dim, float* x) {
  constexpr int kNotFinite = 0x99;  // quiet and signaling NaN, both infinities
  unsigned bad_rows = 0;
  for (int first = 0; first < head_dim; first += 16) {
    const int width = head_dim - first < 16 ? head_dim - first : 16;
    const auto mask = static_cast<__mmask16>((1U << width) - 1U);
    __m512 tile[16];
    for (int row = 0; row < 16; ++row) {
      const int source = row % period < count ? row % period : count - 1;
      tile[row] =
          _mm512_maskz_loadu_ps(mask, rows + static_cast<size_t>(source) * row_stride + first);
      if (_mm512_fpclass_ps_mask(tile[row], kNotFinite) != 0) bad_rows |= 1U << source;
    }
    transpose16(tile);
    for (int d = 0; d < width; ++d) _mm512_storeu_ps(x + (first + d) * 16, tile[d]);
  }
  return bad_rows == 0 ? -1 : __builtin_ctz(bad_rows);
}

// 16 codes of 2 bits lie in 4 bytes: every lane gets the same 32 bits shifted by its own amount,
// and the in-lane permute looks only at the two lowest bits, so no mask is needed.
void decode2_consecutive(const oscar::DecodeArgs& args) {
  const __m512i shifts =
      _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  for (int first = 0; first < args.head_dim; first += args.group) {
    const __m512 levels =
        _mm512_broadcast_f32x4(_mm_loadu_ps(args.levels + 4 * (first / args.group)));
    for (int d = first; d < first + args.group; d += 16) {
      int word;
      std::memcpy(&word, args.codes + d / 4, 4);
      const __m512i codes = _mm512_srlv_epi32(_mm512_set1_epi32(word), shifts);
      _mm512_storeu_ps(args.row + d, _mm512_permutevar_ps(levels, codes));
    }
  }
}

// Byte j holds dims j, j + D/4, ...: one load of 16 bytes gives 16 consecutive dims of each
// quarter.
void decode2_quartered(const oscar::DecodeArgs& args) {
  const int quarter = args.head_dim / 4;
  for (int j = 0; j < quarter; j += 16) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(args.codes + j));
    __m512i codes = _mm512_cvtepu8_epi32(bytes);
    for (int d = j; d < args.head_dim; d += quarter) {
      const __m512 levels =
          _mm512_broadcast_f32x4(_mm_loadu_ps(args.levels + 4 * (d / args.group)));
      _mm512_storeu_ps(args.row + d, _mm512_permutevar_ps(levels, codes));
      codes = _mm512_srli_epi32(codes, 2);
    }
  }
}

void decode4_consecutive(const oscar::DecodeArgs& args) {
  const __m512i shifts =
      _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  for (int first = 0; first < args.head_dim; first += args.group) {
    const __m512 levels = _mm512_loadu_ps(args.levels + 16 * (first / args.group));
    for (int d = first; d < first + args.group; d += 16) {
      int words[2];
      std::memcpy(words, args.codes + d / 2, 8);
      const __m512i both =
          _mm512_inserti32x8(_mm512_set1_epi32(words[0]), _mm256_set1_epi32(words[1]), 1);
      _mm512_storeu_ps(args.row + d,
                       _mm512_permutexvar_ps(_mm512_srlv_epi32(both, shifts), levels));
    }
  }
}

void decode_row(const oscar::DecodeArgs& args) {
  const bool consecutive = args.order == oscar::PackOrder::kConsecutive;
  const bool whole = args.head_dim % 16 == 0 && args.group % 16 == 0;
  if (args.bits == 2 && consecutive && whole) return decode2_consecutive(args);
  if (args.bits == 2 && !consecutive && whole && args.head_dim % 64 == 0)
    return decode2_quartered(args);
  if (args.bits == 4 && consecutive && whole) return decode4_consecutive(args);
  decode_row_plain(args);
}

}  // namespace

namespace oscar {

const LaneKernels* avx512_lane_kernels() {
  static const LaneKernels kernels{"avx512",       V::kLanes,       load_rows,      kth_largest,
                                   min_max,        mean_of,         quantize,       dequantize,
                                   plain_products, metric_products, try_candidates, try_ranges,
                                   sweep_codes,    round_fp16,      decode_row};
  return &kernels;
}

}  // namespace oscar

#else

namespace oscar {
const LaneKernels* avx512_lane_kernels() { return nullptr; }
}  // namespace oscar

#endif
