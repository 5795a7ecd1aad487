// How the cache writers that hold matrices in shared memory cut their tiles over thread blocks.
#pragma once

#include "kernels/write_int2.h"

namespace oscar {

struct WriteGrid {
  int tiles_per_block = 0;
  int blocks = 0;  // a head and side
};
// num_tiles tiles of each of `sides` (head, side) pairs; a block of `warps` warps takes up to
// `rounds` tiles a warp: as many as possible (the matrices are loaded once a block), fewer while
// there are multiprocessors without a block. Pure.
WriteGrid choose_write_grid(int num_tiles, int sides, int multiprocessors, int warps, int rounds);

// Throws Error on unsupported parameters; op names the operation.
void check_write(const WriteParams& params, const char* op);

}  // namespace oscar
