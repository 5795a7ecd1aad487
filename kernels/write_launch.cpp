#include "kernels/write_launch.h"

#include <cmath>

namespace oscar {

WriteGrid choose_write_grid(const WriteProblem& p) {
  WriteGrid best;
  double best_time = HUGE_VAL;
  for (int tiles = 1; tiles <= p.tiles_per_round * p.max_rounds; tiles *= 2) {
    const int blocks = (p.num_tiles + tiles - 1) / tiles;
    const double waves =
        std::ceil(static_cast<double>(blocks) * p.sides / static_cast<double>(p.slots));
    // A block that spans layers loads and rounds for each.
    const double runs = std::ceil(static_cast<double>(tiles) * p.num_pairs / p.num_tiles);
    const double rounds = std::ceil(tiles / runs / p.tiles_per_round);
    const double time = waves * runs * (p.load_rounds + rounds);
    if (time > best_time) continue;
    best_time = time;
    best = {tiles, blocks};
  }
  return best;
}

}  // namespace oscar
