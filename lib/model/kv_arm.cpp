#include "model/kv_arm.h"

#include <algorithm>

#include "base/error.h"

namespace oscar {
namespace {

void check_side(const SideArm& side, const std::string& where, const ModelConfig& config) {
  const size_t heads = config.num_kv_heads;
  const size_t width = config.head_dim;
  if (!side.rotation.empty()) {
    const Shape& shape = side.rotation.shape;
    OSCAR_CHECK(shape.size() == 3 && (shape[0] == 1 || shape[0] == heads) && shape[1] == width &&
                    shape[2] == width,
                where, ": rotation has shape ", to_string(shape), ", expected [1 or ", heads, ", ",
                width, ", ", width, "]");
  }
  if (!side.mean.empty()) {
    OSCAR_CHECK(side.mean.shape == Shape({heads, width}), where, ": mean has shape ",
                to_string(side.mean.shape), ", expected [", heads, ", ", width, "]");
  }
  if (!side.position_mean.empty()) {
    OSCAR_CHECK(side.position_mean.shape == Shape({heads, width}), where,
                ": position mean has shape ", to_string(side.position_mean.shape), ", expected [",
                heads, ", ", width, "]");
  }
  OSCAR_CHECK(side.codecs.size() == 1 || side.codecs.size() == heads, where, ": ",
              side.codecs.size(), " codecs, expected 1 or ", heads);
  for (const auto& codec : side.codecs) {
    OSCAR_CHECK(codec != nullptr, where, ": codec missing");
    OSCAR_CHECK(codec->spec().head_dim == static_cast<int>(width), where, ": codec of width ",
                codec->spec().head_dim, ", expected ", width);
    OSCAR_CHECK(codec->token_block() == side.codecs[0]->token_block() &&
                    codec->bytes_per_block() == side.codecs[0]->bytes_per_block(),
                where, ": the codecs of the heads store different sizes");
  }
}

}  // namespace

void check(const KvArm& arm, const ModelConfig& config) {
  OSCAR_CHECK(config.num_layers > 0 && config.num_heads > 0 && config.num_kv_heads > 0 &&
                  config.head_dim > 0,
              "arm ", arm.name, ": the model has no layers, heads or head width");
  OSCAR_CHECK(config.num_heads % config.num_kv_heads == 0, "arm ", arm.name, ": ", config.num_heads,
              " query heads are not a multiple of ", config.num_kv_heads, " KV heads");
  if (!arm.quantized) return;
  OSCAR_CHECK(arm.layers.size() == config.num_layers, "arm ", arm.name, " has ", arm.layers.size(),
              " layers, the model ", config.num_layers);
  for (size_t layer = 0; layer < arm.layers.size(); ++layer) {
    const std::string where = cat("arm ", arm.name, ", layer ", layer);
    check_side(arm.layers[layer].k, where + ", keys", config);
    check_side(arm.layers[layer].v, where + ", values", config);
    OSCAR_CHECK(arm.layers[layer].v.position_mean.empty(), where,
                ", values: values have no position to be centered by");
    const size_t rotary_dim = arm.rope.rotary_dim;
    OSCAR_CHECK(arm.layers[layer].k.position_mean.empty() ||
                    (rotary_dim > 0 && rotary_dim % 2 == 0 && rotary_dim <= config.head_dim),
                where, ", keys: centered by position with a rotary width of ", rotary_dim,
                ", expected an even one up to ", config.head_dim);
  }
  if (arm.windows.mode != WindowMode::kServing) return;
  const size_t flush = flush_block(arm);
  OSCAR_CHECK(arm.windows.sink % flush == 0, "arm ", arm.name, ": serving windows need a sink that",
              " is a multiple of ", flush, " tokens, got ", arm.windows.sink);
  OSCAR_CHECK(arm.windows.recent % flush == 0, "arm ", arm.name, ": serving windows need a recent",
              " window that is a multiple of ", flush, " tokens, got ", arm.windows.recent);
}

}  // namespace oscar
