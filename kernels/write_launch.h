// How the cache writers that hold matrices in shared memory cut their tiles over thread blocks.
#pragma once

#include "kernels/write_int2.h"

namespace oscar {

struct WriteGrid {
  int tiles_per_block = 0;
  int blocks = 0;  // a head and side
};
// What the choice depends on: num_tiles tiles of each of `sides` (head, side) pairs, of num_pairs
// side pairs (layers) in turn; `slots` thread blocks run at once and take tiles_per_round tiles at
// a time; loading a side's matrices takes as long as load_rounds rounds.
struct WriteProblem {
  int num_tiles = 0, sides = 0, num_pairs = 1;
  int slots = 0, tiles_per_round = 0, max_rounds = 1;
  double load_rounds = 0.0;
};
// Tiles a thread block: a power of two up to tiles_per_round * max_rounds, the one with the
// shortest estimated time (waves of blocks times loads and rounds of a block). Pure.
WriteGrid choose_write_grid(const WriteProblem& problem);

// Throws Error on unsupported parameters; op names the operation.
void check_write(const WriteParams& params, const char* op);

}  // namespace oscar
