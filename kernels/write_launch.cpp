#include "kernels/write_launch.h"

#include <algorithm>

namespace oscar {

WriteGrid choose_write_grid(int num_tiles, int sides, int multiprocessors, int warps, int rounds) {
  WriteGrid grid;
  grid.tiles_per_block = warps * rounds;
  const auto blocks = [&] { return (num_tiles + grid.tiles_per_block - 1) / grid.tiles_per_block; };
  while (grid.tiles_per_block > 1 && int64_t{blocks()} * sides < multiprocessors)
    grid.tiles_per_block = (grid.tiles_per_block + 1) / 2;
  grid.blocks = blocks();
  return grid;
}

}  // namespace oscar
