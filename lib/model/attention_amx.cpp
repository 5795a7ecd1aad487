#if defined(__x86_64__)
#include "model/amx_tiles.h"
#include "model/attention_kernels.h"
#include "model/tile_products.h"

namespace oscar {
namespace {

thread_local bool t_started = false;

void start() {
  AmxTiles::start();
  t_started = true;
}
void stop() {
  AmxTiles::stop();
  t_started = false;
}

void gemm(size_t m, size_t n, size_t num_pairs, const uint32_t* a, size_t a_stride,
          const uint32_t* b, size_t b_stride, float scale, float* c, size_t c_stride,
          bool accumulate) {
  const bool alone = !t_started;
  if (alone) AmxTiles::start();
  multiply_pairs<AmxTiles>(
      {m, n, num_pairs, a, a_stride, b, b_stride, scale, c, c_stride, accumulate});
  if (alone) AmxTiles::stop();
}

void round_pairs(size_t m, size_t width, const float* rows, size_t row_stride, uint32_t* out,
                 size_t out_stride) {
  kPairsAvx512Bf16.round(m, width, rows, row_stride, out, out_stride);
}

}  // namespace

const PairKernels kPairsAmx = {gemm, round_pairs, start, stop};

}  // namespace oscar
#endif
