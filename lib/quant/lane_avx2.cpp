// Lane kernels for AVX2 + FMA + F16C: 8 rows at a time.
#include "quant/lane_kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>

#include <cstring>

namespace {

struct V {
  static constexpr int kLanes = 8;
  static constexpr int kMaxCandidates = 2;  // 16 registers: 8 sums, 4 columns of L, 1 error
  struct Mask {
    __m256 m;
  };
  __m256 v;

  static V zero() { return {_mm256_setzero_ps()}; }
  static V set1(float value) { return {_mm256_set1_ps(value)}; }
  static V bits(uint32_t pattern) {
    return {_mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(pattern)))};
  }
  static V load(const float* from) { return {_mm256_loadu_ps(from)}; }
  static void store(float* to, V a) { _mm256_storeu_ps(to, a.v); }
  static V add(V a, V b) { return {_mm256_add_ps(a.v, b.v)}; }
  static V sub(V a, V b) { return {_mm256_sub_ps(a.v, b.v)}; }
  static V mul(V a, V b) { return {_mm256_mul_ps(a.v, b.v)}; }
  static V div(V a, V b) { return {_mm256_div_ps(a.v, b.v)}; }
  static V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  static V min(V a, V b) { return {_mm256_min_ps(a.v, b.v)}; }
  static V max(V a, V b) { return {_mm256_max_ps(a.v, b.v)}; }
  static V abs(V a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0F), a.v)}; }
  static V fms(V a, V b, V c) { return {_mm256_fmsub_ps(a.v, b.v, c.v)}; }
  static V nearest(V a) {
    return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  }
  static V floor(V a) { return {_mm256_floor_ps(a.v)}; }
  static Mask less(V a, V b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)}; }
  static bool any(Mask mask) { return _mm256_movemask_ps(mask.m) != 0; }
  static V select(Mask mask, V yes, V no) { return {_mm256_blendv_ps(no.v, yes.v, mask.m)}; }
  static V or_bits(V a, V b) { return {_mm256_or_ps(a.v, b.v)}; }
  // Both operands are magnitudes: their patterns compare as signed integers.
  static V one_where_bits_ge(V a, V b) {
    const __m256i less_mask =
        _mm256_cmpgt_epi32(_mm256_castps_si256(b.v), _mm256_castps_si256(a.v));
    return {_mm256_andnot_ps(_mm256_castsi256_ps(less_mask), _mm256_set1_ps(1.0F))};
  }
  static V round_fp16(V a) {
    return {_mm256_cvtph_ps(_mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
  }
  static void store_codes(uint8_t* to, V a) {
    const __m256i words = _mm256_cvttps_epi32(a.v);
    const __m128i halves =
        _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(halves, halves));
  }
  static V load_codes(const uint8_t* from) {
    const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes))};
  }
  static void replace_codes(uint8_t* to, Mask mask, const uint8_t* from) {
    const __m256i words = _mm256_castps_si256(mask.m);
    const __m128i halves =
        _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    const __m128i bytes = _mm_packs_epi16(halves, halves);
    const __m128i old = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(to));
    const __m128i fresh = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_blendv_epi8(old, fresh, bytes));
  }
  static void replace_index(int32_t* to, Mask mask, int index) {
    _mm256_maskstore_epi32(to, _mm256_castps_si256(mask.m), _mm256_set1_epi32(index));
  }
};

}  // namespace

#include "quant/lane_feedback_impl.h"
#include "quant/lane_rtn_impl.h"

