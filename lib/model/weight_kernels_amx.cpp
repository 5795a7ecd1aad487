#include "model/amx_tiles.h"
#include "model/tile_products.h"
#include "model/weight_element_bf16.h"
#include "model/weight_panels_simd.h"

namespace oscar {
namespace {

static_assert(kRowWidth == kPanelWidth && kStepsPerUnit == kTile);

// A unit of 32 columns is one tile of pairs for 16 tokens: [units][32 tokens][16 pairs].
void pack_tokens(const PackTokensArgs& args) {
  const size_t units = (args.columns + kColumnUnit - 1) / kColumnUnit;
  for (size_t t = 0; t < kPanelWidth; ++t) {
    for (size_t u = 0; u < units; ++u)
      pack_token_unit(args, t, u, args.panel + (u * kPanelWidth + t) * kTile);
  }
}

const WeightKernels kKernels = {
    gemv,
    {kPanelWidth, kRowWidth, Element::kColumns, pack_tokens, pack_weights,
     multiply_panels<AmxTiles>, AmxTiles::start, AmxTiles::stop}};

}  // namespace

const WeightKernels& weight_kernels_amx() { return kKernels; }

}  // namespace oscar
