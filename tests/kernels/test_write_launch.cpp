#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "base/float16.h"
#include "kernels/write_launch.h"

using namespace oscar;

TEST_CASE("write grid: every tile once, few waves, layers apart", "[kernels]") {
  for (const int tiles : {1, 2, 15, 16, 17, 256, 1152, 100000})
    for (const int sides : {2, 16, 64}) {
      const WriteGrid grid = choose_write_grid({tiles, sides, 1, 132, 16, 8, 1.0});
      CHECK(grid.tiles_per_block >= 1);
      CHECK(grid.tiles_per_block <= 128);
      CHECK(int64_t{grid.blocks} * grid.tiles_per_block >= tiles);
      CHECK(int64_t{grid.blocks - 1} * grid.tiles_per_block < tiles);
    }
  // 4096 tokens of 8 heads: one wave of two rounds, not two waves of one.
  CHECK(choose_write_grid({256, 16, 1, 132, 16, 8, 1.0}).blocks == 8);
  // A long chunk loads its matrices seldom.
  CHECK(choose_write_grid({2048, 16, 1, 132, 16, 8, 1.0}).tiles_per_block == 128);
  // One tile of each of 36 layers: a block does not go through many layers in turn.
  CHECK(choose_write_grid({36, 16, 36, 132, 16, 8, 1.0}).tiles_per_block <= 2);
}

TEST_CASE("write matrices: the packed pieces add up to the entries", "[kernels]") {
  const int dim = 96;
  std::vector<float> l(dim * dim, 0.0F), pivot(dim, 0.5F);
  for (int i = 0; i < dim; ++i)
    for (int j = 0; j <= i; ++j)
      l[static_cast<size_t>(i * dim + j)] =
          i == j ? 1.0F : 0.37F * static_cast<float>((i * 7 + j * 3) % 11 - 5);
  const std::vector<uint8_t> packed = pack_write_metric(l.data(), pivot.data(), dim);
  CHECK(packed.size() == static_cast<size_t>(write_metric_bytes(dim)));
  const auto half = [&](size_t offset) {
    uint16_t bits = 0;
    std::memcpy(&bits, packed.data() + offset, 2);
    return static_cast<double>(fp16_to_float(bits));
  };
  // Column block 1, row block 3: the tile after the 6 of column 0 and two of its own.
  const size_t tile = (6 + 2) * 1024;
  for (size_t lane = 0; lane < 32; ++lane)
    for (size_t i = 0; i < 8; ++i) {
      const size_t t = lane % 4, row = 48 + 2 * t + i % 2 + i / 2 % 2 * 8;
      const size_t column = 16 + lane / 4 + i / 4 * 8;
      const size_t offset = tile + lane * 16 + 2 * i;
      const double value =
          (half(offset) + half(offset + 512)) / static_cast<double>(256 >> (2 * t));
      CHECK(std::abs(value - static_cast<double>(l[row * dim + column])) < 1e-6);
    }
  std::vector<float> wrong = l;
  wrong[dim] = 240.0F;
  CHECK_THROWS_AS(pack_write_metric(wrong.data(), pivot.data(), dim), Error);
  pivot[3] = 0.0F;
  CHECK_THROWS_AS(pack_write_metric(l.data(), pivot.data(), dim), Error);
  CHECK_THROWS_AS(pack_write_rotation(l.data(), 100, WriteEncoder::kRtn), Error);
}