namespace {

void transpose8(__m256* r) {
  __m256 t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}

int load_rows(const float* rows, size_t row_stride, int count, int period, int head_dim, float* x) {
  const __m256i all = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i largest = _mm256_set1_epi32(0x7f7fffff);
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  unsigned bad_rows = 0;
  for (int first = 0; first < head_dim; first += 8) {
    const int width = head_dim - first < 8 ? head_dim - first : 8;
    const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(width), all);
    __m256 tile[8];
    for (int row = 0; row < 8; ++row) {
      const int source = row % period < count ? row % period : count - 1;
      tile[row] = _mm256_maskload_ps(rows + static_cast<size_t>(source) * row_stride + first, mask);
      const __m256i above =
          _mm256_cmpgt_epi32(_mm256_and_si256(_mm256_castps_si256(tile[row]), magnitude), largest);
      if (_mm256_movemask_epi8(above) != 0) bad_rows |= 1U << source;
    }
    transpose8(tile);
    for (int d = 0; d < width; ++d) _mm256_storeu_ps(x + (first + d) * 8, tile[d]);
  }
  return bad_rows == 0 ? -1 : __builtin_ctz(bad_rows);
}

// See the AVX-512 version: 8 codes of 2 bits lie in 2 bytes.
void decode2_consecutive(const oscar::DecodeArgs& args) {
  const __m256i shifts = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
  for (int first = 0; first < args.head_dim; first += args.group) {
    const __m256 levels = _mm256_broadcast_ps(
        reinterpret_cast<const __m128*>(args.levels + 4 * (first / args.group)));
    for (int d = first; d < first + args.group; d += 8) {
      uint16_t word;
      std::memcpy(&word, args.codes + d / 4, 2);
      const __m256i codes = _mm256_srlv_epi32(_mm256_set1_epi32(word), shifts);
      _mm256_storeu_ps(args.row + d, _mm256_permutevar_ps(levels, codes));
    }
  }
}

void decode2_quartered(const oscar::DecodeArgs& args) {
  const int quarter = args.head_dim / 4;
  for (int j = 0; j < quarter; j += 8) {
    __m256i codes =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(args.codes + j)));
    for (int d = j; d < args.head_dim; d += quarter) {
      const __m256 levels =
          _mm256_broadcast_ps(reinterpret_cast<const __m128*>(args.levels + 4 * (d / args.group)));
      _mm256_storeu_ps(args.row + d, _mm256_permutevar_ps(levels, codes));
      codes = _mm256_srli_epi32(codes, 2);
    }
  }
}

// 8 codes of 4 bits lie in 4 bytes; bit 3 chooses between the two halves of the level table.
void decode4_consecutive(const oscar::DecodeArgs& args) {
  const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
  for (int first = 0; first < args.head_dim; first += args.group) {
    const float* levels = args.levels + 16 * (first / args.group);
    const __m256 low = _mm256_loadu_ps(levels), high = _mm256_loadu_ps(levels + 8);
    for (int d = first; d < first + args.group; d += 8) {
      int word;
      std::memcpy(&word, args.codes + d / 2, 4);
      const __m256i codes = _mm256_srlv_epi32(_mm256_set1_epi32(word), shifts);
      const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));
      _mm256_storeu_ps(args.row + d,
                       _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, codes),
                                        _mm256_permutevar8x32_ps(high, codes), upper));
    }
  }
}

void decode_row(const oscar::DecodeArgs& args) {
  const bool consecutive = args.order == oscar::PackOrder::kConsecutive;
  const bool whole = args.head_dim % 8 == 0 && args.group % 8 == 0;
  if (args.bits == 2 && consecutive && whole) return decode2_consecutive(args);
  if (args.bits == 2 && !consecutive && whole && args.head_dim % 32 == 0)
    return decode2_quartered(args);
  if (args.bits == 4 && consecutive && whole) return decode4_consecutive(args);
  decode_row_plain(args);
}

}  // namespace

namespace oscar {

const LaneKernels* avx2_lane_kernels() {
  static const LaneKernels kernels{"avx2",         V::kLanes,       load_rows,      kth_largest,
                                   min_max,        mean_of,         quantize,       dequantize,
                                   plain_products, metric_products, try_candidates, try_ranges,
                                   sweep_codes,    round_fp16,      decode_row};
  return &kernels;
}

}  // namespace oscar

#else

namespace oscar {
const LaneKernels* avx2_lane_kernels() { return nullptr; }
}  // namespace oscar

#endif
